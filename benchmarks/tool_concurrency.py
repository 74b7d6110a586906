"""Tools of a batch at once: 64 calls of 50 ms against one, and against the peers' ways.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/tool_concurrency.py

Wall time of one environment step in which every row calls a tool, medians of interleaved runs; all
must give the same answers. Ours is the whole step (turns parsed, arguments checked, calls run,
answers appended). TorchRL's is the item loop of its ``SimpleToolTransform``; TRL's is a loop of the
shape of its trainer's: sync tools in turn, async ones gathered one sample at a time. Then the CPU
time of a step whose tools take no time, and what one call more costs.
"""

import asyncio
import json
import statistics
import time

from torchrl.envs.llm.transforms import SimpleToolTransform
from torchrl.envs.transforms import Compose

from torchrl_data.conversation import Turn
from torchrl_data.conversation_io import read_conversations, write_conversations
from torchrl_data.keys import FULL, PROMPT
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_envs import ChatEnv, DataLoadingPrimer, FunctionTools, RewardFunctions, StepCounter
from torchrl_modules.tiny_model import train_tokenizer

SLEEP_S = 0.05
NUM_ROWS = 64
NUM_RUNS = 7
NUM_SERIAL_RUNS = 2
NUM_QUICK_RUNS = 60


def slow(x: int) -> int:
    """Double a number, slowly.

    Args:
        x: The number.
    """
    time.sleep(SLEEP_S)
    return 2 * x


async def slow_async(x: int) -> int:
    """Double a number, slowly.

    Args:
        x: The number.
    """
    await asyncio.sleep(SLEEP_S)
    return 2 * x


def quick(x: int) -> int:
    """Double a number.

    Args:
        x: The number.
    """
    return 2 * x


def zero(completions: list) -> list[float]:
    return [0.0] * len(completions)


def call(name: str, x: int) -> str:
    body = json.dumps({"name": name, "arguments": {"x": x}})
    return f"<tool_call>\n{body}\n</tool_call>"


class Ours:
    """The environment's step, from a ``full`` that is already there."""

    def __init__(self, tool, num_rows: int) -> None:
        rows = [{"prompt": "go"} for _ in range(num_rows)]
        parts = Compose(
            DataLoadingPrimer(rows),
            FunctionTools({"tool": tool}),
            RewardFunctions([zero]),
            StepCounter(max_steps=10**6),
        )
        self.env = ChatEnv(batch_size=num_rows).append_transform(parts)
        self.encoder = ConversationEncoder(train_tokenizer(["go"] * 4, vocab_size=300))
        self.num_rows = num_rows

    def prepare(self, turn):
        batch = self.env.reset()
        prompt = self.encoder.encode_waiting(read_conversations(batch, PROMPT, who="benchmark"))
        said = [
            Turn([1], [0.0], {"role": "assistant", "content": turn(i)})
            for i in range(self.num_rows)
        ]
        write_conversations(batch, FULL, prompt.append_turns(said))
        return batch

    def step(self, turn=lambda i: call("tool", i)) -> tuple[float, list[str]]:
        batch = self.prepare(turn)
        start = time.perf_counter()
        batch = self.env.step(batch)["next"]
        seconds = time.perf_counter() - start
        after = read_conversations(batch, PROMPT, who="benchmark")
        return seconds, [after.last_message(i)["content"] for i in range(self.num_rows)]


def torchrl_step() -> tuple[float, list[str]]:
    transform = SimpleToolTransform({"tool": slow})
    turns = [f'<tool>tool\n{{"x": {i}}}</tool>' for i in range(NUM_ROWS)]
    start = time.perf_counter()
    results = [transform._process_batch_item(turn, i) for i, turn in enumerate(turns)]
    return time.perf_counter() - start, [r[0].split("\n")[-1] for r in results]


def trl_step(tool) -> tuple[float, list[str]]:
    loop = asyncio.new_event_loop()
    start = time.perf_counter()
    results = []
    for i in range(NUM_ROWS):
        if asyncio.iscoroutinefunction(tool):
            results.append(loop.run_until_complete(tool(x=i)))
        else:
            results.append(tool(x=i))
    seconds = time.perf_counter() - start
    loop.close()
    return seconds, [str(r) for r in results]


def main() -> None:
    expected = [str(2 * i) for i in range(NUM_ROWS)]
    variants = {
        "ours, 1 row, sync": (Ours(slow, 1).step, NUM_RUNS),
        "ours, 64 rows, sync": (Ours(slow, NUM_ROWS).step, NUM_RUNS),
        "ours, 64 rows, async": (Ours(slow_async, NUM_ROWS).step, NUM_RUNS),
        "TorchRL, 64 rows": (torchrl_step, NUM_SERIAL_RUNS),
        "TRL's loop, 64 rows, sync": (lambda: trl_step(slow), NUM_SERIAL_RUNS),
        "TRL's loop, 64 rows, async": (lambda: trl_step(slow_async), NUM_SERIAL_RUNS),
    }
    for name, (step, _) in variants.items():  # warm, and the same answers
        _, answers = step()
        assert answers == expected[: len(answers)], name
    seconds = {name: [] for name in variants}
    for run in range(NUM_RUNS):
        for name, (step, num_runs) in variants.items():
            if run < num_runs:
                seconds[name].append(step()[0])
    one = statistics.median(seconds["ours, 1 row, sync"])
    print(f"A tool of {SLEEP_S * 1e3:.0f} ms, called by every row of a step:")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"  {name:28s} {median * 1e3:8.1f} ms   {median / one:6.2f} x one row")

    env = Ours(quick, NUM_ROWS)
    print("A tool that takes no time, 64 rows, data and counter in the step (CPU time):")
    times: dict[int, list[float]] = {1: [], 4: []}
    for _ in range(NUM_QUICK_RUNS):
        for num_calls, values in times.items():
            batch = env.prepare(lambda i, n=num_calls: call("tool", i) * n)
            start = time.process_time()
            env.env.step(batch)
            values.append(time.process_time() - start)
    medians = {num_calls: statistics.median(values) for num_calls, values in times.items()}
    for num_calls, median in medians.items():
        print(f"  {num_calls} call(s) a row: {median * 1e3:6.2f} ms")
    print(f"  a call more: {(medians[4] - medians[1]) / (3 * NUM_ROWS) * 1e6:6.1f} us")


if __name__ == "__main__":
    main()

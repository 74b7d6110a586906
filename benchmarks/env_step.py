"""One batched step of a chat environment without tokenising: what the framework costs.

    python benchmarks/env_step.py [--repeats 30] [--batch 64] [--without-peers]

64 rows, with data, a turn counter and an environment with a tool; the policy's turn is handed in,
so nothing is generated, and nothing is tokenised but for the two lines with ids. ``no call``: every
turn is read, none calls, and a user answers each. ``a call``: every row calls the tool, which
answers at once. ``ends``: every row ends, is scored and closed. ``torchrl`` is TorchRL's
``ChatEnv`` with its data primer and step counter, without a tool. ``call, ids`` is ``a call`` with
the tokens of the next prompt; ``trl, ids`` the same turn in TRL's own loop (the trainer's
``_tool_call_loop``: the calls run, their results tokenised, a turn parsed). All run interleaved in
one process; that all rows go on, and that every call was answered, is checked first. Medians of CPU
milliseconds, and the wall time of a step, for conversations of 1, 8 and 64 turns, and of a reset of
the whole batch.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, set_list_to_stack
from torchrl.envs.transforms import Compose
from trl_tool_turn import tokenizer_of_both, trl_turn

from torchrl_data.conversation import Conversations, Turn
from torchrl_data.conversation_io import read_conversations, write_conversations
from torchrl_data.keys import FULL, PROMPT
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    EnvironmentTools,
    EpisodeTransform,
    StepCounter,
)

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
GROUP = 8


class Adder:
    """A tool that costs nothing."""

    def reset(self) -> None:
        """Start."""

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        return a + b

    def get_reward(self) -> float:
        """Nothing to win."""
        return 0.0


class Asks(EpisodeTransform):
    """A user who answers every turn that no tool has answered."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        del tensordict
        prompt = read_conversations(next_tensordict, PROMPT, who="benchmark")
        answer = [{"role": "user", "content": "go on"}]
        write_conversations(next_tensordict, PROMPT, prompt.append_messages([answer] * len(prompt)))
        return next_tensordict


def grown(prompt: Conversations, turns: int) -> Conversations:
    """Conversations of so many turns more."""
    for _ in range(turns):
        call = [[{"role": "assistant", "content": CALL}, {"role": "tool", "content": "3"}]]
        prompt = prompt.append_messages(call * len(prompt))
    return prompt


def ours(batch: int, turns: int, what: str) -> Callable[[], Any]:
    rows = [{"prompt": f"question {i}"} for i in range(batch)]
    parts = [DataLoadingPrimer(rows, group_size=GROUP), StepCounter(max_steps=10**6)]
    parts.append(EnvironmentTools(Adder))
    if what == "no call":
        parts.append(Asks())
    env = ChatEnv(batch_size=batch).append_transform(Compose(*parts))
    start = env.reset()
    turn = CALL if what == "a call" else "done"
    prompt = grown(read_conversations(start, PROMPT, who="benchmark"), turns - 1)
    full = prompt.append_messages([[{"role": "assistant", "content": turn}]] * batch)

    lengths = [len(full.messages(i)) for i in range(batch)]

    def step() -> Any:
        # The end of the records again, as in a loop, so that nothing is copied.
        for record, length in zip(full._records, lengths, strict=True):
            del record.messages[length:]
        given = start.copy()
        write_conversations(given, FULL, full)
        return env.step(given)["next"]

    after = step()
    assert bool(after["done"].all() if what == "ends" else not after["done"].any())
    last = read_conversations(after, PROMPT, who="benchmark")
    answer = {"a call": "3", "no call": "go on", "ends": "done"}[what]
    assert all(last.last_message(i)["content"] == answer for i in range(batch))
    step.reset = env.reset  # type: ignore[attr-defined]
    step.close = env.close  # type: ignore[attr-defined]
    return step


def ours_with_ids(batch: int, turns: int) -> Callable[[], Any]:
    """Every step goes on from the last one, so the conversations have a few turns more."""
    tokenizer = tokenizer_of_both()
    rows = [{"prompt": f"question {i}"} for i in range(batch)]
    parts = [DataLoadingPrimer(rows, group_size=GROUP), StepCounter(max_steps=10**6)]
    parts.append(EnvironmentTools(Adder))
    env = ChatEnv(batch_size=batch, tokenizer=tokenizer).append_transform(Compose(*parts))
    encoder = env.base_env.encoder
    start = env.reset()
    prompt = grown(read_conversations(start, PROMPT, who="benchmark"), turns - 1)
    held = [encoder.encode_waiting(prompt)]
    ids = tokenizer.encode(f"{CALL}<|im_end|>", add_special_tokens=False)
    said = Turn(ids, [0.0] * len(ids), {"role": "assistant", "content": CALL})

    def step() -> Any:
        given = start.copy()
        write_conversations(given, FULL, held[0].append_turns([said] * batch))
        after = read_conversations(env.step(given)["next"], PROMPT, who="benchmark")
        held[0] = encoder.encode_waiting(after)
        return held[0]

    after = step()
    assert all(after.last_message(i)["content"] == "3" for i in range(batch))
    assert tokenizer.decode(after.ids(0)).endswith("<|im_start|>assistant\n")
    step.close = env.close  # type: ignore[attr-defined]
    return step


def trl(batch: int, turns: int) -> Callable[[], Any]:
    step = trl_turn(tokenizer_of_both(), [Adder() for _ in range(batch)], turns, CALL, "done")
    for row in step():
        assert [m["content"] for m in row[1:]] == ["3", "done"]
    return step


def torchrl(batch: int, turns: int) -> Callable[[], Any]:
    from torchrl.data.llm import History
    from torchrl.envs.llm import ChatEnv as TheirChatEnv
    from torchrl.envs.llm import DataLoadingPrimer as TheirPrimer

    loader = torch.utils.data.DataLoader(
        [{"query": f"question {i}"} for i in range(batch)],
        batch_size=batch,
        collate_fn=lambda rows: TensorDict(
            {"query": [row["query"] for row in rows]}, batch_size=[len(rows)]
        ),
    )
    env = TheirChatEnv(batch_size=(batch,), input_mode="history")
    env = env.append_transform(TheirPrimer(loader, batch_size=(batch,)))
    env = env.append_transform(StepCounter(max_steps=10**6))
    start = env.reset()
    chats = [
        [{"role": "user", "content": f"question {i}"}]
        + [{"role": "assistant", "content": CALL}, {"role": "tool", "content": "3"}] * (turns - 1)
        + [{"role": "assistant", "content": CALL}]
        for i in range(batch)
    ]
    full = History.from_chats(chats)

    def step() -> Any:
        given = start.copy()
        given.set(("history", "full"), full)
        return env.step(given)["next"]

    assert len(step()["history"].prompt[0]) == len(chats[0])
    return step


def measured(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, tuple[float, float]]:
    """Median CPU and wall milliseconds of interleaved runs."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name, run in runs.items():
            if name == "torchrl" and repeat >= 3:
                continue
            count = 1 if name in ("torchrl", "trl, ids") else 10
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(count):
                run()
            spent = time.process_time() - cpu, time.perf_counter() - wall
            samples[name].append((spent[0] / count * 1e3, spent[1] / count * 1e3))
    return {
        name: (statistics.median(c for c, _ in rows), statistics.median(w for _, w in rows))
        for name, rows in samples.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--profile", choices=["no call", "a call", "ends"])
    options = parser.parse_args()
    set_list_to_stack(True).set()
    torch.set_num_threads(1)
    if options.profile:
        step = ours(options.batch, 8, options.profile)
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(50):
            step()
        profile.disable()
        pstats.Stats(profile).sort_stats("cumulative").print_stats(60)
        return
    print(f"batch {options.batch}, CPU ms (wall ms)")
    flat = {}
    for turns in (1, 8, 64):
        cases = ("no call", "a call", "ends")
        runs = {what: ours(options.batch, turns, what) for what in cases}
        if not options.without_peers:
            runs["call, ids"] = ours_with_ids(options.batch, turns)
            runs["trl, ids"] = trl(options.batch, turns)
            if turns < 64:
                runs["torchrl"] = torchrl(options.batch, turns)
        result = measured(runs, options.repeats)
        flat[turns] = result["no call"][0]
        print(f"turns {turns}:")
        for name, (cpu, wall) in result.items():
            print(f"  {name:10s} {cpu:8.2f} ({wall:8.2f})", flush=True)
        if turns == 64:
            reset = measured({"reset": runs["ends"].reset}, options.repeats)["reset"]  # type: ignore[attr-defined]
            print(f"reset in groups of {GROUP}: {reset[0]:.2f} ms CPU, {reset[1]:.2f} ms")
        for run in runs.values():
            if hasattr(run, "close"):
                run.close()  # type: ignore[attr-defined]
    print(f"64 turns / 1 turn: {flat[64] / flat[1]:.2f}")


if __name__ == "__main__":
    main()

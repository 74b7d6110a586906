"""Batched steps of 64 OpenEnv sessions whose environment takes 50 ms, against blocking clients.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/openenv_step.py

A real server in a process of its own (see ``test/openenv_servers``). All variants step the same
sessions' worth of environments and must get the same observations. Wall time of one step of all
rows, medians of interleaved runs: ``OpenEnvTools`` in an environment (calls parsed, answers
appended), bare sessions on one event loop, OpenEnv's own synchronous clients in 16 threads and one
after the other. The floor is the 50 ms of the environment itself.
"""

import asyncio
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parent.parent / "test" / "openenv_servers"))

from process import ServerProcess
from typed_clients import EchoEnv

from torchrl_data.conversation import Turn
from torchrl_data.conversation_io import read_conversations, write_conversations
from torchrl_data.keys import FULL, PROMPT, STEP_MASK
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_envs import ChatEnv
from torchrl_envs.openenv import OpenEnvSession, OpenEnvTools
from torchrl_modules.tiny_model import train_tokenizer

NUM_ROWS = 64
SLEEP_S = 0.05
NUM_RUNS = 7
NUM_SERIAL_RUNS = 2


class TimedEchoAction:
    def __init__(self, message: str) -> None:
        self.message = message
        self.sleep_s = SLEEP_S


class Bare:
    """Sessions on one event loop."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.sessions = [OpenEnvSession(url) for _ in range(NUM_ROWS)]
        self.loop.run_until_complete(self._all(s.reset() for s in self.sessions))

    async def _all(self, coroutines):
        return await asyncio.gather(*coroutines)

    def step(self) -> list[str]:
        actions = [{"message": str(i), "sleep_s": SLEEP_S} for i in range(NUM_ROWS)]
        steps = (s.step(a) for s, a in zip(self.sessions, actions, strict=True))
        results = self.loop.run_until_complete(self._all(steps))
        return [r.observation["echoed_message"] for r in results]

    def close(self) -> None:
        self.loop.run_until_complete(self._all(s.close() for s in self.sessions))
        self.loop.close()


class InEnvironment:
    """OpenEnvTools: a policy's turns in, next prompts out."""

    def __init__(self, url: str) -> None:
        def text_of(result):
            return result.observation["echoed_message"]

        tools = OpenEnvTools(url, text_of=text_of, show_schemas=False)
        self.env = ChatEnv(batch_size=(NUM_ROWS,)).append_transform(tools)
        query = {"query": [f"row {i}" for i in range(NUM_ROWS)]}
        self.batch = self.env.reset(TensorDict(query, batch_size=[NUM_ROWS]))
        tokenizer = train_tokenizer(["hello"] * 4, vocab_size=300)
        self.encoder = ConversationEncoder(tokenizer)
        arguments = [{"message": str(i), "sleep_s": SLEEP_S} for i in range(NUM_ROWS)]
        calls = [json.dumps({"name": "echo", "arguments": a}) for a in arguments]
        self.turns = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]

    def prepare(self) -> None:
        prompt = self.encoder.encode_waiting(read_conversations(self.batch, PROMPT, who="here"))
        end = self.encoder.end_of_turn_id
        said = [Turn([end], [-0.1], {"role": "assistant", "content": t}) for t in self.turns]
        write_conversations(self.batch, FULL, prompt.append_turns(said))
        self.batch.set(STEP_MASK, torch.ones(NUM_ROWS, dtype=torch.bool))

    def step(self) -> list[str]:
        self.batch = self.env.step(self.batch).get("next")
        prompt = read_conversations(self.batch, PROMPT, who="here")
        return [prompt.last_message(i)["content"] for i in range(NUM_ROWS)]

    def close(self) -> None:
        self.env.close()


class BlockingClients:
    """OpenEnv's own client, synchronous."""

    def __init__(self, url: str, num_threads: int) -> None:
        self.pool = ThreadPoolExecutor(num_threads)
        self.clients = [EchoEnv(base_url=url) for _ in range(NUM_ROWS)]
        list(self.pool.map(lambda client: client.reset().observation, self.clients))

    def _step(self, i: int) -> str:
        return self.clients[i].step(TimedEchoAction(str(i))).observation.echoed_message

    def step(self) -> list[str]:
        return list(self.pool.map(self._step, range(NUM_ROWS)))

    def close(self) -> None:
        list(self.pool.map(lambda client: client.close(), self.clients))
        self.pool.shutdown()


def main() -> None:
    mounts = dict.fromkeys(("a", "b", "c", "d"), f"async_echo:{NUM_ROWS}")
    expected = [str(i) for i in range(NUM_ROWS)]
    with ServerProcess(**mounts) as server:
        variants = {
            "OpenEnvTools in an environment": InEnvironment(f"{server.url}/a"),
            "sessions on one event loop": Bare(f"{server.url}/b"),
            "OpenEnv's clients, 16 threads": BlockingClients(f"{server.url}/c", 16),
            "OpenEnv's clients, one by one": BlockingClients(f"{server.url}/d", 1),
        }
        times: dict[str, list[float]] = {name: [] for name in variants}
        for run in range(NUM_RUNS):
            for name, variant in variants.items():
                if "one by one" in name and run >= NUM_SERIAL_RUNS:
                    continue
                if isinstance(variant, InEnvironment):
                    variant.prepare()
                start = time.perf_counter()
                said = variant.step()
                times[name].append(time.perf_counter() - start)
                assert said == expected, name
        for variant in variants.values():
            variant.close()
    print(f"{NUM_ROWS} sessions, {SLEEP_S * 1000:g} ms in the environment; ms of a batched step")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:32s} {median * 1000:8.1f} ms   {median / SLEEP_S:6.1f}x of one step")


if __name__ == "__main__":
    main()

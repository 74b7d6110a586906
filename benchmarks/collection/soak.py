"""A streaming collection under faults: nothing is lost, nothing is left behind.

    PYTHONPATH=. python benchmarks/collection/soak.py --seconds 600

64 slots, four tools, weight updates and evaluations in flight; one turn or episode in ten meets one
of nine faults: a tool raises, hangs past its deadline, blocks its event loop; a call is malformed;
an environment fails to begin; a reward raises or is NaN; the engine refuses a row, or dies under
all of its requests. The last line of the output is one JSON object.
"""

import argparse
import asyncio
import gc
import json
import logging
import math
import os
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import Drop, StreamingCollector, Wait
from objectives import MCAdvantage
from torchrl_data.stop_reason import kind_of
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    EnvironmentTools,
    FunctionTools,
    RewardErrorLimit,
    RewardFunctions,
    StepCounter,
)
from torchrl_modules import EngineDied, Generation, LLMWrapperBase
from torchrl_modules.engines.engine import VersionSpan
from torchrl_modules.tiny_model import train_tokenizer

GROUP_SIZE: Final = 4
GROUPS_PER_STEP: Final = 4
NUM_SLOTS: Final = 64
DEADLINE_S: Final = 0.2
_TURN_FAULTS: Final = ("raises", "hangs", "blocks", "malformed")
_END: Final = "<|im_end|>"


class Sandbox:
    """An environment that holds a file, and sometimes does not begin."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)

    def reset(self) -> None:
        """Begin."""
        if random.random() < 0.02:
            raise OSError("no room")

    def write(self, text: str) -> str:
        """Write.

        Args:
            text: what.
        """
        self._file.write(text.encode())
        return "written"

    def close(self) -> None:
        """Give the file back."""
        self._file.close()


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one.
        b: another.
    """
    return a + b


async def wait(how: str) -> str:
    """Wait: for a moment, for ever, or without letting others go on.

    Args:
        how: which of them.
    """
    if how == "blocks":
        time.sleep(2 * DEADLINE_S)
    await asyncio.sleep(10.0 if how == "hangs" else 0.002)
    return "waited"


def fail(reason: str) -> str:
    """Fail.

    Args:
        reason: with what.
    """
    raise ValueError(reason)


def reward(completions: list) -> list[float]:
    """Any number; sometimes none."""
    if random.random() < 0.02:
        raise RuntimeError("no reward")
    return [math.nan if random.random() < 0.01 else random.random() for _ in completions]


class FaultyEngine:
    """Says random turns with calls, refuses some, and dies now and then."""

    def __init__(self) -> None:
        names = ["add", "wait", "fail", "write", "hangs", "blocks", "moment"]
        texts = [
            f'<tool_call>\n{{"name": "{n}", "arguments": {{"a": 1}}}}\n</tool_call>' for n in names
        ]
        self.tokenizer = train_tokenizer(
            [*texts, "question answer user assistant"] * 4, vocab_size=420
        )
        self.version = 0
        self.deaths = self.refusals = 0
        self._epoch = 0

    async def respond(self, *_: Any, **__: Any) -> Generation:
        """One response after a moment, with all tokens of one version."""
        epoch = self._epoch
        await asyncio.sleep(0.001 * random.lognormvariate(1.5, 1.0))
        if epoch != self._epoch:
            raise EngineDied("it died under its requests")
        draw = random.random()
        if draw < 0.0005:
            self.deaths += 1
            self._epoch += 1
            raise EngineDied("it died")
        if draw < 0.02:
            self.refusals += 1
            return Generation([], [], "error", "the row is refused")
        ids = self.tokenizer.encode(self._text() + _END, add_special_tokens=False)
        span = [VersionSpan(self.version, 0, len(ids))]
        return Generation(ids, [-0.5] * len(ids), "stop", versions=span)

    def _text(self) -> str:
        if random.random() < 0.4:
            return "answer"
        fault = random.choice(_TURN_FAULTS) if random.random() < 0.1 else ""
        calls = {
            "raises": ("fail", {"reason": "broken"}),
            "hangs": ("wait", {"how": "hangs"}),
            "blocks": ("wait", {"how": "blocks"}),
            "": random.choice(
                [
                    ("add", {"a": 1, "b": 2}),
                    ("wait", {"how": "moment"}),
                    ("write", {"text": "x" * 64}),
                ]
            ),
        }
        if fault == "malformed":
            return '<tool_call>\n{"name": "add", "arguments": {\n</tool_call>'
        name, arguments = calls[fault]
        call = json.dumps({"name": name, "arguments": arguments})
        return f"<tool_call>\n{call}\n</tool_call>"

    async def update_weights(self, _: Any, *, version: int | None = None) -> None:
        """Take the version over."""
        await asyncio.sleep(0.005)
        self.version = self.version + 1 if version is None else version

    async def pause(self) -> None:
        """Nothing to do."""

    async def resume(self) -> None:
        """Nothing to do."""

    def end_session(self, session: Any) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""


def make_env(group_size: int, batch_size: int) -> Any:
    """A chat with four tools, an environment of each episode's own, a reward and a turn limit."""
    rows = [{"prompt": f"question {i}"} for i in range(256)]
    return ChatEnv(batch_size=batch_size).append_transform(
        Compose(
            DataLoadingPrimer(rows, group_size=group_size, shuffle=True),
            EnvironmentTools(Sandbox),
            FunctionTools([add, wait, fail], timeout_s=DEADLINE_S),
            RewardFunctions([reward]),
            StepCounter(max_steps=6),
            RewardErrorLimit(1.0),
        )
    )


class Held:
    """What the process holds: threads, children, files and memory."""

    def __init__(self) -> None:
        process = psutil.Process()
        self.threads = {t.name for t in threading.enumerate()}
        self.num_threads = threading.active_count()
        self.children = len(process.children(recursive=True))
        self.files = len(os.listdir("/proc/self/fd"))
        self.temporary = len(os.listdir(tempfile.gettempdir()))
        self.memory = process.memory_info().rss


def soak(seconds: float, seed: int) -> dict[str, Any]:
    """Collect, train on nothing, push and evaluate for so long; what came of it."""
    random.seed(seed)
    engine = FaultyEngine()
    policy = LLMWrapperBase(
        engine,  # type: ignore[arg-type]
        tokenizer=engine.tokenizer,
        generate_kwargs={"max_new_tokens": 64},
        write_tokens=False,
    )
    buffer = ReplayBuffer(
        storage=LazyStackStorage(GROUPS_PER_STEP * GROUP_SIZE),
        transform=MCAdvantage(GROUP_SIZE, zero_variance="refill"),
        batch_size=GROUPS_PER_STEP * GROUP_SIZE,
    )
    held_out = make_env(1, 8)
    env = make_env(GROUP_SIZE, GROUPS_PER_STEP * GROUP_SIZE)
    before = Held()
    weights = {"weight": torch.zeros(1000)}
    reasons: Counter[str] = Counter()
    memory: list[int] = []
    staleness = Wait(4) if seed % 2 == 0 else Drop(2)
    end = time.monotonic() + seconds
    with StreamingCollector(
        env,
        policy,
        replay_buffer=buffer,
        groups_per_step=GROUPS_PER_STEP,
        staleness=staleness,
        max_inflight_tasks=NUM_SLOTS,
        engine=engine,  # type: ignore[arg-type]
    ) as collector:
        step, oldest = 0, 0
        while time.monotonic() < end:
            batch = collector.collect()
            metrics = collector.metrics()
            oldest = max(oldest, int(metrics["ledger/staleness/max"]))
            reasons.update(kind_of(row["stop_reason"]) for row in batch.unbind(0))
            buffer.empty()
            collector.update_policy_weights_(weights)
            if step % 20 == 0:
                collector.evaluate(held_out)
            collector.take_evaluations()
            step += 1
            memory.append(psutil.Process().memory_info().rss)
    held_out.close()
    balance = collector.ledger.balance
    lost = {
        unit: getattr(balance.offered, unit)
        - sum(
            getattr(part, unit)
            for part in (balance.trained, balance.num_dropped, balance.returned, balance.in_flight)
        )
        for unit in ("groups", "tokens")
    }
    del collector, env, held_out, batch
    deadline = time.monotonic() + 15.0
    while time.monotonic() < deadline:
        gc.collect()
        after = Held()
        if after.num_threads <= before.num_threads and after.files <= before.files:
            break
        time.sleep(0.1)
    half = memory[len(memory) // 2 :]
    return {
        "steps": step,
        "lost": lost,
        "in_flight": balance.in_flight.groups,
        "trained": balance.trained.groups,
        "dropped": {reason: amount.groups for reason, amount in balance.dropped.items()},
        "max_age": oldest,
        "max_staleness": staleness.max_staleness,
        "stop_reasons": dict(reasons),
        "engine_deaths": engine.deaths,
        "rows_refused": engine.refusals,
        "threads_left": after.num_threads - before.num_threads,
        "files_left": after.files - before.files,
        "children_left": after.children - before.children,
        "temporary_files_left": after.temporary - before.temporary,
        "memory_growth_mib": round((half[-1] - half[0]) / 2**20, 1),
    }


def main() -> None:
    """Run it, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="even: Wait(4); odd: Drop(2)")
    settings = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        print(json.dumps(soak(settings.seconds, settings.seed)))
        assert not list(Path(folder).iterdir())


if __name__ == "__main__":
    main()

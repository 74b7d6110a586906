"""How collection on Ray scales with collectors, where environments take their time.

    python benchmarks/collection/ray_scaling.py --collectors 1 2 4 8

Environments sleep, so that what is measured is everything else: handing out groups, running
episodes, and fetching rows. Each collector runs so many episodes at a time, as one with a slice of
a cluster would. Reported: groups per second, the speed-up over one collector, the bytes that the
trainer's process is sent about a row beside the row itself, and those of a row.
"""

import argparse
import asyncio
import pickle
import sys
import time
from typing import Any

import torch
from torchrl.envs.transforms import Compose

from collectors import RayLLMCollector, Wait
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    EpisodeTransform,
    RewardFunctions,
    StepCounter,
)
from torchrl_modules import Generation, LLMWrapperBase, VersionSpan
from torchrl_modules.tiny_model import train_tokenizer

GROUP_SIZE = 4


class Sleeps(EpisodeTransform):
    """An environment in which a turn takes a while."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    async def after_turn(self, episode) -> None:
        """Wait."""
        del episode

        async def sleep():
            await asyncio.sleep(self.seconds)

        await self.call(sleep, timeout_s=60.0)


class Instant:
    """An engine that says the same at once."""

    version = 0

    async def respond(self, prompt, params, *, max_new_tokens=None, session=None) -> Generation:
        """Eight tokens."""
        del prompt, params, max_new_tokens, session
        ids = list(range(5, 13))
        return Generation(
            ids, [-1.0] * len(ids), "length", versions=[VersionSpan(self.version, 0, len(ids))]
        )

    async def update_weights(self, state_dict, *, version=None) -> None:
        """Count."""
        del state_dict
        self.version = self.version + 1 if version is None else version

    async def pause(self) -> None:
        """Nothing."""

    async def resume(self) -> None:
        """Nothing."""

    def end_session(self, session) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def no_reward(completions):
    """Zeros."""
    return [0.0] * len(completions)


def collector_of(num_collectors: int, args: argparse.Namespace) -> RayLLMCollector:
    """A collection with sleeping environments."""

    def make_env() -> Any:
        rows = [{"prompt": f"question {i}"} for i in range(100_000)]
        return ChatEnv(batch_size=(args.groups_per_step * GROUP_SIZE,)).append_transform(
            Compose(
                DataLoadingPrimer(rows, group_size=GROUP_SIZE),
                Sleeps(args.seconds),  # type: ignore[call-arg]
                RewardFunctions([no_reward]),
                StepCounter(max_steps=1),
            )
        )

    def make_policy() -> LLMWrapperBase:
        tokenizer = train_tokenizer(["user assistant system question 0123456789"] * 4)
        return LLMWrapperBase(
            Instant(),  # type: ignore[arg-type]
            tokenizer=tokenizer,
            generate_kwargs={"max_new_tokens": 8},
        )

    return RayLLMCollector(
        make_env,
        policy_factory=make_policy,
        groups_per_step=args.groups_per_step,
        staleness=Wait(8),
        max_inflight_tasks=args.episodes,
        num_collectors=num_collectors,
        ray_init_config={"num_cpus": 16, "log_to_driver": False, "object_store_memory": 200 << 20},
        remote_config={"num_cpus": 1},
    )


def measure(num_collectors: int, args: argparse.Namespace) -> tuple[float, float, float]:
    """Groups per second, bytes about a row, and bytes of a row."""
    weights = {"weight": torch.zeros(4)}
    with collector_of(num_collectors, args) as collector:
        collector.update_policy_weights_(state_dict=weights)
        while collector.metrics()["collect/num_collectors"] < num_collectors:
            time.sleep(0.2)
        for _ in range(args.warm_steps):
            collector.collect()
            collector.update_policy_weights_(state_dict=weights)
        begin = time.monotonic()
        batch = None
        for _ in range(args.steps):
            batch = collector.collect()
            collector.update_policy_weights_(state_dict=weights)
        seconds = time.monotonic() - begin
        about = collector.metrics()["collect/driver_bytes_per_row"]
    assert batch is not None
    rows = len(pickle.dumps(list(batch.unbind(0)))) / len(batch)
    return args.steps * args.groups_per_step / seconds, about, rows


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--collectors", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--episodes", type=int, default=8, help="that run at once in a collector")
    parser.add_argument("--seconds", type=float, default=2.0, help="that a turn takes")
    parser.add_argument("--groups-per-step", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-steps", type=int, default=3)
    args = parser.parse_args()
    first = None
    print("collectors  groups/s  speed-up  bytes about a row  bytes of a row")
    for number in args.collectors:
        speed, about, rows = measure(number, args)
        first = first or speed
        print(f"{number:>10}{speed:>10.2f}{speed / first:>10.2f}{about:>19.0f}{rows:>16.0f}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

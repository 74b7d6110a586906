"""How collection on Ray scales with collectors, where environments take their time.

    python benchmarks/collection/ray_scaling.py --collectors 1 2 4 8 --plot docs/img/ray-scaling.png

Environments sleep, so that what is measured is everything else: handing out groups, running
episodes, and fetching rows. Each collector runs so many episodes at a time, as one with a slice of
a cluster would. Reported: groups per second, the speed-up over one collector, and bytes for each
row: of the messages about it that the trainer's process was sent and has sent, all that went over
that process's TCP sockets meanwhile (`ss` counts it: messages, weights, Ray's own), and of the row.
"""

import argparse
import asyncio
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

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


class Figures(NamedTuple):
    """What was measured with so many collectors."""

    collectors: int
    groups_per_s: float
    about_row: float
    """Bytes of the messages about a row that the trainer's process was sent and has sent."""
    over_sockets: float
    """Bytes that went through all TCP sockets of the trainer's process, for each row."""
    of_row: float
    """Bytes of a row."""


def over_sockets() -> dict[str, int]:
    """Bytes that every TCP connection of this process has carried so far, both ways."""
    command = ["ss", "--tcp", "--info", "--processes", "--numeric", "--no-header", "--oneline"]
    found = {}
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    ):
        if f"pid={os.getpid()}," in line:
            counts = re.findall(r"bytes_(?:sent|received):(\d+)", line)
            found[" ".join(line.split()[3:5])] = sum(map(int, counts))
    return found


def measure(num_collectors: int, args: argparse.Namespace) -> Figures:
    """Collect for as long with each number of collectors."""
    weights = {"weight": torch.zeros(4)}
    with collector_of(num_collectors, args) as collector:
        collector.update_policy_weights_(state_dict=weights)
        while collector.metrics()["collect/num_collectors"] < num_collectors:
            time.sleep(0.2)
        for _ in range(args.warm_steps * num_collectors):
            collector.collect()
            collector.update_policy_weights_(state_dict=weights)
        before = over_sockets()
        begin = time.monotonic()
        batch = None
        num_steps = args.steps * num_collectors
        for _ in range(num_steps):
            batch = collector.collect()
            collector.update_policy_weights_(state_dict=weights)
        seconds = time.monotonic() - begin
        sent = sum(n - before.get(name, 0) for name, n in over_sockets().items())
        about = collector.metrics()["collect/driver_bytes_per_row"]
    assert batch is not None
    of_row = len(pickle.dumps(list(batch.unbind(0)))) / len(batch)
    num_groups = num_steps * args.groups_per_step
    return Figures(
        num_collectors,
        num_groups / seconds,
        about,
        sent / (num_groups * GROUP_SIZE),
        of_row,
    )


def plot(figures: list[Figures], path: Path, args: argparse.Namespace) -> None:
    """Groups per second beside what the sleeping alone lets through."""
    from matplotlib.figure import Figure

    numbers = [each.collectors for each in figures]
    most = args.episodes / args.seconds / GROUP_SIZE
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(numbers, [n * most for n in numbers], "--", color="0.6", label="sleeping alone")
    axes.plot(numbers, [each.groups_per_s for each in figures], "o-", label="measured")
    for each in figures:
        axes.annotate(
            f"{each.groups_per_s / figures[0].groups_per_s:.2f}x",
            (each.collectors, each.groups_per_s),
            textcoords="offset points",
            xytext=(6, -12),
        )
    axes.set(
        xlabel="collectors",
        ylabel="groups per second",
        xticks=numbers,
        xlim=(0, max(numbers) * 1.1),
        ylim=(0, None),
        title=f"Collection on Ray, a turn takes {args.seconds:g} s",
    )
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Print a table, and draw it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--collectors", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--episodes", type=int, default=8, help="that run at once in a collector")
    parser.add_argument("--seconds", type=float, default=2.0, help="that a turn takes")
    parser.add_argument("--groups-per-step", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="for each collector")
    parser.add_argument("--warm-steps", type=int, default=2, help="for each collector")
    parser.add_argument("--plot", type=Path, help="a PNG of the curve")
    args = parser.parse_args()
    figures: list[Figures] = []
    print("collectors  groups/s  speed-up  about a row  over sockets  of a row (bytes)")
    for number in args.collectors:
        figures.append(now := measure(number, args))
        speed_up = now.groups_per_s / figures[0].groups_per_s
        print(
            f"{number:>10}{now.groups_per_s:>10.2f}{speed_up:>10.2f}{now.about_row:>13.0f}"
            f"{now.over_sockets:>14.0f}{now.of_row:>10.0f}"
        )
        sys.stdout.flush()
    if args.plot is not None:
        plot(figures, args.plot, args)


if __name__ == "__main__":
    main()

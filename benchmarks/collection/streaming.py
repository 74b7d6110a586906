"""Collection with slow tools and heavy-tailed lengths, against the schedule that no overhead gives.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/collection/streaming.py

64 rollouts of three turns in 16 and in 256 slots: wall time over the streaming bound (the schedule
of the same trace, slots taking rollouts in their order), of `StreamingCollector`, of `LLMCollector`
in batches of as many rows as slots, and of a plain asyncio loop that only waits. Runs are
interleaved and medians taken; the rows must be the same. Then the CPU time of a turn and of an
episode as slots grow, everything counted but the plain loop's. Templates are compiled beforehand.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from simulated_rollouts import GROUP_SIZE, TURNS, Trace, make_env, make_policy
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer

from collectors import LLMCollector, StreamingCollector
from objectives import MCAdvantage

POLICY = make_policy()
ENGINE: Any = POLICY.engine


class Cost(NamedTuple):
    """Of one run, in seconds."""

    wall_s: float
    cpu_s: float


Story = list[tuple[int, float, str]]


def story(batches: list[TensorDictBase]) -> Story:
    """What was collected, in an order that does not depend on when."""
    rows = [row for batch in batches for row in batch.unbind(0)]
    return sorted(
        (row["tokens", "full"].numel(), float(row["reward"]), row["stop_reason"]) for row in rows
    )


def make_buffer(num_rows: int) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyStackStorage(num_rows), transform=MCAdvantage(GROUP_SIZE), batch_size=num_rows
    )


def timed(collect: Callable[[], list[TensorDictBase]]) -> tuple[Cost, list[TensorDictBase]]:
    begin, cpu = time.perf_counter(), time.process_time()
    batches = collect()
    return Cost(time.perf_counter() - begin, time.process_time() - cpu), batches


def streaming(trace: Trace, num_slots: int) -> tuple[Cost, Story]:
    num_rollouts = len(trace.tokens)
    ENGINE.play(trace)
    collector = StreamingCollector(
        make_env(trace, num_rollouts),
        POLICY,
        engine=ENGINE,
        replay_buffer=make_buffer(num_rollouts),
        max_inflight_tasks=num_slots,
    )
    with collector:
        cost, batches = timed(lambda: [collector.collect()])
    return cost, story(batches)


def in_batches(trace: Trace, num_slots: int) -> tuple[Cost, Story]:
    num_rows = min(num_slots, len(trace.tokens))
    ENGINE.play(trace)
    collector = LLMCollector(
        make_env(trace, num_rows),
        POLICY,
        replay_buffer=make_buffer(num_rows),
        total_trajectories=len(trace.tokens),
    )
    with collector:
        cost, batches = timed(lambda: list(collector))
    return cost, story(batches)


def plain(trace: Trace, num_slots: int) -> tuple[Cost, Story]:
    begin, cpu = time.perf_counter(), time.process_time()
    asyncio.run(trace.plain_loop(num_slots))
    return Cost(time.perf_counter() - begin, time.process_time() - cpu), []


VARIANTS = {"StreamingCollector": streaming, "LLMCollector": in_batches, "plain loop": plain}


def wall_times(trace: Trace, num_slots: int, num_runs: int) -> None:
    bound_s = trace.streaming_bound_s(num_slots)
    costs: dict[str, list[Cost]] = {name: [] for name in VARIANTS}
    for _ in range(num_runs):
        stories: list[Story] = []
        for name, run in VARIANTS.items():
            cost, told = run(trace, num_slots)
            costs[name].append(cost)
            stories += [told] if told else []
        assert all(told == stories[0] for told in stories), "not the same rollouts"
        assert len(stories[0]) == len(trace.tokens)
    num = len(trace.tokens)
    print(f"{num} rollouts x {TURNS} turns, {num_slots} slots: streaming bound {bound_s:.2f} s")
    for name, values in costs.items():
        wall_s = statistics.median(cost.wall_s for cost in values)
        cpu_s = statistics.median(cost.cpu_s for cost in values)
        print(f"  {name:20s} {wall_s:6.2f} s  {wall_s / bound_s:5.2f}x   CPU {cpu_s:5.2f} s")


def cpu_times(all_slots: list[int]) -> None:
    print("CPU milliseconds, two rollouts a slot:")
    for num_slots in all_slots:
        trace = Trace.draw(max(64, 2 * num_slots), seed=1)
        cost, _ = streaming(trace, num_slots)
        waits, _ = plain(trace, num_slots)
        cpu_ms = 1e3 * (cost.cpu_s - waits.cpu_s) / len(trace.tokens)
        ratio = cost.wall_s / trace.streaming_bound_s(num_slots)
        print(
            f"  {num_slots:5d} slots: {cpu_ms / TURNS:5.2f} a turn, {cpu_ms:5.2f} an episode; "
            f"{ratio:5.2f}x of the bound"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Collection against its bound.")
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--cpu-slots", type=int, nargs="*", default=[16, 64, 256, 1024])
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    for warm in (streaming, in_batches):
        warm(Trace.draw(GROUP_SIZE), GROUP_SIZE)
    for num_slots in args.slots:
        wall_times(Trace.draw(args.rollouts), num_slots, args.runs)
    cpu_times(args.cpu_slots)


if __name__ == "__main__":
    main()

"""Collection with slow tools and heavy-tailed lengths, against the schedule that no overhead gives.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/collection/streaming.py [--without-peers]

Four rollouts of three turns a slot, in 16 and in 64 slots: wall time over the streaming bound (the
schedule of the same trace, slots taking rollouts in their order), and CPU time of a rollout, of

- `StreamingCollector` and `LLMCollector`, in batches of as many rows as slots;
- TorchRL's `LLMCollector`, of a batch of as many rows and of an `AsyncEnvPool` of environments in
  threads; and TRL's loop of `AsyncGRPOTrainer`, see `peers.py`;
- a plain asyncio loop that only waits.

Runs are interleaved and medians taken; all must draw the same rollouts, and what is printed as
``trained`` is the fraction of the tokens sampled that are there to be trained. What does not run is
named with its error. Then, of `StreamingCollector` alone, the CPU time of a turn and of an episode
as slots grow, everything counted but the plain loop's. Templates are compiled beforehand.
"""

import argparse
import asyncio
import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from simulated_rollouts import GROUP_SIZE, TURNS, Trace, make_env, make_policy
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer

from collectors import LLMCollector, StreamingCollector
from objectives import MCAdvantage

T = TypeVar("T")
ROLLOUTS_PER_SLOT = 4
POLICY = make_policy()
ENGINE: Any = POLICY.engine


class Cost(NamedTuple):
    """Of one run, in seconds."""

    wall_s: float
    cpu_s: float


Rollouts = list[tuple[float, int]]
"""Of each rollout: the reward, and the tokens that may be trained."""


def rollouts_of(batches: list[TensorDictBase]) -> Rollouts:
    """What was collected, in an order that does not depend on when."""
    rows = [row for batch in batches for row in batch.unbind(0)]
    return sorted(
        (float(row["reward"]), int(row["masks", "all_assistant_mask"].sum())) for row in rows
    )


Variant = Callable[[Trace, int], tuple[Cost, Rollouts]]


def make_buffer(num_rows: int) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyStackStorage(num_rows), transform=MCAdvantage(GROUP_SIZE), batch_size=num_rows
    )


def timed(collect: Callable[[], T]) -> tuple[Cost, T]:
    begin, cpu = time.perf_counter(), time.process_time()
    collected = collect()
    return Cost(time.perf_counter() - begin, time.process_time() - cpu), collected


def streaming(trace: Trace, num_slots: int) -> tuple[Cost, Rollouts]:
    num_rows = min(num_slots, len(trace.tokens))
    ENGINE.play(trace)
    collector = StreamingCollector(
        make_env(trace, num_rows),
        POLICY,
        engine=ENGINE,
        replay_buffer=make_buffer(num_rows),
        max_inflight_tasks=num_slots,
    )
    with collector:
        cost, batches = timed(lambda: list(collector))
    return cost, rollouts_of(batches)


def in_batches(trace: Trace, num_slots: int) -> tuple[Cost, Rollouts]:
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
    return cost, rollouts_of(batches)


def plain(trace: Trace, num_slots: int) -> tuple[Cost, Rollouts]:
    begin, cpu = time.perf_counter(), time.process_time()
    asyncio.run(trace.plain_loop(num_slots))
    return Cost(time.perf_counter() - begin, time.process_time() - cpu), []


def of_peer(make: Callable[..., Callable[[], Rollouts]], **options: Any) -> Variant:
    def run(trace: Trace, num_slots: int) -> tuple[Cost, Rollouts]:
        ENGINE.play(trace)
        return timed(make(ENGINE, trace, num_slots, **options))

    return run


def variants(with_peers: bool) -> dict[str, Variant]:
    found: dict[str, Variant] = {"StreamingCollector": streaming, "LLMCollector": in_batches}
    if with_peers:
        import peers

        found["TorchRL, a batch"] = of_peer(peers.torchrl, pool=False)
        found["TorchRL, AsyncEnvPool"] = of_peer(peers.torchrl, pool=True)
        found["TRL, async loop"] = of_peer(peers.trl)
    return found | {"plain loop": plain}


def check(trace: Trace, collected: Rollouts) -> float:
    """Check what was collected, and give the fraction of the sampled tokens that are trained."""
    rewards = sorted(float(rollout % 5) for rollout in range(len(trace.tokens)))
    assert [reward for reward, _ in collected] == rewards, "not the same rollouts"
    return sum(tokens for _, tokens in collected) / sum(map(sum, trace.tokens))


def wall_times(ways: dict[str, Variant], num_slots: int, num_runs: int, token_s: float) -> None:
    trace = Trace.draw(ROLLOUTS_PER_SLOT * num_slots, token_s=token_s)
    bound_s, num = trace.streaming_bound_s(num_slots), len(trace.tokens)
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    trained: dict[str, float] = {}
    failed: dict[str, str] = {}
    for _ in range(num_runs):
        for name, run in ways.items():
            if name in failed:
                continue
            try:
                cost, collected = run(trace, num_slots)
            except Exception as error:  # a peer's
                failed[name] = f"{type(error).__name__}: {error}"
                continue
            costs[name].append(cost)
            if collected:
                trained[name] = check(trace, collected)
    print(f"{num} rollouts x {TURNS} turns, {num_slots} slots: streaming bound {bound_s:.2f} s")
    for name, values in costs.items():
        if name in failed:
            print(f"  {name:22s} does not run: {failed[name]}")
            continue
        wall_s = statistics.median(cost.wall_s for cost in values)
        cpu_ms = 1e3 * statistics.median(cost.cpu_s for cost in values) / num
        told = f"   {trained[name]:4.0%} trained" if name in trained else ""
        ratio = wall_s / bound_s
        print(f"  {name:22s} {wall_s:6.2f} s {ratio:6.2f}x   CPU {cpu_ms:5.2f} ms a rollout{told}")


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
    parser.add_argument("--slots", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--cpu-slots", type=int, nargs="*", default=[16, 64, 256, 1024])
    parser.add_argument("--token-ms", type=float, default=1.0, help="1: 1,000 tokens/s a slot")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--without-peers", action="store_true")
    args = parser.parse_args()
    ways = variants(not args.without_peers)
    for warm in ways.values():
        with contextlib.suppress(Exception):  # told of when it is timed
            warm(Trace.draw(GROUP_SIZE), GROUP_SIZE)
    gc.collect()
    gc.freeze()  # full collections would look at all that was imported
    for num_slots in args.slots:
        wall_times(ways, num_slots, args.runs, args.token_ms / 1e3)
    cpu_times(args.cpu_slots)


if __name__ == "__main__":
    main()

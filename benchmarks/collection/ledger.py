"""What a ledger costs, and what waiting and dropping do to slow prompts.

    python benchmarks/collection/ledger.py [--num-steps 300] [--max-tokens N]
        [--plot docs/img/ledger.png]

The first table is events per second of CPU time, of one process. The second simulates a run, second
by second but without a model: an episode's length is lognormal (sigma 1.5 in all, half of the
variance between prompts and half between the episodes of one), its time is its length, a step
trains as long as the slots take to fill P groups, and all policies see the same prompts. ``KS`` is
the Kolmogorov-Smirnov distance between the tokens of the groups that were trained and of all that
were drawn; its critical value at 1 % stands below. ``slowest tenth`` is the fraction of the longest
tenth of the prompts drawn (those in flight at the end left out) that were ever trained.
"""

import argparse
import heapq
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from collectors import Drop, GroupLedger, OnPolicy, Wait
from collectors.ledger import StalenessPolicy, Ticket
from collectors.ledger.reasons import STALE

SIGMA = 1.5
MEDIAN_LENGTH = 400
GROUPS_PER_STEP = 16
GROUP_SIZE = 8

POLICIES: dict[str, StalenessPolicy] = {
    "OnPolicy()": OnPolicy(),
    "Wait(4, window=0)": Wait(4, window=0),
    "Wait(4)": Wait(4),
    "Wait(4, pipeline_depth=4)": Wait(4, pipeline_depth=4),
    "Wait(16)": Wait(16),
    "Drop(4)": Drop(4),
    "Drop(1, pipeline_depth=4)": Drop(1, pipeline_depth=4),
}


def episode_lengths(
    ordinal: int, attempt: int, *, max_tokens: float = math.inf, seed: int = 0
) -> list[int]:
    """Tokens of each episode of a group; a prompt that is long is long in every attempt."""
    scale = SIGMA / math.sqrt(2)
    prompt = np.random.default_rng([seed, ordinal]).normal(0, scale)
    noise = np.random.default_rng([seed, ordinal, attempt]).normal(0, scale, GROUP_SIZE)
    lengths = np.minimum(MEDIAN_LENGTH * np.exp(prompt + noise), max_tokens)
    return [max(1, int(length)) for length in lengths]


def mean_time(num_groups: int = 2000, max_tokens: float = math.inf) -> float:
    """Of a group: that of its longest episode."""
    longest = [max(episode_lengths(i, 0, max_tokens=max_tokens, seed=1)) for i in range(num_groups)]
    return float(np.mean(longest))


@dataclass
class Run:
    """What a simulated run came to."""

    ledger: GroupLedger
    offered: dict[int, int] = field(default_factory=dict)
    """Tokens of the first attempt at each prompt that was drawn, by ordinal."""
    trained: dict[int, int] = field(default_factory=dict)
    """Tokens of each prompt that was trained, by ordinal."""
    ages: list[int] = field(default_factory=list)
    """Of the oldest token of each group that was trained, when it was used."""
    seconds: float = 0.0
    trainer_seconds: float = 0.0

    @property
    def distance(self) -> float:
        """Between trained and offered groups."""
        return ks_distance(list(self.trained.values()), list(self.offered.values()))

    @property
    def critical(self) -> float:
        """What the distance may be at 1 %."""
        return ks_critical(len(self.trained), len(self.offered))

    def trained_fraction(self, low: float, high: float) -> float:
        """Of the prompts between two quantiles of length that are no longer in flight."""
        running = {ticket.ordinal for ticket in self.ledger.tickets()}
        running |= {refill.ordinal for refill in self.ledger.owed}
        order = sorted(self.offered, key=lambda ordinal: self.offered[ordinal])
        some = order[int(low * len(order)) : int(high * len(order))]
        over = [ordinal for ordinal in some if ordinal not in running]
        return sum(ordinal in self.trained for ordinal in over) / len(over)


def ks_distance(first: Sequence[float], second: Sequence[float]) -> float:
    """The largest difference between two empirical distribution functions."""
    a, b = np.sort(first), np.sort(second)
    at = np.concatenate([a, b])
    mine = np.searchsorted(a, at, side="right") / len(a)
    others = np.searchsorted(b, at, side="right") / len(b)
    return float(np.abs(mine - others).max())


def ks_critical(n: int, m: int, *, alpha: float = 0.01) -> float:
    """What the distance of two samples of one distribution exceeds with probability alpha."""
    return math.sqrt(-math.log(alpha / 2) / 2) * math.sqrt((n + m) / (n * m))


class Simulation:
    """Generators, a trainer and a ledger on a clock of their own.

    Args:
        policy: of the ledger.
        step_seconds: that a step of training takes.
        max_tokens: where an episode is cut.
        settings: of the ledger.
    """

    def __init__(
        self,
        policy: StalenessPolicy,
        *,
        step_seconds: float,
        max_tokens: float = math.inf,
        **settings: Any,
    ) -> None:
        self.now = 0.0
        self.ledger = GroupLedger(
            groups_per_step=GROUPS_PER_STEP,
            group_size=GROUP_SIZE,
            policy=policy,
            clock=lambda: self.now,
            **settings,
        )
        self.run = Run(self.ledger)
        self.step_seconds = step_seconds
        self.max_tokens = max_tokens
        self.training: list[Ticket] = []
        self.events: list[tuple[float, int, Ticket | None, int]] = []
        self.num_events = itertools.count()
        self.started: dict[Ticket, tuple[float, int]] = {}
        self.lengths: dict[Ticket, dict[int, int]] = {}

    def simulate(self, num_steps: int) -> Run:
        """Run until so many steps are trained."""
        self._move()
        while self.ledger.version < num_steps:
            self.now, _, ticket, index = heapq.heappop(self.events)
            if ticket is None:
                self._end_step()
            elif self.ledger.state_of(ticket) is not None:
                self._end_episode(ticket, index)
            self._move()
        self.run.seconds = self.now
        return self.run

    def _draw(self, ticket: Ticket) -> list[int]:
        return episode_lengths(ticket.ordinal, ticket.attempt, max_tokens=self.max_tokens)

    def _at(self, time_s: float, ticket: Ticket | None, index: int) -> None:
        heapq.heappush(self.events, (time_s, next(self.num_events), ticket, index))

    def _move(self) -> None:
        """Begin whatever may begin."""
        if not self.training:
            self.training = self.ledger.take() or []
            if self.training:
                self._at(self.now + self.step_seconds, None, 0)
        while self.ledger.can_admit():
            owed = self.ledger.owed
            ordinal = owed[0].ordinal if owed else self.ledger.next_ordinal
            ticket = self.ledger.offer(ordinal, ordinal)
            self.ledger.start(ticket)
            self.started[ticket] = (self.now, self.ledger.pulled_version)
            lengths = self._draw(ticket)
            self.lengths[ticket] = dict(enumerate(lengths))
            self.run.offered.setdefault(ordinal, sum(lengths))
            for index, length in enumerate(lengths):
                self._at(self.now + length, ticket, index)

    def _end_episode(self, ticket: Ticket, index: int) -> None:
        self.ledger.finish_episode(
            ticket,
            index,
            tokens=self.lengths[ticket].pop(index),
            oldest_version=self.started[ticket][1],
            newest_version=self.ledger.pulled_version,
        )
        if not self.lengths[ticket]:
            self.ledger.finish(ticket)

    def _end_step(self) -> None:
        step = self.ledger.version
        for ticket in self.training:
            self.run.trained[ticket.ordinal] = sum(self._draw(ticket))
            self.run.ages.append(step - self.started[ticket][1])
        self.ledger.trained(self.training, step)
        self.ledger.weights_pulled(step + 1)
        self.training = []
        self.run.trainer_seconds += self.step_seconds
        for ticket in self.ledger.stale_tickets():
            ran = int(self.now - self.started[ticket][0])
            self.ledger.drop(ticket, STALE, cut_lengths=[ran] * len(self.lengths[ticket]))


def seconds_per_event(policy: StalenessPolicy, num_steps: int = 200) -> float:
    """CPU seconds of the ledger for one event, checks of the balance included."""
    ledger = GroupLedger(groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE, policy=policy)
    num_events, begin = 0, time.process_time()
    for step in range(num_steps):
        fresh = []
        while ledger.can_admit():
            fresh.append(ledger.offer(ledger.next_ordinal, ledger.next_ordinal))
        for ticket in fresh:
            ledger.start(ticket)
            for index in range(GROUP_SIZE):
                ledger.finish_episode(ticket, index, tokens=100 + index, oldest_version=step)
            ledger.finish(ticket)
        num_events += len(fresh) * (3 + GROUP_SIZE) + 3
        ledger.trained(ledger.take() or [], step)
        ledger.weights_pulled(step + 1)
    return (time.process_time() - begin) / num_events


def plot(runs: Mapping[str, Run], path: Path) -> None:
    """How often prompts are trained by their length, and the lengths that come of it."""
    mpl.use("Agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    for (name, run), colour in zip(
        runs.items(), ("tab:blue", "tab:orange", "tab:red"), strict=False
    ):
        tenths = [100 * run.trained_fraction(i / 10, (i + 1) / 10) for i in range(10)]
        left.plot(range(1, 11), tenths, "o-", color=colour, lw=1.5, ms=4, label=name)
        lengths = np.sort(list(run.trained.values()))
        share = 100 * np.arange(1, len(lengths) + 1) / len(lengths)
        right.plot(lengths, share, color=colour, lw=1.5, label=f"trained, {name}")
    drawn = np.sort(list(next(iter(runs.values())).offered.values()))
    right.plot(drawn, 100 * np.arange(1, len(drawn) + 1) / len(drawn), "k--", lw=1.2, label="drawn")
    left.set_title("prompts that are trained, %", fontsize=10, loc="left")
    left.set_xlabel("tenth of the prompts, by length")
    left.set_xticks(range(1, 11))
    left.set_ylim(0, 105)
    right.set_title("groups at most so long, %", fontsize=10, loc="left")
    right.set_xlabel("tokens of a group")
    right.set_xscale("log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-steps", type=int, default=300)
    parser.add_argument("--max-tokens", type=float, default=math.inf, help="of an episode")
    parser.add_argument("--plot", type=Path, help="where to draw the second table (PNG)")
    arguments = parser.parse_args()
    for name in ("Wait(4)", "Drop(4)"):
        best = min(seconds_per_event(POLICIES[name]) for _ in range(5))
        print(f"{name:<28}{1 / best:>10,.0f} events/s  {1e6 * best:.1f} us")
    print(
        f"\n{'':<28}{'discarded':>10}{'slowest':>9}{'mean length':>15}{'KS':>8}{'age':>11}"
        f"{'trainer':>9}\n{'':<28}{'tokens':>10}{'tenth':>9}{'of drawn':>15}{'(1 %)':>8}"
        f"{'mean, max':>11}{'busy':>9}"
    )
    step_seconds, runs = mean_time(max_tokens=arguments.max_tokens) / 5, {}
    for name, policy in POLICIES.items():
        simulation = Simulation(policy, step_seconds=step_seconds, max_tokens=arguments.max_tokens)
        run = runs[name] = simulation.simulate(arguments.num_steps)
        balance = run.ledger.balance
        lengths = [float(np.mean(list(x.values()))) for x in (run.trained, run.offered)]
        print(
            f"{name:<28}{balance.num_dropped.tokens / balance.offered.tokens:>10.1%}"
            f"{run.trained_fraction(0.9, 1):>9.0%}{lengths[0] / lengths[1]:>15.1%}"
            f"{run.distance:>8.3f}{np.mean(run.ages):>7.2f}{max(run.ages):>4}"
            f"{run.trainer_seconds / run.seconds:>9.0%}"
        )
    print(f"{'':<28}{'critical distance':>34}{runs['Wait(4)'].critical:>16.3f}")
    if arguments.plot is not None:
        plot(
            {name: runs[name] for name in ("Wait(4)", "Drop(4)", "Drop(1, pipeline_depth=4)")},
            arguments.plot,
        )


if __name__ == "__main__":
    main()

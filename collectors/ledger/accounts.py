"""Accounts of how groups were used: ages, waiting times, lengths offered beside lengths trained."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final

from torchrl_data.stop_reason import kind_of

from .balance import Amount, Balance
from .groups import Group
from .reasons import LedgerError

_PER_OCTAVE: Final = 8


@dataclass
class LengthHistogram:
    """Counts of lengths in tokens; a bucket's upper edge is 9 % above its lower one."""

    counts: Counter[int] = field(default_factory=Counter)
    num_tokens: int = 0

    @property
    def num_lengths(self) -> int:
        """Episodes that were counted."""
        return self.counts.total()

    def add(self, length: int) -> None:
        """Count an episode."""
        bucket = math.floor(_PER_OCTAVE * math.log2(length)) if length else -1
        self.counts[bucket] += 1
        self.num_tokens += length

    @property
    def mean(self) -> float:
        """Tokens of an episode; NaN while there is none."""
        return self.num_tokens / self.num_lengths if self.counts else math.nan

    def edges(self) -> dict[float, int]:
        """Counts by the lower edge of their bucket, in tokens; 0 is the empty ones'."""
        return {
            0.0 if bucket < 0 else 2 ** (bucket / _PER_OCTAVE): count
            for bucket, count in sorted(self.counts.items())
        }

    def distance(self, other: "LengthHistogram") -> float:
        """Kolmogorov-Smirnov distance at the edges: at most the true one. NaN if one is empty."""
        if not (self.counts and other.counts):
            return math.nan
        largest = mine = others = 0.0
        own_total, other_total = self.num_lengths, other.num_lengths
        for bucket in sorted(self.counts.keys() | other.counts.keys()):
            mine += self.counts[bucket] / own_total
            others += other.counts[bucket] / other_total
            largest = max(largest, abs(mine - others))
        return largest


class Accounts:
    """Keeps the books, and counts what use was like: over the whole run, and of the newest step."""

    def __init__(self) -> None:
        ends = ("offered", "trained", "dropped", "returned", "in_flight")
        self._amounts: dict[str, Amount] = {end: Amount() for end in ends}
        self._dropped: dict[str, Amount] = {}
        self.ages: Counter[int] = Counter()
        """Groups by the age of their oldest token at use, in versions."""
        self._stop_reasons: Counter[str] = Counter()
        self.offered, self.trained = LengthHistogram(), LengthHistogram()
        self.step: dict[str, list[Any]] = {"staleness": [], "queue_s": [], "versions_span": []}
        """Of each group that the newest step took."""

    def enter(self, groups: int, tokens: int) -> None:
        """A group came in, or tokens of one that is in flight."""
        for end in ("offered", "in_flight"):
            self._amounts[end] = self._amounts[end].plus(groups, tokens)

    def end_episode(self, tokens: int, stop_reason: str) -> None:
        """An episode of a group in flight is over."""
        self.enter(0, tokens)
        self.offered.add(tokens)
        if stop_reason:
            self._stop_reasons[stop_reason] += 1

    def leave(self, group: Group, end: str, reason: str = "") -> None:
        """A group is ``trained``, ``returned`` or ``dropped``, for a reason."""
        tokens, amounts = group.num_tokens, self._amounts
        amounts["in_flight"] = amounts["in_flight"].plus(-1, -tokens)
        amounts[end] = amounts[end].plus(1, tokens)
        if end == "dropped":
            kind = kind_of(reason)
            self._dropped[kind] = self._dropped.get(kind, Amount()).plus(1, tokens)
        if end == "trained":
            for length in group.lengths.values():
                self.trained.add(length)

    def check(self, groups_in_flight: int) -> None:
        """Check that everything is somewhere.

        Args:
            groups_in_flight: those that there really are.

        Raises:
            LedgerError: something is not, or is twice.
        """
        offered, *ends = self._amounts.values()
        groups, tokens = (sum(amounts) for amounts in zip(*ends, strict=True))
        if (groups, tokens) != offered or self._amounts["in_flight"].groups != groups_in_flight:
            raise LedgerError(
                f"GroupLedger: not balanced: {offered.groups} groups and {offered.tokens} tokens "
                f"were offered, {groups} and {tokens} are accounted for, {groups_in_flight} groups "
                f"are in flight: {self.balance!r}."
            )

    @property
    def balance(self) -> Balance:
        """A snapshot."""
        amounts = {end: amount for end, amount in self._amounts.items() if end != "dropped"}
        return Balance(dropped=dict(self._dropped), **amounts)

    def metrics(self) -> dict[str, float]:
        """All of them by name."""
        metrics: dict[str, float] = {}
        for name, values in self.step.items():
            if values:
                metrics |= {f"{name}/mean": fmean(values), f"{name}/max": float(max(values))}
        used, ended = self.ages.total(), self._stop_reasons.total()
        for age, count in sorted(self.ages.items()):
            metrics[f"staleness/at_{age}_fraction"] = count / used
        for reason, count in sorted(self._stop_reasons.items()):
            metrics[f"stop/{reason}"] = count / ended
        if self.offered.counts:
            metrics["length/offered_mean"] = self.offered.mean
        if self.trained.counts:
            metrics["length/trained_mean"] = self.trained.mean
            metrics["length/distance"] = self.trained.distance(self.offered)
        for unit in Amount._fields:
            for end, amount in self._amounts.items():
                metrics[f"{unit}/{end}"] = float(getattr(amount, unit))
        for reason, amount in sorted(self._dropped.items()):
            metrics[f"groups/dropped/{reason}"] = float(amount.groups)
        return metrics

    def state(self) -> dict[str, Any]:
        """Books and statistics as plain values."""
        amounts = {end: list(amount) for end, amount in self._amounts.items()}
        dropped = {reason: list(amount) for reason, amount in self._dropped.items()}
        lengths = {
            name: {"num_tokens": each.num_tokens, "counts": sorted(map(list, each.counts.items()))}
            for name, each in (("offered", self.offered), ("trained", self.trained))
        }
        counted = {"ages": sorted(map(list, self.ages.items())), **lengths}
        counted |= {"stop_reasons": dict(self._stop_reasons), "step": list(self.step.values())}
        return {"accounts": {**amounts, "dropped": dropped}, "statistics": counted}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to what :meth:`state` gave."""
        amounts, counted = dict(state["accounts"]), state["statistics"]
        self._dropped = {reason: Amount(*each) for reason, each in amounts["dropped"].items()}
        amounts["dropped"] = self.balance.num_dropped
        self._amounts = {end: Amount(*amounts[end]) for end in self._amounts}
        self.ages = Counter(dict(counted["ages"]))
        self._stop_reasons = Counter(counted["stop_reasons"])
        self.offered, self.trained = (
            LengthHistogram(Counter(dict(counted[name]["counts"])), counted[name]["num_tokens"])
            for name in ("offered", "trained")
        )
        self.step = dict(zip(self.step, map(list, counted["step"]), strict=True))

"""What use was like: ages, waiting times, and lengths offered beside lengths trained."""

import math
from collections import Counter
from collections.abc import Iterable
from statistics import fmean
from typing import Any, Final

_PER_OCTAVE: Final = 8


class LengthHistogram:
    """Counts of lengths in tokens; a bucket's upper edge is 9 % above its lower one."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.num_lengths = 0
        self.num_tokens = 0

    def add(self, length: int) -> None:
        """Count an episode."""
        bucket = math.floor(_PER_OCTAVE * math.log2(length)) if length else -1
        self.counts[bucket] += 1
        self.num_lengths += 1
        self.num_tokens += length

    @property
    def mean(self) -> float:
        """Tokens of an episode; NaN while there is none."""
        return self.num_tokens / self.num_lengths if self.num_lengths else math.nan

    def edges(self) -> dict[float, int]:
        """Counts by the lower edge of their bucket, in tokens; 0 is the empty ones'."""
        return {
            0.0 if bucket < 0 else 2 ** (bucket / _PER_OCTAVE): count
            for bucket, count in sorted(self.counts.items())
        }

    def distance(self, other: "LengthHistogram") -> float:
        """Kolmogorov-Smirnov distance at the edges: at most the true one. NaN if one is empty."""
        if not (self.num_lengths and other.num_lengths):
            return math.nan
        largest = mine = others = 0.0
        for bucket in sorted(self.counts.keys() | other.counts.keys()):
            mine += self.counts[bucket] / self.num_lengths
            others += other.counts[bucket] / other.num_lengths
            largest = max(largest, abs(mine - others))
        return largest

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {"num_tokens": self.num_tokens, "counts": sorted(map(list, self.counts.items()))}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.num_tokens = state["num_tokens"]
        self.counts = Counter(dict(state["counts"]))
        self.num_lengths = self.counts.total()


class Statistics:
    """Counts over the whole run, and the newest step that was taken."""

    def __init__(self) -> None:
        self.ages: Counter[int] = Counter()
        """Groups by the age of their oldest token at use, in versions."""
        self.stop_reasons: Counter[str] = Counter()
        self.offered, self.trained = LengthHistogram(), LengthHistogram()
        self.step_ages: list[int] = []
        self.step_waits: list[float] = []
        self.step_spans: list[int] = []

    def end_episode(self, length: int, stop_reason: str) -> None:
        """An episode is over."""
        self.offered.add(length)
        if stop_reason:
            self.stop_reasons[stop_reason] += 1

    def take(self, ages: list[int], waits: list[float], spans: list[int]) -> None:
        """A step took its groups."""
        self.ages.update(ages)
        self.step_ages, self.step_waits, self.step_spans = ages, waits, spans

    def train(self, lengths: Iterable[int]) -> None:
        """A group was trained."""
        for length in lengths:
            self.trained.add(length)

    def metrics(self) -> dict[str, float]:
        """All of them by name."""
        metrics: dict[str, float] = {}
        for name, values in (
            ("staleness", self.step_ages),
            ("queue_s", self.step_waits),
            ("versions_span", self.step_spans),
        ):
            if values:
                metrics |= {f"{name}/mean": fmean(values), f"{name}/max": float(max(values))}
        used = self.ages.total()
        for age in sorted(self.ages):
            metrics[f"staleness/at_{age}_fraction"] = self.ages[age] / used
        ended = self.stop_reasons.total()
        for reason in sorted(self.stop_reasons):
            metrics[f"stop/{reason}"] = self.stop_reasons[reason] / ended
        if self.offered.num_lengths:
            metrics["length/offered_mean"] = self.offered.mean
        if self.trained.num_lengths:
            metrics["length/trained_mean"] = self.trained.mean
            metrics["length/distance"] = self.trained.distance(self.offered)
        return metrics

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "ages": sorted([age, count] for age, count in self.ages.items()),
            "stop_reasons": dict(self.stop_reasons),
            "offered": self.offered.state(),
            "trained": self.trained.state(),
            "step": [self.step_ages, self.step_waits, self.step_spans],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.ages = Counter(dict(state["ages"]))
        self.stop_reasons = Counter(state["stop_reasons"])
        self.offered.load_state(state["offered"])
        self.trained.load_state(state["trained"])
        self.step_ages, self.step_waits, self.step_spans = map(list, state["step"])

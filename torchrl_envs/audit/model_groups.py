"""Groups of rollouts that a model played, and what they can teach it."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from .findings import Finding

_BINS: Final = 4
_LEAST_SIGNAL: Final = 0.1
"""With fewer groups that have a signal, little is learnt from a step."""


class ModelGroups(NamedTuple):
    """Rewards of a model's rollouts, by prompt."""

    task: str
    model: str
    rewards: Sequence[Sequence[float]]
    """Of each prompt those of its rollouts that were scored."""
    solved_at: float = 1.0
    """From this reward on a rollout is right."""
    num_unscored: int = 0

    @property
    def solve_rates(self) -> list[float]:
        """The share of the rollouts of each prompt that are right."""
        return [sum(r >= self.solved_at for r in group) / len(group) for group in self.rewards]

    @property
    def signal_fraction(self) -> float:
        """Share of the groups whose rewards differ, of which alone GRPO learns."""
        return sum(len({*group}) > 1 for group in self.rewards) / max(1, len(self.rewards))

    @property
    def spread(self) -> list[tuple[str, int]]:
        """Counts of the prompts with a solve rate of 0, of each quarter between, and of 1."""
        rates = self.solve_rates
        inside = [rate for rate in rates if 0 < rate < 1]
        counts = [0] * _BINS
        for rate in inside:
            counts[min(_BINS - 1, int(rate * _BINS))] += 1
        names = [f"{n / _BINS:g} to {(n + 1) / _BINS:g}" for n in range(_BINS)]
        between = list(zip(names, counts, strict=True))
        return [("0", rates.count(0)), *between, ("1", rates.count(1))]

    def lines(self) -> Iterator[str]:
        """Lines to print."""
        rates = self.solve_rates
        if not rates:
            yield f"{self.task}: by {self.model}: no rollout could be scored"
            return
        sizes = {len(group) for group in self.rewards}
        size = f"{min(sizes)}" if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"
        yield (
            f"{self.task}: by {self.model}: {len(rates)} prompts of {size} rollouts; "
            f"{self.signal_fraction:.0%} of the groups have a signal; "
            f"mean solve rate {sum(rates) / len(rates):.2f}"
        )
        yield f"    prompts by solve rate: {', '.join(f'{k}: {n}' for k, n in self.spread)}"

    def findings(self) -> list[Finding]:
        """Notes, where the model learns little from the task as it is."""
        if not self.rewards:
            what = f"none of {self.num_unscored} rollouts of {self.model} could be scored"
            return [Finding(self.task, "broken", what)]
        if self.signal_fraction >= _LEAST_SIGNAL:
            return []
        rates = self.solve_rates
        what = f"{self.signal_fraction:.0%} of {len(rates)} groups of {self.model} have a signal"
        mean = sum(rates) / len(rates)
        evidence = f"mean solve rate {mean:.2f}, rewards {[list(g) for g in self.rewards[:3]]}"
        return [Finding(self.task, "no signal", what, evidence, is_defect=False)]

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        own = {"solve_rates": self.solve_rates, "signal_fraction": self.signal_fraction}
        rewards = [list(group) for group in self.rewards]
        return {**self._asdict(), "rewards": rewards, **own}

"""One thing that holds a run back, with the number and the rollouts that show it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class RolloutId(NamedTuple):
    """Where ``torchrl-agents view`` finds a rollout: ``--step``, ``--group`` and ``--sample``."""

    step: int
    group: int
    """Number of the group in its step, from 0."""
    sample: int
    """Number of the rollout in its group, from 0."""


@dataclass(frozen=True, kw_only=True)
class RunFinding:
    """What holds a run back."""

    code: str
    """Its name, which stays the same: ``"cut"``, say."""
    explains: float
    """The fraction of the last rollouts that it holds back, or, in a run without rollouts, of the
    steps; in [0, 1]."""
    what: str
    """What is wrong, with the number that shows it; a sentence."""
    change: str
    """The setting to change, and how; a sentence."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What was measured, by name."""
    rows: Sequence[RolloutId] = ()
    """Rollouts that show it, at most a few; none where it does not show in a rollout."""

    def as_json(self) -> dict[str, Any]:
        """Its fields, as JSON can hold them."""
        rows = [row._asdict() for row in self.rows]
        return {**vars(self), "numbers": dict(self.numbers), "rows": rows}

"""Findings of one row: the gap of each token, and why."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class RowVerdict:
    """Findings of one row; columns are of its tokens that were computed, K."""

    name: str
    places: list[int]
    """Of the tokens in the row, K."""
    gaps: list[float]
    """How far each recorded log-prob is above the one that was computed, in nats, K; NaN where none
    was recorded."""
    causes: list[str | None]
    """Of each token a :class:`Cause` or :data:`UNEXPLAINED`, K; ``None`` where the gap is within
    the tolerance."""
    words: dict[str, str] = field(default_factory=dict)
    """What was found of each cause."""
    beside: dict[str, int] = field(default_factory=dict)
    """Tokens at fault that are none of these K, by cause: trained, say, and not sampled."""
    not_checked: str = ""
    """Why the row could not be computed; then its columns are empty."""

    @property
    def largest(self) -> float:
        """The largest gap of the tokens without a cause, in nats; 0 where there are none."""
        pairs = zip(self.gaps, self.causes, strict=True)
        return max((abs(gap) for gap, cause in pairs if cause is None), default=0.0)

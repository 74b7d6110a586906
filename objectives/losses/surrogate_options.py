"""The parts that :class:`~objectives.GRPOLoss` is put together from: settings, no arithmetic.

Each surrogate maps its settings onto one function of :mod:`objectives.functional`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from objectives import functional as F
from objectives.validation import check_numbers, check_positive


class PolicyTokens(NamedTuple):
    """What a surrogate may use; K trained tokens of B rows."""

    log_ratio: Tensor
    """``[K]``, in nats, at the loss's ratio level."""
    log_prob: Tensor
    """``[K]``, in nats, differentiable."""
    advantage: Tensor
    """``[K]``."""
    mask: Tensor
    """bool ``[K]``."""
    lengths: Tensor
    """int64 ``[B]``, summing to K."""
    sampler_weight: Tensor | None
    """``[K]``, the sampler correction; only for a surrogate that applies it itself."""


@runtime_checkable
class SurrogateSettings(Protocol):
    """A surrogate: settings that can be called on tokens."""

    takes_ratio_level: ClassVar[bool]
    """Whether the ratio may be taken at sequence level (the others have their own)."""
    applies_correction: ClassVar[bool]
    """Whether the sampler correction goes inside instead of in front."""

    def __call__(self, tokens: PolicyTokens) -> F.Surrogate:
        """One loss value per token."""
        ...


@dataclass(frozen=True, kw_only=True)
class ClippedSurrogate:
    """:func:`~objectives.functional.clipped_surrogate` (GRPO, DAPO, GSPO, ...)."""

    takes_ratio_level: ClassVar[bool] = True
    applies_correction: ClassVar[bool] = False
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float | None = None
    """Dual clip ("delta"): bounds the loss of a bad token with a large ratio."""

    def __call__(self, tokens: PolicyTokens) -> F.Surrogate:
        """One loss value per token, ``[K]``."""
        return F.clipped_surrogate(
            tokens.log_ratio,
            tokens.advantage,
            tokens.mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            ratio_cap=self.ratio_cap,
        )


@dataclass(frozen=True, kw_only=True)
class CispoSurrogate:
    """:func:`~objectives.functional.cispo`."""

    takes_ratio_level: ClassVar[bool] = True
    applies_correction: ClassVar[bool] = False
    max_ratio: float = 5.0
    """A bound on the ratio itself, not an epsilon."""

    def __call__(self, tokens: PolicyTokens) -> F.Surrogate:
        """One loss value per token, ``[K]``."""
        return F.cispo(
            tokens.log_ratio,
            tokens.log_prob,
            tokens.advantage,
            tokens.mask,
            max_ratio=self.max_ratio,
        )


@dataclass(frozen=True, kw_only=True)
class SapoSurrogate:
    """:func:`~objectives.functional.sapo`."""

    takes_ratio_level: ClassVar[bool] = True
    applies_correction: ClassVar[bool] = False
    temperature_positive: float = 1.0
    temperature_negative: float = 1.05

    def __call__(self, tokens: PolicyTokens) -> F.Surrogate:
        """One loss value per token, ``[K]``."""
        return F.sapo(
            tokens.log_ratio,
            tokens.advantage,
            tokens.mask,
            temperature_positive=self.temperature_positive,
            temperature_negative=self.temperature_negative,
        )


@dataclass(frozen=True, kw_only=True)
class VespoSurrogate:
    """:func:`~objectives.functional.vespo`."""

    takes_ratio_level: ClassVar[bool] = False
    applies_correction: ClassVar[bool] = True
    positive: tuple[float, float] = (2.0, 3.0)
    """(k, lambda) where the advantage is at least 0."""
    negative: tuple[float, float] = (3.0, 2.0)
    """(k, lambda) where it is below 0."""

    def __call__(self, tokens: PolicyTokens) -> F.Surrogate:
        """One loss value per token, ``[K]``."""
        weight = tokens.sampler_weight
        return F.vespo(
            tokens.log_ratio,
            tokens.log_prob,
            tokens.advantage,
            tokens.mask,
            tokens.lengths,
            positive=self.positive,
            negative=self.negative,
            sampler_log_ratio=None if weight is None else weight.log(),
        )


@dataclass(frozen=True, kw_only=True)
class GmpoSurrogate:
    """:func:`~objectives.functional.gmpo`; the bounds are on the log-ratio."""

    takes_ratio_level: ClassVar[bool] = False
    applies_correction: ClassVar[bool] = False
    clip_low: float = 0.4
    clip_high: float = 0.4

    def __call__(self, tokens: PolicyTokens) -> F.Surrogate:
        """One loss value per token, ``[K]``."""
        return F.gmpo(
            tokens.log_ratio,
            tokens.advantage,
            tokens.mask,
            tokens.lengths,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )


SURROGATES: Final[Mapping[str, type[SurrogateSettings]]] = {
    "clipped": ClippedSurrogate,
    "cispo": CispoSurrogate,
    "sapo": SapoSurrogate,
    "vespo": VespoSurrogate,
    "gmpo": GmpoSurrogate,
}


@dataclass(frozen=True, kw_only=True)
class TokenFilters:
    """Which trained tokens the policy term leaves out; None (or False) leaves a filter off.

    They make the term 0 there and leave the counts that it is divided by alone.
    """

    trust_region: float | None = None
    """In nats: :func:`~objectives.functional.trust_region_mask` (KL-mask)."""
    top_entropy_fraction: float | None = None
    """:func:`~objectives.functional.high_entropy_mask`."""
    off_policy_threshold: float | None = None
    """In nats: :func:`~objectives.functional.off_policy_sequence_mask`."""
    drop_truncated: bool = False
    """:func:`~objectives.functional.overlong_mask`."""

    def __post_init__(self) -> None:
        check_positive(
            trust_region=self.trust_region, top_entropy_fraction=self.top_entropy_fraction
        )
        check_numbers(off_policy_threshold=self.off_policy_threshold)
        fraction = self.top_entropy_fraction
        if fraction is not None and fraction > 1:
            raise ValueError(f"top_entropy_fraction must lie in (0, 1], got {fraction}.")


@dataclass(frozen=True, kw_only=True)
class SamplerCorrection:
    """Settings of :func:`~objectives.functional.sampler_correction`."""

    level: F.CorrectionLevel = "token"
    mode: F.CorrectionMode = "truncate"
    upper: float = 2.0
    lower: float = 0.0

    def __post_init__(self) -> None:
        if self.level not in F.CORRECTION_LEVELS:
            raise ValueError(f"level must be one of {F.CORRECTION_LEVELS}, got {self.level!r}.")
        if self.mode not in F.CORRECTION_MODES:
            raise ValueError(f"mode must be one of {F.CORRECTION_MODES}, got {self.mode!r}.")
        if not 0 <= self.lower <= 1 <= self.upper:
            raise ValueError(f"Bounds must be 0 <= lower <= 1 <= upper: {self.lower}, {self.upper}")

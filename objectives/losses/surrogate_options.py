"""The parts that :class:`~objectives.GRPOLoss` is put together from: settings, no arithmetic.

A surrogate is a function of :mod:`objectives.functional` with settings. It takes, by name, what it
needs of :class:`PolicyTokens`; so can one of your own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from objectives import functional as F
from torchrl_data.validation import POSITIVE, check_numbers, one_of

SurrogateFunction = Callable[..., F.Surrogate]


class PolicyTokens(NamedTuple):
    """What a surrogate may take, by these names; K trained tokens of B rows."""

    log_ratio: Tensor
    """``[K]``, in nats, at the loss's ratio level."""
    log_prob: Tensor
    """``[K]``, in nats, differentiable."""
    advantage: Tensor
    """``[K]``."""
    lengths: Tensor
    """int64 ``[B]``, summing to K. A surrogate that takes them has a sequence ratio of its own, so
    ``log_ratio`` is that of the token."""
    behavior_log_prob: Tensor | None = None
    """``[K]``, in nats: the ratio's denominator. A surrogate that takes it has a token ratio of its
    own, so ``ratio_level`` is ``"token"``."""
    sampler_log_ratio: Tensor | None = None
    """``[K]``, the log of the sampler correction. A surrogate that takes it applies it itself; for
    the others the loss is multiplied by the correction."""


@dataclass(frozen=True, kw_only=True)
class SurrogateSettings:
    """Base of the settings of a surrogate; they are tried on no tokens when they are made."""

    function: ClassVar[SurrogateFunction]

    def __post_init__(self) -> None:
        none, no_rows = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
        tokens = PolicyTokens(none, none, none, no_rows, behavior_log_prob=none)
        function = self.bind()
        apply_surrogate(function, surrogate_inputs(function), tokens)

    def bind(self) -> SurrogateFunction:
        """The function with these settings; None leaves a setting at the function's default."""
        return partial(
            self.function, **{name: x for name, x in asdict(self).items() if x is not None}
        )


@dataclass(frozen=True, kw_only=True)
class ClippedSurrogate(SurrogateSettings):
    """:func:`~objectives.functional.clipped_surrogate` (GRPO, DAPO, GSPO, ...).

    Args:
        clip_low: None for ``clip_epsilon`` of the loss, 0.2 unless it says otherwise.
        clip_high: None as well.
        ratio_cap: dual clip ("delta"): bounds the loss of a bad token with a large ratio.

    Raises:
        ValueError: a setting is out of range.
    """

    function: ClassVar[SurrogateFunction] = staticmethod(F.clipped_surrogate)
    clip_low: float | None = None
    clip_high: float | None = None
    ratio_cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class CispoSurrogate(SurrogateSettings):
    """:func:`~objectives.functional.cispo`.

    Args:
        max_ratio: a bound on the ratio itself, not an epsilon.

    Raises:
        ValueError: it is below 1.
    """

    function: ClassVar[SurrogateFunction] = staticmethod(F.cispo)
    max_ratio: float = 5.0


@dataclass(frozen=True, kw_only=True)
class SapoSurrogate(SurrogateSettings):
    """:func:`~objectives.functional.sapo`.

    Args:
        temperature_positive: where the advantage is above 0.
        temperature_negative: elsewhere.

    Raises:
        ValueError: one is not positive.
    """

    function: ClassVar[SurrogateFunction] = staticmethod(F.sapo)
    temperature_positive: float = 1.0
    temperature_negative: float = 1.05


@dataclass(frozen=True, kw_only=True)
class VespoSurrogate(SurrogateSettings):
    """:func:`~objectives.functional.vespo`.

    Args:
        positive: (k, lambda) where the advantage is at least 0.
        negative: (k, lambda) where it is below 0.

    Raises:
        ValueError: one is negative.
    """

    function: ClassVar[SurrogateFunction] = staticmethod(F.vespo)
    positive: tuple[float, float] = (2.0, 3.0)
    negative: tuple[float, float] = (3.0, 2.0)


@dataclass(frozen=True, kw_only=True)
class GmpoSurrogate(SurrogateSettings):
    """:func:`~objectives.functional.gmpo`; the bounds are on the log-ratio.

    Args:
        clip_low: None for ``clip_epsilon`` of the loss, 0.4 unless it says otherwise.
        clip_high: None as well.

    Raises:
        ValueError: one is negative.
    """

    function: ClassVar[SurrogateFunction] = staticmethod(F.gmpo)
    clip_low: float | None = None
    clip_high: float | None = None


@dataclass(frozen=True, kw_only=True)
class DivergenceSurrogate(SurrogateSettings):
    """:func:`~objectives.functional.divergence_masked` (DPPO; two-sided: IPO, KPop).

    Args:
        divergence: ``"tv"``, ``"kl"`` or ``"symmetric_kl"``.
        threshold: the most that is kept, a probability for ``"tv"``, nats for the others; None for
            0.15, 0.05 and 0.1.
        one_sided: only tokens that the step moves further away are masked.

    Raises:
        ValueError: the divergence is unknown, or the threshold is not positive.
    """

    function: ClassVar[SurrogateFunction] = staticmethod(F.divergence_masked)
    divergence: F.BinaryDivergence | str = "tv"
    threshold: float | None = None
    one_sided: bool = True


SURROGATES: Final[Mapping[str, type[SurrogateSettings]]] = {
    "clipped": ClippedSurrogate,
    "cispo": CispoSurrogate,
    "sapo": SapoSurrogate,
    "vespo": VespoSurrogate,
    "gmpo": GmpoSurrogate,
    "divergence": DivergenceSurrogate,
}


def surrogate_inputs(function: SurrogateFunction) -> frozenset[str]:
    """Which of :class:`PolicyTokens` a surrogate takes; it may need nothing else."""
    names: set[str] = set()
    for name, parameter in inspect.signature(function).parameters.items():
        if name in PolicyTokens._fields:
            names.add(name)
        elif parameter.default is parameter.empty:
            raise TypeError(
                f"surrogate: {function!r:.80} needs {name!r}. A surrogate takes, by name, any of "
                f"{PolicyTokens._fields}; bind other settings with functools.partial."
            )
    return frozenset(names)


def apply_surrogate(
    function: SurrogateFunction, inputs: Iterable[str], tokens: PolicyTokens
) -> F.Surrogate:
    """Call a surrogate with what it takes."""
    return function(**{name: getattr(tokens, name) for name in inputs})


@dataclass(frozen=True, kw_only=True)
class TokenFilters:
    """Which trained tokens the policy term leaves out; None (or False) leaves a filter off.

    They make the term 0 there and leave the counts that it is divided by alone.

    Args:
        trust_region: in nats: :func:`~objectives.functional.trust_region_mask` (KL-mask).
        top_entropy_fraction: :func:`~objectives.functional.high_entropy_mask`.
        off_policy_threshold: in nats: :func:`~objectives.functional.off_policy_sequence_mask`.
        drop_truncated: :func:`~objectives.functional.overlong_mask`.

    Raises:
        ValueError: a threshold is out of range.
    """

    trust_region: float | None = None
    top_entropy_fraction: float | None = None
    off_policy_threshold: float | None = None
    drop_truncated: bool = False

    def __post_init__(self) -> None:
        check_numbers("TokenFilters", POSITIVE, trust_region=self.trust_region)
        check_numbers("TokenFilters", "(0, 1]", top_entropy_fraction=self.top_entropy_fraction)
        check_numbers("TokenFilters", off_policy_threshold=self.off_policy_threshold)


@dataclass(frozen=True, kw_only=True)
class SamplerCorrection:
    """Settings of :func:`~objectives.functional.sampler_correction`.

    Args:
        level: ``"token"``, ``"sequence"``, or ``"k3"``: no weights, sequences are dropped.
        mode: ``"truncate"`` or ``"mask"``.
        upper: highest weight.
        lower: lowest weight.
        max_k3: in nats per token: sequences whose mean k3 exceeds it have weight 0; 0.01 is usual
            at level ``"k3"``, which needs it.
        normalize: divide the weights by their mean over the window (``measure_window``), so that
            they neither shrink nor stretch the step.

    Raises:
        ValueError: a name is unknown, the bounds are not ``0 <= lower <= 1 <= upper``, or a setting
            has no effect at the level.
    """

    level: F.CorrectionLevel = "token"
    mode: F.CorrectionMode = "truncate"
    upper: float = 2.0
    lower: float = 0.0
    max_k3: float | None = None
    normalize: bool = False

    def __post_init__(self) -> None:
        one_of("level", self.level, F.CORRECTION_LEVELS, who="SamplerCorrection")
        one_of("mode", self.mode, F.CORRECTION_MODES, who="SamplerCorrection")
        check_numbers("SamplerCorrection", POSITIVE, max_k3=self.max_k3)
        if not 0 <= self.lower <= 1 <= self.upper:
            raise ValueError(
                "SamplerCorrection: bounds must be 0 <= lower <= 1 <= upper, got "
                f"lower={self.lower} and upper={self.upper}."
            )
        if self.level != "k3":
            return
        if self.max_k3 is None:
            raise ValueError("SamplerCorrection: level 'k3' needs max_k3, such as 0.01.")
        if (self.mode, self.upper, self.lower) != ("truncate", 2.0, 0.0):
            raise ValueError(
                "SamplerCorrection: at level 'k3' there are no weights to bound: leave mode, upper "
                f"and lower out, got {self}."
            )

    def weights(
        self, train_log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor, lengths: Tensor
    ) -> F.SamplerWeights:
        """The weights of packed tokens, not yet normalised.

        Args:
            train_log_prob: in nats, ``[K]``.
            sampler_log_prob: in nats, ``[K]``.
            mask: True where the policy sampled, ``[K]``.
            lengths: int64 ``[B]``, summing to K.

        Returns:
            Weights and where they were changed, ``[K]``.
        """
        bounds = {"upper": self.upper, "lower": self.lower, "max_k3": self.max_k3}
        return F.sampler_correction(
            train_log_prob,
            sampler_log_prob,
            mask,
            lengths,
            level=self.level,
            mode=self.mode,
            **bounds,
        )

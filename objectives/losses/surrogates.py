"""The surrogates by name: their settings, and what each takes of the tokens.

A surrogate is a function of :mod:`objectives.functional` with settings. It takes, by name, what
it needs of :class:`PolicyTokens` and, with :func:`reads`, of the batch; so can one of your own.

Shape legend: B rows, K trained tokens of all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import torch
from tensordict import NestedKey
from torch import Tensor

from objectives import functional as F
from torchrl_data.checks import one_of, pair

SurrogateFunction = Callable[..., F.Surrogate]
SurrogateT = TypeVar("SurrogateT", bound=SurrogateFunction)


class PolicyTokens(NamedTuple):
    """Inputs that a surrogate may take, by these names; K trained tokens of B rows."""

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


def reads(**entries: NestedKey) -> Callable[[SurrogateT], SurrogateT]:
    """Let a surrogate take entries of the batch, beside what it takes of :class:`PolicyTokens`.

    Args:
        **entries: the key of each in the batch, by the name of the parameter that takes it. An
            entry has one value per token, like the tokens, or one per row, ``[B, 1]``; the
            surrogate gets it as ``[K]``, in the dtype that it has in the batch.

    Raises:
        ValueError: a parameter has the name of one of :class:`PolicyTokens`.

    Example:
        >>> @reads(patience=("next", "patience"))
        ... def patient(log_ratio, advantage, patience):
        ...     return F.clipped_surrogate(log_ratio / patience, advantage)
        >>> sorted(surrogate_inputs(patient))  # GRPOLoss(actor, surrogate=patient)
        ['advantage', 'log_ratio', 'patience']
    """
    taken = sorted(entries.keys() & set(PolicyTokens._fields))
    if taken:
        raise ValueError(
            f"reads: {taken} are what every surrogate may take, see PolicyTokens; give the entry "
            "of the batch another name."
        )

    def mark(function: SurrogateT) -> SurrogateT:
        setattr(function, "batch_entries", dict(entries))  # noqa: B010
        return function

    return mark


def batch_entries(function: SurrogateFunction) -> Mapping[str, NestedKey]:
    """The entries of the batch that a surrogate takes, by its parameters, see :func:`reads`."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "batch_entries", {})


def try_surrogate(function: SurrogateFunction, *, num_tokens: int = 2) -> None:
    """Call a surrogate with tokens on policy of one row, without advantage.

    Raises:
        TypeError: it gives something else than a :class:`~objectives.functional.Surrogate` with a
            value for each token.
    """
    zeros = torch.zeros(num_tokens)
    tokens = PolicyTokens(
        log_ratio=zeros,
        log_prob=zeros.clone().requires_grad_(),
        advantage=zeros,
        lengths=torch.tensor([num_tokens] if num_tokens else [], dtype=torch.int64),
        behavior_log_prob=zeros,
    )
    own = dict.fromkeys(batch_entries(function), torch.ones(num_tokens))
    given = {**tokens._asdict(), **own}
    result = function(**{name: given[name] for name in surrogate_inputs(function)})
    shapes = [getattr(x, "shape", None) for x in result] if isinstance(result, F.Surrogate) else []
    if shapes != [zeros.shape] * len(F.Surrogate._fields):
        raise TypeError(
            f"surrogate: {function!r:.80} must give a Surrogate(loss, ratio, clipped_low, "
            f"clipped_high) of the shape of log_ratio, {tuple(zeros.shape)}, got {result!r:.200}."
        )


@dataclass(frozen=True, kw_only=True)
class SurrogateSettings:
    """Base of the settings of a surrogate; they are tried on no tokens when they are made."""

    function: ClassVar[SurrogateFunction]

    def __post_init__(self) -> None:
        try_surrogate(self.bind(), num_tokens=0)

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
    """Names that a surrogate takes of :class:`PolicyTokens` and of the batch.

    Raises:
        TypeError: it needs something else, or takes no entry of the batch that it says it reads.
    """
    entries = batch_entries(function)
    parameters = inspect.signature(function).parameters
    if unused := sorted(entries.keys() - parameters.keys()):
        raise TypeError(f"surrogate: {function!r:.80} reads {unused} and has no such parameter.")
    names: set[str] = set()
    for name, parameter in parameters.items():
        if name in PolicyTokens._fields or name in entries:
            names.add(name)
        elif parameter.default is parameter.empty:
            raise TypeError(
                f"surrogate: {function!r:.80} needs {name!r}. A surrogate takes, by name, any of "
                f"{PolicyTokens._fields}; bind other settings with functools.partial, and say with "
                f"@objectives.reads({name}=key) which entry of the batch it is."
            )
    return frozenset(names)


def takes_clip(
    surrogate: SurrogateSettings | type[SurrogateSettings] | SurrogateFunction,
) -> bool:
    """Return whether a surrogate has both bounds of ``clip_epsilon``."""
    function: Any = getattr(surrogate, "function", surrogate)
    return {"clip_low", "clip_high"} <= inspect.signature(function).parameters.keys()


def bind_surrogate(
    surrogate: str | SurrogateSettings | SurrogateFunction,
    clip_epsilon: float | tuple[float, float] | None,
    ratio_level: str,
) -> SurrogateFunction:
    """Give a surrogate its settings and the clip bounds, and try it.

    Args:
        surrogate: a name of :data:`SURROGATES`, settings, or a function.
        clip_epsilon: the bounds, one number for both or the pair; None leaves them as they are.
        ratio_level: of the log-ratio that it gets.

    Returns:
        The function, with what it takes of :class:`PolicyTokens` and of the batch left open.

    Raises:
        TypeError: it is none of these, needs something else, or gives no ``Surrogate``.
        ValueError: its name is unknown, or bounds or ratio level can take no effect on it.
    """
    if not callable(surrogate) and not isinstance(surrogate, SurrogateSettings | str):
        raise TypeError(
            f"surrogate takes one of {tuple(SURROGATES)}, settings such as "
            f"ClippedSurrogate(...), or a function, got {surrogate!r}."
        )
    settings = surrogate
    if isinstance(settings, str):
        settings = SURROGATES[one_of("surrogate", settings, tuple(SURROGATES))]()
    function = _with_clip(settings, clip_epsilon)
    inputs = surrogate_inputs(function)
    if not isinstance(settings, SurrogateSettings):  # which are tried themselves
        try_surrogate(function)
    if inputs & {"lengths", "behavior_log_prob"} and ratio_level != "token":
        raise ValueError(
            f"surrogate {surrogate!r} has a ratio of its own: leave ratio_level at 'token', got "
            f"{ratio_level!r}."
        )
    return function


def _with_clip(
    surrogate: SurrogateSettings | SurrogateFunction,
    clip_epsilon: float | tuple[float, float] | None,
) -> SurrogateFunction:
    function = surrogate.bind() if isinstance(surrogate, SurrogateSettings) else surrogate
    if clip_epsilon is None:
        return function
    if not takes_clip(surrogate):
        raise ValueError(
            f"clip_epsilon={clip_epsilon} has no effect on surrogate {surrogate!r}: give it "
            "settings with a bound of its own, and leave clip_epsilon out."
        )
    if {"clip_low", "clip_high"} & getattr(function, "keywords", {}).keys():
        raise ValueError(
            f"clip_epsilon={clip_epsilon} and {surrogate} both give the clip bounds: give them "
            "once."
        )
    one = isinstance(clip_epsilon, Real)
    low, high = pair("clip_epsilon", (clip_epsilon, clip_epsilon) if one else clip_epsilon)
    if isinstance(surrogate, SurrogateSettings):
        return replace(surrogate, clip_low=low, clip_high=high).bind()  # type: ignore[call-arg]
    return partial(function, clip_low=low, clip_high=high)


def keeps_clip(surrogate: str | SurrogateSettings | SurrogateFunction) -> bool:
    """Return whether the clip bounds of a preset go on with a surrogate that was given.

    They give way to another surrogate, and to one with bounds of its own.
    """
    if isinstance(surrogate, ClippedSurrogate):
        return surrogate.clip_low is None is surrogate.clip_high
    return surrogate == "clipped"

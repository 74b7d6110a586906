"""The options of the losses, checked when they are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from numbers import Real
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypedDict, TypeVar

import torch
from tensordict import NestedKey
from torch import Tensor

from objectives import functional as F
from objectives.batching.packed_batch import resolve_masking_strategy
from torchrl_data.checks import (
    NOT_NEGATIVE,
    POSITIVE,
    check_counts,
    check_names,
    check_numbers,
    check_type,
    one_of,
    pair,
)

# What all losses over tokens can be told.


def aggregation_name(aggregation: str) -> F.Aggregation:
    """The name of an aggregation, from it or from TorchRL's name."""
    theirs: dict[str, F.Aggregation] = {"prompt_mean": "sequence_mean"}
    return one_of("aggregation", aggregation, F.AGGREGATIONS, theirs)


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """Options of a loss over tokens, checked when they are made.

    Args:
        aggregation: ``"token_mean"``, ``"sequence_mean"`` (TorchRL's ``"prompt_mean"``),
            ``"fixed_length"``, ``"sequence_sum"``; ``"none"`` gives ``[K]`` values.
        max_tokens: what ``"fixed_length"`` divides by.
        masking_strategy: ``"assistant"``: what the policy sampled; ``"response"``: everything
            from the first sampled token on; ``"all"``. (TorchRL: ``"rlhf"``, ``"sft"``,
            ``"generic"``.)
        temperature: the logits are divided by it.

    Raises:
        ValueError: an option is unknown, out of range, or cannot take effect with the others.
    """

    aggregation: str = "token_mean"
    max_tokens: int | None = None
    masking_strategy: str = "assistant"
    temperature: float | None = None

    def __post_init__(self) -> None:
        resolve_masking_strategy(self.masking_strategy)
        check_numbers("", POSITIVE, temperature=self.temperature)
        fixed = self.named_aggregation == "fixed_length"
        if fixed != (self.max_tokens is not None):
            raise ValueError(
                "max_tokens goes with aggregation 'fixed_length': give both or none, got "
                f"aggregation={self.aggregation!r} and max_tokens={self.max_tokens}."
            )
        check_counts(max_tokens=self.max_tokens)

    @property
    def named_aggregation(self) -> F.Aggregation:
        """The aggregation by its own name, without aliases."""
        return aggregation_name(self.aggregation)


# The parts that :class:`~objectives.GRPOLoss` is put together from: settings, no arithmetic.
#
# A surrogate is a function of :mod:`objectives.functional` with settings. It takes, by name, what
# it needs of :class:`PolicyTokens` and, with :func:`reads`, of the batch; so can one of your own.

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


@dataclass(frozen=True, kw_only=True)
class TokenFilters:
    """Filters of the tokens that the policy term trains; None (or False) leaves a filter off.

    They make the term 0 there and leave the counts that it is divided by alone.

    Args:
        trust_region: in nats: :func:`~objectives.functional.trust_region_mask` (KL-mask).
        top_entropy_fraction: :func:`~objectives.functional.high_entropy_mask`.
        off_policy_threshold: in nats: :func:`~objectives.functional.off_policy_sequence_mask`.
        drop_truncated: :func:`~objectives.functional.overlong_mask`.

    Raises:
        ValueError: a threshold is out of range.

    Example:
        >>> filters = TokenFilters(trust_region=0.05)  # for GRPOLoss(policy, filters=filters)
        >>> filters.trust_region, filters.drop_truncated
        (0.05, False)
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

    Example:
        >>> correction = SamplerCorrection(upper=2.0)
        >>> old, sampler = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0])  # [K], in nats
        >>> sampled, lengths = torch.tensor([True, True]), torch.tensor([2])
        >>> correction.weights(old, sampler, sampled, lengths).weight  # exp(1) is cut to 2
        tensor([1., 2.])
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
        packed = (train_log_prob, sampler_log_prob, mask, lengths)
        return F.sampler_correction(*packed, level=self.level, mode=self.mode, **bounds)


# The options of the losses with a target for each token.

SFTFunction = Literal["sft", "minor_sft"]
SFT_FUNCTIONS: Final[tuple[SFTFunction, ...]] = ("sft", "minor_sft")
_MINOR_AGGREGATIONS: Final[tuple[F.Aggregation, ...]] = ("sequence_mean", "sequence_sum")


@dataclass(frozen=True, kw_only=True)
class SFTOptions(TokenOptions):
    """Options of :class:`~objectives.SFTLoss`, checked when they are made.

    Args:
        aggregation: ``None`` is ``"token_mean"``, and ``"sequence_mean"`` for minor SFT; see
            :class:`~objectives.SFTLoss`.
        max_tokens: what ``"fixed_length"`` divides by.
        masking_strategy: ``"assistant"``, ``"response"`` or ``"all"``.
        temperature: the logits are divided by it.
        loss_function: ``"sft"`` or ``"minor_sft"``.
        kl_to_ref_coeff: weight of the KL (k3) to the reference; None or 0 for none.
        beta: of minor SFT; None is 0.1.

    Raises:
        ValueError: an option is unknown, out of range, or cannot take effect with the others.

    Example:
        >>> SFTOptions(loss_function="minor_sft").named_aggregation
        'sequence_mean'
    """

    aggregation: str | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    temperature: float | None = 1.0
    loss_function: SFTFunction | str = "sft"
    kl_to_ref_coeff: float | None = None
    beta: float | None = None

    def __post_init__(self) -> None:
        one_of("loss_function", self.loss_function, SFT_FUNCTIONS)
        super().__post_init__()
        check_numbers("", NOT_NEGATIVE, kl_to_ref_coeff=self.kl_to_ref_coeff)
        check_numbers("", POSITIVE, beta=self.beta)
        if self.is_minor:
            one_of("aggregation", self.named_aggregation, _MINOR_AGGREGATIONS)
        elif self.beta is not None:
            raise ValueError(f"beta={self.beta} goes with loss_function 'minor_sft': leave it out.")

    @property
    def is_minor(self) -> bool:
        """Whether the loss goes by whole answers."""
        return self.loss_function == "minor_sft"

    @property
    def named_aggregation(self) -> F.Aggregation:
        """See the base class."""
        return aggregation_name(
            self.aggregation or ("sequence_mean" if self.is_minor else "token_mean")
        )


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(TokenOptions):
    """Options of :class:`~objectives.DistillationLoss`, checked when they are made.

    Args:
        aggregation: see :class:`~objectives.DistillationLoss`.
        max_tokens: what ``"fixed_length"`` divides by.
        masking_strategy: ``"assistant"``, ``"response"`` or ``"all"``.
        temperature: the student's logits are divided by it.
        kl_direction: ``"reverse"`` or ``"forward"``.

    Raises:
        ValueError: an option is unknown or out of range.

    Example:
        >>> DistillationOptions(kl_direction="forward").temperature
        1.0
    """

    temperature: float | None = 1.0
    kl_direction: F.KLDirection | str = "reverse"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("kl_direction", self.kl_direction, F.KL_DIRECTIONS)


# The options of the GRPO loss: one frozen record that checks itself.

ClipEpsilon = float | tuple[float, float]
OldPolicy = Literal["sampler", "recomputed", "current"]
OLD_POLICIES: Final[tuple[OldPolicy, ...]] = ("sampler", "recomputed", "current")


class GRPOSettings(TypedDict, total=False):
    """The keyword arguments of :class:`~objectives.GRPOLoss`, see :class:`GRPOOptions`."""

    clip_epsilon: ClipEpsilon | None
    surrogate: str | SurrogateSettings | SurrogateFunction
    ratio_level: F.RatioLevel | str
    aggregation: str
    max_tokens: int | None
    masking_strategy: str
    kl_to_ref_coeff: float | None
    kl_to_inference_coeff: float | None
    kl_estimator: F.KLEstimator | str | None
    kl_bias_correction: bool
    entropy_bonus: bool
    entropy_coeff: float | None
    filters: TokenFilters | None
    kl_mask_threshold: float | None
    temperature: float | None
    old_policy: OldPolicy | str
    sampler_correction: SamplerCorrection | None
    skip_rows_without_signal: bool
    teacher_coeff: float | None
    advantage_coeff: float


@dataclass(frozen=True, kw_only=True)
class GRPOOptions(TokenOptions):
    """The options of :class:`~objectives.GRPOLoss`, checked when they are made.

    Args:
        aggregation: ``"token_mean"``, ``"sequence_mean"`` (TorchRL's ``"prompt_mean"``),
            ``"fixed_length"``, ``"sequence_sum"``; ``"none"`` gives ``[K]`` values.
        max_tokens: what ``"fixed_length"`` divides by.
        masking_strategy: ``"assistant"``: what the policy sampled; ``"response"``: everything
            from the first sampled token on; ``"all"``. (TorchRL: ``"rlhf"``, ``"sft"``,
            ``"generic"``.) A token that was not sampled has no behaviour log-prob and counts as
            on policy.
        temperature: that of the sampling, so that the ratio compares like with like; None takes
            the actor's own (``actor_network.temperature``), or 1 where it has none.
        clip_epsilon: the ratio is clipped to ``[1 - low, 1 + high]``; one number for both, or the
            pair. None is the surrogate's default: 0.2 for ``"clipped"``.
        surrogate: ``"clipped"``, ``"cispo"``, ``"sapo"``, ``"vespo"``, ``"gmpo"``,
            ``"divergence"``; settings such as ``CispoSurrogate(max_ratio=5.0)``; or a function of
            your own, see :class:`PolicyTokens` and :func:`reads`.
        ratio_level: ``"token"``, ``"sequence"`` (GSPO) or ``"sequence_token"``.
        kl_to_ref_coeff: weight of the KL to the reference; None or 0 for none.
        kl_to_inference_coeff: weight of the KL to the policy that sampled; None or 0 for none.
        kl_estimator: ``"k1"``, ``"k2"`` or ``"k3"``; None is ``"k3"``.
        kl_bias_correction: multiply the KL to the reference by the importance ratio.
        entropy_bonus: reward entropy, and report it.
        entropy_coeff: weight of the entropy bonus; None is 0.01.
        filters: which tokens the policy term leaves out.
        kl_mask_threshold: short for ``TokenFilters(trust_region=...)``, in nats.
        old_policy: what the ratio's denominator is: ``"sampler"``, the log-probs stored when the
            tokens were sampled; ``"recomputed"``, the trainer's own from before the update;
            ``"current"``, this very call's (one update per batch).
        sampler_correction: settings; weighs tokens by ``pi_old / pi_sampler``, for
            ``old_policy`` other than ``"sampler"``.
        skip_rows_without_signal: do not score rows whose advantage is 0; metrics then leave them
            out, the loss is the same.
        teacher_coeff: weight of ``log q - log pi`` of each token, q the teacher, which is added to
            its advantage: on-policy distillation; None for none.
        advantage_coeff: weight of the batch's own advantage beside it; with 0 it is not read.

    Raises:
        TypeError: settings are of another class.
        ValueError: an option is unknown, out of range, or cannot take effect with the others.
    """

    clip_epsilon: ClipEpsilon | None = None
    surrogate: str | SurrogateSettings | SurrogateFunction = "clipped"
    ratio_level: F.RatioLevel | str = "token"
    kl_to_ref_coeff: float | None = None
    kl_to_inference_coeff: float | None = None
    kl_estimator: F.KLEstimator | str | None = None
    kl_bias_correction: bool = False
    entropy_bonus: bool = False
    entropy_coeff: float | None = None
    filters: TokenFilters | None = None
    kl_mask_threshold: float | None = None
    old_policy: OldPolicy | str = "sampler"
    sampler_correction: SamplerCorrection | None = None
    skip_rows_without_signal: bool = False
    teacher_coeff: float | None = None
    advantage_coeff: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("ratio_level", self.ratio_level, F.RATIO_LEVELS)
        one_of("old_policy", self.old_policy, OLD_POLICIES)
        check_numbers(
            "",
            NOT_NEGATIVE,
            kl_to_ref_coeff=self.kl_to_ref_coeff,
            kl_to_inference_coeff=self.kl_to_inference_coeff,
            entropy_coeff=self.entropy_coeff,
            advantage_coeff=self.advantage_coeff,
        )
        check_numbers("", POSITIVE, teacher_coeff=self.teacher_coeff)
        if not self.advantage_coeff and self.teacher_coeff is None:
            raise ValueError("advantage_coeff=0 leaves no advantage: give teacher_coeff too.")
        check_type("filters", self.filters, TokenFilters)
        check_type("sampler_correction", self.sampler_correction, SamplerCorrection)
        region = None if self.filters is None else self.filters.trust_region
        if None not in (self.kl_mask_threshold, region):
            raise ValueError(
                f"kl_mask_threshold={self.kl_mask_threshold} and filters.trust_region={region} are "
                "one option: give one."
            )
        self._check_ratio()
        one_of("kl_estimator", self.kl_estimator or "k3", F.KL_ESTIMATORS)
        # A coefficient of 0 may be a value of a schedule, which comes to another one.
        if self.kl_estimator and self.kl_to_ref_coeff is None is self.kl_to_inference_coeff:
            raise ValueError(
                f"kl_estimator={self.kl_estimator!r} has no effect without kl_to_ref_coeff or "
                "kl_to_inference_coeff."
            )
        if self.kl_bias_correction and self.kl_to_ref_coeff is None:
            raise ValueError("kl_bias_correction has no effect without kl_to_ref_coeff.")
        if self.entropy_coeff is not None and not self.entropy_bonus:
            raise ValueError(
                f"entropy_coeff={self.entropy_coeff} has no effect without entropy_bonus=True."
            )
        filters = self.all_filters()
        if self.skip_rows_without_signal and self.has_penalty:
            raise ValueError(
                "skip_rows_without_signal drops rows that a KL, entropy or teacher term would "
                "still move: switch one of them off."
            )
        if self.skip_rows_without_signal and filters.top_entropy_fraction is not None:
            raise ValueError(
                "skip_rows_without_signal does not score rows that top_entropy_fraction counts: "
                "switch one of them off."
            )

    def all_filters(self) -> TokenFilters:
        """The filters, with TorchRL's name for one of them."""
        filters = self.filters or TokenFilters()
        if self.kl_mask_threshold is None:
            return filters
        return replace(filters, trust_region=self.kl_mask_threshold)

    def surrogate_function(self) -> SurrogateFunction:
        """The surrogate with its settings and the clip bounds."""
        settings = self.surrogate
        if isinstance(settings, str):
            settings = SURROGATES[one_of("surrogate", settings, tuple(SURROGATES))]()
        clip = self.clip_epsilon
        function = settings.bind() if isinstance(settings, SurrogateSettings) else settings
        if clip is None:
            return function
        if not takes_clip(settings):
            raise ValueError(
                f"clip_epsilon={self.clip_epsilon} has no effect on surrogate {self.surrogate!r}: "
                "give it settings with a bound of its own, and leave clip_epsilon out."
            )
        if {"clip_low", "clip_high"} & getattr(function, "keywords", {}).keys():
            raise ValueError(
                f"clip_epsilon={self.clip_epsilon} and {settings} both give the clip bounds: give "
                "them once."
            )
        low, high = pair("clip_epsilon", (clip, clip) if isinstance(clip, Real) else clip)
        if isinstance(settings, SurrogateSettings):
            return replace(settings, clip_low=low, clip_high=high).bind()  # type: ignore[call-arg]
        return partial(function, clip_low=low, clip_high=high)

    def _check_ratio(self) -> None:
        if not callable(self.surrogate) and not isinstance(self.surrogate, SurrogateSettings | str):
            raise TypeError(
                f"surrogate takes one of {tuple(SURROGATES)}, settings such as "
                f"ClippedSurrogate(...), or a function, got {self.surrogate!r}."
            )
        function = self.surrogate_function()
        inputs = surrogate_inputs(function)
        if not isinstance(self.surrogate, SurrogateSettings | str):  # which are tried themselves
            try_surrogate(function)
        if inputs & {"lengths", "behavior_log_prob"} and self.ratio_level != "token":
            raise ValueError(
                f"surrogate {self.surrogate!r} has a ratio of its own: leave ratio_level at "
                f"'token', got {self.ratio_level!r}."
            )
        if self.sampler_correction is not None and self.old_policy == "sampler":
            raise ValueError(
                "sampler_correction weighs by pi_old / pi_sampler, which is 1 for "
                "old_policy='sampler': set old_policy to 'recomputed' or 'current'."
            )

    @property
    def has_penalty(self) -> bool:
        """Whether a term moves the policy also where the batch's advantage is 0."""
        kl = self.kl_to_ref_coeff or self.kl_to_inference_coeff
        return bool(kl or self.entropy_bonus or self.teacher_coeff)


def options_of(
    who: str, preset: GRPOSettings, options: GRPOOptions | None, settings: Mapping[str, Any]
) -> GRPOOptions:
    """The options of a loss from what it was given."""
    check_names(who, settings, [field.name for field in fields(GRPOOptions)])
    check_type("options", options, GRPOOptions, who=who)
    if options is not None:
        if preset:
            raise ValueError(
                f"{who} is GRPOLoss with options of its own ({dict(preset)}): give options= to "
                "GRPOLoss, or single ones here."
            )
        return replace(options, **settings)
    merged: dict[str, Any] = {**preset, **settings}
    # The preset's clip bounds give way to another surrogate, unless that leaves its own open.
    if "surrogate" in settings and "clip_epsilon" not in settings:
        chosen = settings["surrogate"]
        unbounded = (
            isinstance(chosen, ClippedSurrogate) and chosen.clip_low is None is chosen.clip_high
        )
        if chosen != "clipped" and not unbounded:
            merged.pop("clip_epsilon", None)
    return GRPOOptions(**merged)


def signature_with(preset: GRPOSettings, *, method: bool = False) -> inspect.Signature:
    """The signature that a loss shows: every option with its default, instead of ``**settings``."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    positional = ["self", "actor_network"] if method else ["actor_network"]
    shown = [
        *(inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in positional),
        inspect.Parameter("options", keyword, default=None, annotation="GRPOOptions | None"),
        inspect.Parameter("read", keyword, default=None, annotation="GRPOLossKeys | None"),
    ]
    for field in fields(GRPOOptions):
        default = preset.get(field.name, field.default)
        shown.append(inspect.Parameter(field.name, keyword, default=default, annotation=field.type))
    return inspect.Signature(shown)

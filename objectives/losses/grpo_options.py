"""The options of the GRPO loss: one frozen record that checks itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

import objectives
from torchrl_data.checks import NOT_NEGATIVE, POSITIVE, check_numbers, check_type, one_of

from .sampler_correction import SamplerCorrection
from .token_filters import TokenFilters
from .token_options import TokenOptions

if TYPE_CHECKING:
    from objectives import functional as F

    from .surrogates import SurrogateFunction, SurrogateSettings

ClipEpsilon = float | tuple[float, float]
OldPolicy = Literal["sampler", "recomputed", "current"]
OLD_POLICIES: Final[tuple[OldPolicy, ...]] = ("sampler", "recomputed", "current")


@dataclass(frozen=True, kw_only=True)
class GRPOOptions(TokenOptions):
    """The options of :class:`~objectives.GRPOLoss`, checked when they are made.

    Each can be given to the loss by its name.

    Raises:
        TypeError: settings are of another class.
        ValueError: an option is unknown, out of range, or cannot take effect with the others.

    Example:
        >>> options = GRPOOptions(clip_epsilon=(0.2, 0.28), entropy_coeff=0.01)
        >>> options.has_entropy_bonus, options.kl_to_ref_coeff
        (True, None)
    """

    masking_strategy: str = "assistant"
    """``"assistant"``: what the policy sampled; ``"response"``: everything from the first sampled
    token on; ``"all"``. (TorchRL: ``"rlhf"``, ``"sft"``, ``"generic"``.) A token that was not
    sampled has no behaviour log-prob and counts as on policy."""
    temperature: float | None = None
    """That of the sampling, so that the ratio compares like with like; None takes the actor's own
    (``actor_network.temperature``), or 1 where it has none."""
    clip_epsilon: ClipEpsilon | None = None
    """The ratio is clipped to ``[1 - low, 1 + high]``; one number for both, or the pair. None is
    the surrogate's default: 0.2 for ``"clipped"``."""
    surrogate: str | SurrogateSettings | SurrogateFunction = "clipped"
    """``"clipped"``, ``"cispo"``, ``"sapo"``, ``"vespo"``, ``"gmpo"``, ``"divergence"``; settings
    such as ``CispoSurrogate(max_ratio=5.0)``; or a function of your own, see :class:`PolicyTokens`
    and :func:`reads`."""
    ratio_level: F.RatioLevel | str = "token"
    """``"token"``, ``"sequence"`` (GSPO) or ``"sequence_token"``."""
    kl_to_ref_coeff: float | None = None
    """Weight of the KL to the reference; None or 0 for none."""
    kl_to_inference_coeff: float | None = None
    """Weight of the KL to the policy that sampled; None or 0 for none."""
    kl_estimator: F.KLEstimator | str | None = None
    """``"k1"``, ``"k2"`` or ``"k3"``; None is ``"k3"``."""
    kl_bias_correction: bool = False
    """Multiply the KL to the reference by the importance ratio."""
    entropy_bonus: bool | None = None
    """Reward entropy, and report it; None: where ``entropy_coeff`` is given and not 0."""
    entropy_coeff: float | None = None
    """Weight of the entropy bonus; None is 0.01."""
    filters: TokenFilters | None = None
    """Which tokens the policy term leaves out."""
    kl_mask_threshold: float | None = None
    """Short for ``TokenFilters(trust_region=...)``, in nats."""
    old_policy: OldPolicy | str = "sampler"
    """The denominator of the ratio: ``"sampler"``, the log-probs stored when the tokens were
    sampled; ``"recomputed"``, the trainer's own from before the update; ``"current"``, this very
    call's (one update per batch)."""
    sampler_correction: SamplerCorrection | None = None
    """Settings; weighs tokens by ``pi_old / pi_sampler``, for ``old_policy`` other than
    ``"sampler"``."""
    skip_rows_without_signal: bool = False
    """Do not score rows whose advantage is 0; metrics then leave them out, the loss is the same."""
    teacher_coeff: float | None = None
    """Weight of ``log q - log pi`` of each token, q the teacher, which is added to its advantage:
    on-policy distillation; None for none."""
    advantage_coeff: float = 1.0
    """Weight of the batch's own advantage beside it; with 0 it is not read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("ratio_level", self.ratio_level, objectives.functional.RATIO_LEVELS)
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
        self.surrogate_function()  # tried
        if self.sampler_correction is not None and self.old_policy == "sampler":
            raise ValueError(
                "sampler_correction weighs by pi_old / pi_sampler, which is 1 for "
                "old_policy='sampler': set old_policy to 'recomputed' or 'current'."
            )
        one_of("kl_estimator", self.kl_estimator or "k3", objectives.functional.KL_ESTIMATORS)
        # A coefficient of 0 may be a value of a schedule, which comes to another one.
        if self.kl_estimator and self.kl_to_ref_coeff is None is self.kl_to_inference_coeff:
            raise ValueError(
                f"kl_estimator={self.kl_estimator!r} has no effect without kl_to_ref_coeff or "
                "kl_to_inference_coeff."
            )
        if self.kl_bias_correction and self.kl_to_ref_coeff is None:
            raise ValueError("kl_bias_correction has no effect without kl_to_ref_coeff.")
        if self.entropy_coeff is not None and self.entropy_bonus is False:
            raise ValueError(
                f"entropy_coeff={self.entropy_coeff} has no effect with entropy_bonus=False."
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
        from .surrogates import bind_surrogate

        return bind_surrogate(self.surrogate, self.clip_epsilon, self.ratio_level)

    @property
    def has_penalty(self) -> bool:
        """Whether a term moves the policy also where the batch's advantage is 0."""
        kl = self.kl_to_ref_coeff or self.kl_to_inference_coeff
        return bool(kl or self.has_entropy_bonus or self.teacher_coeff)

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether entropy is rewarded."""
        return bool(self.entropy_coeff) if self.entropy_bonus is None else self.entropy_bonus

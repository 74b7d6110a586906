"""Checks of the options of a loss, done once at construction."""

from __future__ import annotations

from dataclasses import replace
from numbers import Real
from typing import TYPE_CHECKING

import torch

from objectives import functional as F
from objectives.validation import (
    check_coefficients,
    check_counts,
    check_positive,
    check_type,
    one_of,
    pair,
)
from torchrl_data.protocols import TokenScorer

from .surrogate_options import (
    SURROGATES,
    ClippedSurrogate,
    GmpoSurrogate,
    PolicyTokens,
    SamplerCorrection,
    SurrogateSettings,
    TokenFilters,
)

if TYPE_CHECKING:
    from .grpo import GRPOLoss

ClipEpsilon = float | tuple[float, float]


def check_scorer(actor: object, who: str) -> None:
    """Check that an actor can score packed tokens.

    Args:
        actor: what was given.
        who: the loss, for the message.

    Raises:
        TypeError: it lacks ``score_packed``.
    """
    if not isinstance(actor, TokenScorer):
        raise TypeError(
            f"{who} needs an actor with a score_packed method "
            "(torchrl_data.protocols.TokenScorer), such as TransformersWrapper; "
            f"got {type(actor).__name__}."
        )


def _clip_pair(clip_epsilon: ClipEpsilon) -> tuple[float, float]:
    if isinstance(clip_epsilon, Real):
        return float(clip_epsilon), float(clip_epsilon)
    return pair("clip_epsilon", clip_epsilon)


def build_surrogate(
    surrogate: str | SurrogateSettings, clip_epsilon: ClipEpsilon | None
) -> SurrogateSettings:
    """The surrogate's settings, from its name or as given.

    Args:
        surrogate: one of :data:`~.parts.SURROGATES`, or settings.
        clip_epsilon: the clip bounds of the clipped and the GMPO surrogate, by name.

    Returns:
        Settings that were tried on no tokens.

    Raises:
        TypeError: it is neither a name nor settings.
        ValueError: the name is unknown, a setting is out of range, or ``clip_epsilon`` cannot
            take effect.
    """
    if isinstance(surrogate, str):
        name = one_of("surrogate", surrogate, tuple(SURROGATES), {})
        settings = SURROGATES[name]()
    else:
        check_type("surrogate", surrogate, SurrogateSettings)
        settings = surrogate
    if clip_epsilon is not None:
        if not isinstance(surrogate, str):
            raise ValueError(
                "Give the clip bounds to the surrogate's settings, not as clip_epsilon."
            )
        if not isinstance(settings, ClippedSurrogate | GmpoSurrogate):
            raise ValueError(
                f"clip_epsilon has no effect on surrogate {surrogate!r}: pass "
                f"{type(settings).__name__}(...) with its own bound."
            )
        low, high = _clip_pair(clip_epsilon)
        settings = replace(settings, clip_low=low, clip_high=high)
    none = torch.zeros(0)
    lengths = torch.zeros(0, dtype=torch.int64)
    settings(PolicyTokens(none, none, none, none > 0, lengths, None))
    return settings


def merge_filters(filters: TokenFilters | None, kl_mask_threshold: float | None) -> TokenFilters:
    """The filters, with TorchRL's name for one of them.

    Args:
        filters: settings, or None for none.
        kl_mask_threshold: short for ``TokenFilters(trust_region=...)``, in nats.

    Returns:
        Settings.

    Raises:
        TypeError: the filters are no ``TokenFilters``.
        ValueError: the threshold is given twice, or is not positive.
    """
    check_type("filters", filters, TokenFilters)
    filters = filters or TokenFilters()
    if kl_mask_threshold is None:
        return filters
    if filters.trust_region is not None:
        raise ValueError("kl_mask_threshold and filters.trust_region are one option: give one.")
    return replace(filters, trust_region=kl_mask_threshold)


def scorer_device(actor: object) -> torch.device | None:
    """Where an actor's parameters are; None when it has none to show.

    Args:
        actor: a scorer, a module or not.

    Returns:
        The device of its first parameter.
    """
    if not isinstance(actor, torch.nn.Module):
        return None
    first = next(actor.parameters(), None)
    return None if first is None else first.device


def sampling_temperature(actor: object) -> float:
    """The temperature that an actor samples with, as its ``temperature`` says.

    Args:
        actor: a scorer.

    Returns:
        1.0 where it does not say, or takes the most likely token (temperature 0).
    """
    return float(getattr(actor, "temperature", 1.0)) or 1.0


def check_token_options(aggregation: str, max_tokens: int | None, temperature: float) -> None:
    """Check the options that all losses over tokens have.

    Args:
        aggregation: known.
        max_tokens: what ``"fixed_length"`` divides by.
        temperature: of the logits.

    Raises:
        ValueError: naming the option and what to do.
    """
    if temperature is None:
        raise ValueError("temperature must be a positive number, got None.")
    check_positive(temperature=temperature)
    if (aggregation == "fixed_length") != (max_tokens is not None):
        raise ValueError("max_tokens goes with aggregation 'fixed_length': give both or none.")
    check_counts(max_tokens=max_tokens)


def entropy_coefficient(entropy_coeff: float | None, *, entropy_bonus: bool) -> float:
    """The weight of the entropy bonus.

    Args:
        entropy_coeff: None for the default, 0.01.
        entropy_bonus: whether there is a bonus.

    Returns:
        The weight.

    Raises:
        ValueError: a weight is given without a bonus.
    """
    if entropy_coeff is None:
        return 0.01
    if not entropy_bonus:
        raise ValueError("entropy_coeff has no effect without entropy_bonus=True.")
    return entropy_coeff


def kl_estimator_name(estimator: str | None, *coefficients: float | None) -> F.KLEstimator:
    """The estimator of the KL terms.

    Args:
        estimator: None for the default, ``"k3"``.
        *coefficients: of the KL terms; None or 0 for none.

    Returns:
        Its name.

    Raises:
        ValueError: the name is unknown, or there is no KL term.
    """
    name = one_of("kl_estimator", "k3" if estimator is None else estimator, F.KL_ESTIMATORS, {})
    if estimator is not None and not any(coefficients):
        raise ValueError(
            "kl_estimator has no effect without kl_to_ref_coeff or kl_to_inference_coeff."
        )
    return name


def check_together(loss: GRPOLoss) -> None:
    """Refuse options that are out of range, or cannot take effect with the others.

    Args:
        loss: with its options set.

    Raises:
        TypeError: the sampler correction is no ``SamplerCorrection``.
        ValueError: naming the option and what to do.
    """
    check_coefficients(
        kl_to_ref_coeff=loss.kl_to_ref_coeff,
        kl_to_inference_coeff=loss.kl_to_inference_coeff,
        entropy_coeff=loss.entropy_coeff,
    )
    check_type("sampler_correction", loss.sampler_correction, SamplerCorrection)
    if loss.ratio_level != "token" and not loss.surrogate.takes_ratio_level:
        raise ValueError(
            f"{type(loss.surrogate).__name__} has a ratio of its own: leave ratio_level "
            f"at 'token', got {loss.ratio_level!r}."
        )
    if loss.sampler_correction is not None and loss.old_policy == "sampler":
        raise ValueError(
            "sampler_correction weighs by pi_old / pi_sampler, which is 1 for "
            "old_policy='sampler': set old_policy to 'recomputed' or 'current'."
        )
    if loss.kl_bias_correction and not loss.kl_to_ref_coeff:
        raise ValueError("kl_bias_correction has no effect without kl_to_ref_coeff.")
    penalties = loss.kl_to_ref_coeff or loss.kl_to_inference_coeff or loss.entropy_bonus
    if loss.skip_rows_without_signal and penalties:
        raise ValueError(
            "skip_rows_without_signal drops rows that a KL or entropy term would still move: "
            "switch one of them off."
        )
    if loss.skip_rows_without_signal and loss.filters.top_entropy_fraction is not None:
        raise ValueError(
            "skip_rows_without_signal does not score rows that top_entropy_fraction counts: "
            "switch one of them off."
        )

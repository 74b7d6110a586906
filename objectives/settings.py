"""Checks of the options of a loss, done once at construction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from torchrl_data.protocols import TokenScorer

from .parts import (
    SURROGATES,
    ClippedSurrogate,
    GmpoSurrogate,
    PolicyTokens,
    SurrogateSettings,
    TokenFilters,
)

if TYPE_CHECKING:
    from .grpo import GRPOLoss

Choice = TypeVar("Choice", bound=str)
ClipEpsilon = float | tuple[float, float]


def one_of(
    name: str, value: str, choices: Sequence[Choice], aliases: Mapping[str, Choice]
) -> Choice:
    """Check an option that takes one of a few names.

    Args:
        name: of the option, for the message.
        value: what was given.
        choices: the names.
        aliases: other spellings, such as TorchRL's.

    Returns:
        The name.

    Raises:
        ValueError: there is no such choice; the message lists all.
    """
    value = aliases.get(value, value)
    for choice in choices:
        if value == choice:
            return choice
    raise ValueError(f"{name} must be one of {tuple(choices)}, got {value!r}.")


def check_coefficients(**coefficients: float | None) -> None:
    """Check that coefficients are not negative.

    Args:
        **coefficients: by the name of the option; None is off.

    Raises:
        ValueError: one is negative, or not a number.
    """
    for name, value in coefficients.items():
        if value is not None and not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}.")


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
    if isinstance(clip_epsilon, Iterable):
        low, high = clip_epsilon
        return float(low), float(high)
    return float(clip_epsilon), float(clip_epsilon)


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
        ValueError: the name is unknown, a setting is out of range, or ``clip_epsilon`` cannot
            take effect.
    """
    if isinstance(surrogate, str):
        name = one_of("surrogate", surrogate, tuple(SURROGATES), {})
        settings = SURROGATES[name]()
    else:
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
        ValueError: the threshold is given twice, or is not positive.
    """
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
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}.")
    if (aggregation == "fixed_length") != (max_tokens is not None):
        raise ValueError("max_tokens goes with aggregation 'fixed_length': give both or none.")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens must be positive, got {max_tokens}.")


def check_together(loss: GRPOLoss) -> None:
    """Refuse options that are out of range, or cannot take effect with the others.

    Args:
        loss: with its options set.

    Raises:
        ValueError: naming the option and what to do.
    """
    check_coefficients(
        kl_to_ref_coeff=loss.kl_to_ref_coeff,
        kl_to_inference_coeff=loss.kl_to_inference_coeff,
        entropy_coeff=loss.entropy_coeff,
    )
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

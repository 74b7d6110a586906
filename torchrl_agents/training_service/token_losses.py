"""Losses of a training request by name: sums over tokens, as Tinker's clients expect them.

Shape legend: K tokens of all sequences one after the other, B sequences.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor

from objectives.functional import clipped_surrogate, leveled_log_ratio, log_ratio

from .errors import RefusedRequest


class ScoredTokens(NamedTuple):
    """What a loss reads of the tokens of a micro-batch."""

    log_prob: Tensor
    """float32 ``[K]``, in nats, differentiable."""
    inputs: Mapping[str, Tensor]
    """float32 ``[K]`` each, by the name that the request gives them."""
    lengths: Tensor
    """int64 ``[B]``, summing to K."""


class NamedLoss(NamedTuple):
    """A loss, and what a request for it has to bring."""

    compute: Callable[..., Tensor]
    """Of :class:`ScoredTokens` and the settings: the loss of each token, ``[K]``."""
    inputs: tuple[str, ...]
    """Inputs of each token beside ``target_tokens``."""
    settings: Mapping[str, float | None]
    """Defaults by name; ``None`` has to be given."""


def _cross_entropy(tokens: ScoredTokens) -> Tensor:
    return -tokens.log_prob * tokens.inputs["weights"]


def _ratio_of(tokens: ScoredTokens) -> Tensor:
    return log_ratio(tokens.log_prob, tokens.inputs["logprobs"])


def _importance_sampling(tokens: ScoredTokens) -> Tensor:
    return -_ratio_of(tokens).exp() * tokens.inputs["advantages"]


def _ppo(tokens: ScoredTokens, *, clip_low_threshold: float, clip_high_threshold: float) -> Tensor:
    return _clipped(_ratio_of(tokens), tokens, clip_low_threshold, clip_high_threshold)


def _clipped(ratio: Tensor, tokens: ScoredTokens, low: float, high: float) -> Tensor:
    advantages = tokens.inputs["advantages"]
    return clipped_surrogate(ratio, advantages, clip_low=1 - low, clip_high=high - 1).loss


def _cispo(
    tokens: ScoredTokens, *, clip_low_threshold: float, clip_high_threshold: float
) -> Tensor:
    weight = _ratio_of(tokens).detach().exp().clamp(clip_low_threshold, clip_high_threshold)
    return -weight * tokens.log_prob * tokens.inputs["advantages"]


def _dro(tokens: ScoredTokens, *, beta: float) -> Tensor:
    away = tokens.log_prob - tokens.inputs["logprobs"]
    return -(tokens.log_prob * tokens.inputs["advantages"] - 0.5 * beta * away.square())


def _gspo(tokens: ScoredTokens, *, clip_low_threshold: float, clip_high_threshold: float) -> Tensor:
    is_sampled = tokens.inputs["sequence_ratio_mask"] != 0
    ratio = leveled_log_ratio(_ratio_of(tokens), is_sampled, tokens.lengths, level="sequence_token")
    return _clipped(ratio, tokens, clip_low_threshold, clip_high_threshold)


_OF_A_SAMPLER: Final = ("logprobs", "advantages")
_CLIPS: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

TOKEN_LOSSES: Final[Mapping[str, NamedLoss]] = {
    "cross_entropy": NamedLoss(_cross_entropy, ("weights",), {}),
    "importance_sampling": NamedLoss(_importance_sampling, _OF_A_SAMPLER, {}),
    "ppo": NamedLoss(_ppo, _OF_A_SAMPLER, _CLIPS),
    "cispo": NamedLoss(_cispo, _OF_A_SAMPLER, _CLIPS),
    "dro": NamedLoss(_dro, _OF_A_SAMPLER, {"beta": 0.05}),
    "gspo": NamedLoss(_gspo, (*_OF_A_SAMPLER, "sequence_ratio_mask"), dict.fromkeys(_CLIPS, None)),
}
"""With p the probability of a token now, q when it was drawn, r = p / q and A its advantage:

- ``cross_entropy``: ``-weights log p``;
- ``importance_sampling``: ``-r A``;
- ``ppo``: ``-min(r A, clip(r) A)`` (arXiv:1707.06347, eq. 7);
- ``cispo``: ``-sg(clip(r)) A log p`` (arXiv:2506.13585, eq. 4);
- ``dro``: ``-(A log p - beta / 2 (log p - log q)^2)`` (arXiv:2405.19107);
- ``gspo``: that of ``ppo``, with the ratio of the sequence and the gradient of the token
  (arXiv:2507.18071, eq. 14). Its clips are orders of magnitude nearer to 1: they have to be given.
"""


def token_loss(name: str, settings: Mapping[str, Any]) -> Callable[[ScoredTokens], Tensor]:
    """Return the loss of each token, ``[K]``, as a function of the tokens.

    Args:
        name: one of :data:`TOKEN_LOSSES`.
        settings: ``loss_fn_config`` of the request.

    Raises:
        RefusedRequest: the name or a setting is unknown, a setting is missing or no such number.
    """
    if name not in TOKEN_LOSSES:
        raise RefusedRequest(
            f"loss_fn={name!r} is not served here; there are {', '.join(TOKEN_LOSSES)}. "
            "forward_backward_custom computes any other one beside the client."
        )
    loss = TOKEN_LOSSES[name]
    unknown = sorted(set(settings) - set(loss.settings))
    if unknown:
        known = ", ".join(loss.settings) or "no setting"
        raise RefusedRequest(f"loss_fn={name!r} has no {unknown[0]!r} in loss_fn_config: {known}.")
    values = {**loss.settings, **settings}
    for key, value in values.items():
        if value is None:
            raise RefusedRequest(
                f"loss_fn={name!r} has no default for {key}: give loss_fn_config={{{key!r}: ...}}."
            )
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):
            raise RefusedRequest(f"loss_fn={name!r}: {key} must be a number from 0, got {value!r}.")
    low, high = (float(values.get(f"clip_{end}_threshold") or 1) for end in ("low", "high"))
    if not low <= 1 <= high:
        raise RefusedRequest(
            f"loss_fn={name!r}: clip thresholds bound the ratio and lie around 1, got {low} and "
            f"{high}."
        )
    return lambda tokens: loss.compute(tokens, **values)

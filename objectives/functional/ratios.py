"""Importance ratios of the policy to the one that sampled, by token or by sequence.

Shape legend: B sequences, T tokens, N packed tokens; ``*shape`` is ``[B, T]`` or ``[N]``.
"""

from typing import Final, Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from .sequences import at_least_float32, check_alike, masked, sequence_mean, spread

LOG_RATIO_LIMIT: Final = 20.0
"""A log-ratio is kept within plus or minus this, in nats.

``exp(20)`` is 4.9e8: such a ratio carries no information, but its overflow to infinity a little
further on would turn ``0 * inf`` into NaN. No gradient flows beyond the limit.
"""
RatioLevel = Literal["token", "sequence", "sequence_token"]
RATIO_LEVELS: Final[tuple[RatioLevel, ...]] = ("token", "sequence", "sequence_token")


def log_ratio(
    log_prob: Float[Tensor, "*shape"],
    behavior_log_prob: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Log of the importance ratio of each token.

    Args:
        log_prob: log-probability under the policy that is trained, in nats, ``[B, T]`` or ``[N]``.
        behavior_log_prob: the same tokens under the policy that sampled them; never
            differentiated.
        mask: True where the token is trained; None for all. Elsewhere the result is 0, whatever
            the inputs hold (NaN and infinities included), and no gradient flows.

    Returns:
        ``log_prob - behavior_log_prob`` in nats, within plus or minus :data:`LOG_RATIO_LIMIT`;
        float32 at least, in which its exponential is finite.
    """
    check_alike(log_prob=log_prob, behavior_log_prob=behavior_log_prob)
    difference = at_least_float32(log_prob) - at_least_float32(behavior_log_prob.detach())
    return masked(difference, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_log_ratio(
    token_log_ratio: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Mean log-ratio of each sequence, given to each of its tokens (GSPO).

    The mean, not the sum: the sum grows with the length, so that a gap of -0.001 nats a token
    leaves a 4,096-token sequence a weight of 0.017.

    Args:
        token_log_ratio: in nats, ``[B, T]`` or ``[N]``.
        mask: True where the token is trained; None for all.
        lengths: ``[B]`` when packed.

    Returns:
        The shape of the input; 0 on the sequences without trained tokens.

    Raises:
        ValueError: the shapes are neither layout.

    See Also:
        Zheng et al., 2025, arXiv:2507.18071, eq. 7.
    """
    return spread(sequence_mean(token_log_ratio, mask, lengths), token_log_ratio, lengths)


def leveled_log_ratio(
    token_log_ratio: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
    *,
    level: RatioLevel | str = "token",
) -> Float[Tensor, "*shape"]:
    """The log-ratio at the level at which it is clipped.

    Args:
        token_log_ratio: in nats, ``[B, T]`` or ``[N]``.
        mask: True where the token is trained; None for all.
        lengths: ``[B]`` when packed.
        level: ``"token"`` gives the input back; ``"sequence"`` the sequence's mean (GSPO, eq. 7);
            ``"sequence_token"`` the value of the mean with the gradient of the token (GSPO-token,
            eq. 14), for advantages that differ within a sequence.

    Returns:
        The shape of the input.

    Raises:
        ValueError: the level is unknown, or the shapes are neither layout.

    See Also:
        Zheng et al., 2025, arXiv:2507.18071, eq. 7 and 14.
    """
    if level not in RATIO_LEVELS:
        raise ValueError(f"level must be one of {RATIO_LEVELS}, got {level!r}.")
    if level == "token":
        return token_log_ratio
    sequence = sequence_log_ratio(token_log_ratio, mask, lengths)
    if level == "sequence":
        return sequence
    return sequence.detach() + token_log_ratio - token_log_ratio.detach()

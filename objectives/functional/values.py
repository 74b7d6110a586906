"""Advantages from the values of a critic, and the loss of the critic.

Shape legend: B sequences, T tokens of the longest one, N tokens of all of them; ``*shape`` is
``[B, T]`` or ``[N]``.
"""

from typing import Final, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from .sequences import at_least_float32, check_alike, check_layout, masked, sequence_index

CriticLossType = Literal["smooth_l1", "l2", "l1"]
CRITIC_LOSS_TYPES: Final[tuple[CriticLossType, ...]] = ("smooth_l1", "l2", "l1")


def _neighbours(
    mask: Bool[Tensor, " N"], sequence: Int[Tensor, " N"]
) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
    """The next masked token of the sequence after each, and the last one at or before each."""
    # N where there is none.
    count = len(mask)
    place = torch.arange(count, device=mask.device)
    none = torch.full((1,), count, device=mask.device)
    after = torch.where(mask, place, count).flip(0).cummin(0).values.flip(0)
    after = torch.cat([after[1:], none])  # strictly after
    before = torch.where(mask, place, -1).cummax(0).values
    padded = torch.cat([sequence, none * 0 - 1])
    after = torch.where(padded[after] == sequence, after, count)
    is_own = (before >= 0) & (sequence[before.clamp(min=0)] == sequence)
    return after, torch.where(is_own, before, count)


def generalized_advantage(
    reward: Float[Tensor, "*shape"],
    value: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
    *,
    gamma: float = 1.0,
    lmbda: float = 0.95,
) -> Float[Tensor, "*shape"]:
    r"""Generalised advantage estimation over the sampled tokens of each sequence.

    With :math:`t'` for the token that is sampled after :math:`t`,

    .. math::

        A_t = \delta_t + \gamma \lambda A_{t'}, \qquad
        \delta_t = r_t + \gamma V_{t'} - V_t

    and nothing after the last. What a tool or a user says between two sampled tokens is no step: it
    is part of the state that the next one is sampled in. A reward that is given there belongs to
    the sampled token before it, and what is given before the first one to the first.

    Args:
        reward: of each token, 0 where none is given.
        value: what the critic says before each token is sampled; read where sampled.
        mask: True on the sampled tokens; all of them when not given.
        lengths: tokens of each sequence, of packed ones.
        gamma: discount of a sampled token.
        lmbda: 1 for the whole return less the value, 0 for one step.

    Returns:
        In float32 at least, 0 where nothing is sampled. The return by which the critic is trained
        is the advantage and the value.

    See Also:
        Schulman et al., 2015, arXiv:1506.02438, equation 16.

    Example:
        >>> reward, value = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.25, 0.5])
        >>> lengths = torch.tensor([3])
        >>> generalized_advantage(reward, value, lengths=lengths, lmbda=0.0)
        tensor([-0.2500,  0.2500,  0.5000])
        >>> generalized_advantage(reward, value, lengths=lengths, lmbda=1.0)
        tensor([0.5000, 0.7500, 0.5000])
    """
    check_layout(value, lengths)
    check_alike(reward=reward, value=value)
    shape, device = value.shape, value.device
    if lengths is None:
        lengths = torch.full((shape[0],), shape[1], device=device)
    sampled = torch.ones_like(value, dtype=torch.bool) if mask is None else mask
    sampled, values = sampled.reshape(-1), masked(at_least_float32(value), mask).reshape(-1)
    sequence = sequence_index(lengths, len(values))
    after, before = _neighbours(sampled, sequence)
    # One place more, for what lies after the end of a sequence: nothing.
    nothing = values.new_zeros(1)
    owner = torch.where(before < len(values), before, after)
    gained = torch.cat([torch.zeros_like(values), nothing])
    gained = gained.index_add(0, owner, reward.reshape(-1).to(values.dtype))[:-1]
    later = torch.cat([values, nothing])[after]
    total = torch.cat([masked(gained + gamma * later - values, sampled), nothing])
    # Sums of 1, 2, 4, ... terms: each the one before it, and the one that begins where that ends.
    jump = torch.cat([after, after.new_full((1,), len(values))])
    decay, covered = gamma * lmbda, 1
    while covered < len(values) and decay:
        total = total + decay * total[jump]
        jump, decay, covered = jump[jump], decay * decay, 2 * covered
    return masked(total[:-1], sampled).reshape(shape)


def value_loss(
    value: Float[Tensor, "*shape"],
    target: Float[Tensor, "*shape"],
    old_value: Float[Tensor, "*shape"] | None = None,
    *,
    clip_value: float | None = None,
    loss_type: CriticLossType = "smooth_l1",
) -> Float[Tensor, "*shape"]:
    """The loss of a critic at each token.

    Args:
        value: what the critic says now.
        target: the return that it should have said.
        old_value: what it said when the advantages were computed; for ``clip_value``.
        clip_value: where a step has moved the value further than this from the old one towards the
            target, there is no gradient: of the loss of the value, and of that of the value within
            ``old_value`` plus or minus ``clip_value``, the larger one counts.
        loss_type: ``"smooth_l1"``, half the square of an error of at most 1 and linear beyond;
            ``"l2"``, half the square; ``"l1"``, the error itself.

    Returns:
        Not negative.

    Raises:
        ValueError: ``clip_value`` is given without ``old_value``.

    See Also:
        Schulman et al., 2017, arXiv:1707.06347, equation 9; Engstrom et al., 2020,
        arXiv:2005.12729, section 3, for the clip.

    Example:
        >>> value, old = torch.tensor([0.5]), torch.tensor([0.0])
        >>> value_loss(value, torch.tensor([1.0]), old, clip_value=0.2)  # (1 - 0.2)^2 / 2
        tensor([0.3200])
    """
    kinds = {"smooth_l1": nn.functional.smooth_l1_loss, "l1": nn.functional.l1_loss}

    def error(of: Tensor) -> Tensor:
        if loss_type == "l2":
            return nn.functional.mse_loss(of, target, reduction="none") / 2
        return kinds[loss_type](of, target, reduction="none")

    if clip_value is None:
        return error(value)
    if old_value is None:
        raise ValueError("value_loss: clip_value needs old_value, around which it clips.")
    clipped = old_value + (value - old_value).clamp(-clip_value, clip_value)
    return torch.maximum(error(value), error(clipped))

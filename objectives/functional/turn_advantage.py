"""Credit per turn: a rollout with a reward after each of its turns, trained turn by turn.

Shape legend: B rollouts, N packed tokens of all of them.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .advantages import STD_OFFSET
from .groups import group_index, group_mean, group_std, is_uniform
from .sequences import sequence_index


def turn_index(mask: Bool[Tensor, " N"], lengths: Int[Tensor, " B"]) -> Int[Tensor, " N"]:
    """Number the turns of packed rollouts, over the whole batch.

    A turn begins where the mask becomes True, and lasts until the next one begins: what a tool
    or a user answers belongs to the turn that asked. What comes before a rollout's first turn
    counts as that turn.

    Args:
        mask: True on the sampled tokens, ``[N]``.
        lengths: ``[B]``.

    Returns:
        int64 ``[N]``, rising, below N. A rollout without sampled tokens is one turn.
    """
    sequence = sequence_index(lengths, mask.shape[0])
    first = torch.ones_like(mask)
    first[1:] = sequence[1:] != sequence[:-1]
    before = torch.zeros_like(mask)
    before[1:] = mask[:-1]
    begins = mask & (first | ~before)
    number = begins.to(torch.int64).cumsum(0)
    # The number that the rollout had reached before it began, so that turns count within it.
    at_start = (number - begins.to(torch.int64)).masked_fill(~first, 0)
    base = torch.zeros_like(lengths).index_add(0, sequence, at_start)[sequence]
    starts = first | (begins & (number - base > 1))
    return starts.to(torch.int64).cumsum(0) - 1


def turn_advantage(
    reward: Float[Tensor, " N"],
    mask: Bool[Tensor, " N"],
    lengths: Int[Tensor, " B"],
    group: Int[Tensor, " B"],
    valid: Bool[Tensor, " B"] | None = None,
) -> Float[Tensor, " N"]:
    """GRPO with process supervision: the sum of the normalised rewards of this turn and later ones.

    A turn's reward is the sum over its tokens. The rewards of all turns of all rollouts of a
    group are normalised together, ``(r - mean) / (std + 1e-4)``, and summed from the turn to the
    end of its rollout.

    Args:
        reward: dense, one per token (0 where nothing was given), ``[N]``.
        mask: True on the sampled tokens, ``[N]``.
        lengths: tokens of each rollout, ``[B]``.
        group: any integer id, equal within a group, ``[B]``.
        valid: False for a rollout without a reward, ``[B]``.

    Returns:
        ``[N]``, equal within a turn; 0 in rollouts that are not valid.

    See Also:
        Shao et al., 2024, arXiv:2402.03300, section 4.1.3.
    """
    sequence = sequence_index(lengths, reward.shape[0])
    turn = turn_index(mask, lengths)
    finite = torch.ones_like(lengths, dtype=torch.bool) if valid is None else valid
    bad = torch.zeros_like(lengths).index_add(0, sequence, (~reward.isfinite()).long())
    finite = finite & (bad == 0)
    # One slot per turn; there are at most N of them, the rest stay empty.
    total = torch.zeros_like(reward).index_add(0, turn, reward)
    rollout_of = torch.zeros_like(turn).scatter(0, turn, sequence)
    taken = torch.zeros_like(mask).scatter(0, turn, torch.ones_like(mask))
    counts = taken & finite[rollout_of]
    index = group_index(group[rollout_of])
    mean, std = group_mean(total, index, counts), group_std(total, index, counts)
    normal = ((total - mean) / (std + STD_OFFSET)).masked_fill(~counts, 0.0)
    normal = normal.masked_fill(is_uniform(total, index, counts), 0.0)
    # Sum from each turn to the end of its rollout: all that is to come, less what lies beyond.
    later = normal.flip(0).cumsum(0).flip(0)
    last = torch.zeros_like(lengths).scatter_reduce(0, sequence, turn, "amax")[sequence]
    beyond = later[last] - normal[last]
    return later[turn] - beyond

"""From rewards to advantages, of rollouts in groups and of turns."""

from typing import Final, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .aggregation import sequence_index

# Advantages of rollouts relative to the others of their group, without a critic.
#
# A group is the rollouts of one prompt draw, told apart by an id; its members may lie anywhere in
# the batch, and groups may differ in size. All shapes are static, so the functions compile into one
# graph. A rollout that could not be scored (``valid`` False, or a reward that is NaN or infinite)
# is left out of all statistics and gets 0.
#
# Shape legend: B rollouts, R reward functions.

Scale = Literal["group", "batch", "none"]
SCALES: Final[tuple[Scale, ...]] = ("group", "batch", "none")
STD_OFFSET: Final = 1e-4
"""Added to a standard deviation before dividing by it."""


def scorable(
    reward: Float[Tensor, "*shape"], valid: Bool[Tensor, "*shape"] | None
) -> Bool[Tensor, "*shape"]:
    """True where a reward is finite and marked valid."""
    finite = reward.isfinite()
    return finite if valid is None else finite & valid


def batch_std(values: Float[Tensor, " B"], valid: Bool[Tensor, " B"]) -> Float[Tensor, ""]:
    """Bessel-corrected standard deviation over the valid rollouts; 0 for fewer than two."""
    one_group = torch.zeros_like(valid, dtype=torch.int64)
    each = group_std(values, one_group, valid)
    # All are equal; one 0 more, so that there is something when there are no rollouts.
    return torch.nn.functional.pad(each, (0, 1)).amax()  # mutate: equivalent number (all are 0)


def group_advantage(
    reward: Float[Tensor, " B"],
    group: Int[Tensor, " B"],
    valid: Bool[Tensor, " B"] | None = None,
    *,
    scale: Scale | str = "group",
) -> Float[Tensor, " B"]:
    """GRPO: ``(R - mean of the group) / (std + 1e-4)``.

    Args:
        reward: one per rollout, ``[B]``.
        group: any integer id, equal within a group, ``[B]``.
        valid: False where there is no reward, ``[B]``.
        scale: which (Bessel-corrected) standard deviation divides: ``"group"``; ``"batch"``, that
            of all valid rewards; ``"none"`` (Dr. GRPO).

    Returns:
        ``[B]``. Exactly 0 for a group of one, and for one whose rewards are all equal.

    Raises:
        ValueError: the scale is unknown.

    See Also:
        Shao et al., 2024, arXiv:2402.03300, section 4.1.2; Liu et al., 2025 (Dr. GRPO),
        arXiv:2503.20783.
    """
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {SCALES}, got {scale!r}.")
    valid = scorable(reward, valid)
    index = group_index(group)
    centred = (reward - group_mean(reward, index, valid)).masked_fill(~valid, 0.0)
    centred = centred.masked_fill(is_uniform(reward, index, valid), 0.0)
    if scale == "none":
        return centred
    if scale == "batch":
        return centred / (batch_std(reward, valid) + STD_OFFSET)
    return centred / (group_std(reward, index, valid) + STD_OFFSET)


def rloo_advantage(
    reward: Float[Tensor, " B"], group: Int[Tensor, " B"], valid: Bool[Tensor, " B"] | None = None
) -> Float[Tensor, " B"]:
    """RLOO: the reward less the mean of the **other** rollouts of the group.

    Args:
        reward: one per rollout, ``[B]``.
        group: any integer id, equal within a group, ``[B]``.
        valid: False where there is no reward, ``[B]``.

    Returns:
        ``[B]``; 0 for a rollout without others.

    See Also:
        Ahmadian et al., 2024, arXiv:2402.14740, section 3.2.
    """
    valid = scorable(reward, valid)
    index = group_index(group)
    centred = (reward - group_mean(reward, index, valid)).masked_fill(~valid, 0.0)
    centred = centred.masked_fill(is_uniform(reward, index, valid), 0.0)
    count = group_count(index, valid, dtype=reward.dtype)
    return centred * count / (count - 1).clamp(min=1)


def maxrl_advantage(
    reward: Float[Tensor, " B"], group: Int[Tensor, " B"], valid: Bool[Tensor, " B"] | None = None
) -> Float[Tensor, " B"]:
    """MaxRL: ``(R - mean of the group) / mean of the group``.

    With rewards of 0 and 1 the expectation of its gradient is that of the log of the success
    rate, to the order of the group's size: a rare success weighs as much as its rarity.

    Args:
        reward: one per rollout, ``[B]``; not negative (then a mean says nothing).
        group: any integer id, equal within a group, ``[B]``.
        valid: False where there is no reward, ``[B]``.

    Returns:
        ``[B]``; 0 in a group whose mean is not positive.

    See Also:
        Tajwar et al., 2026, arXiv:2602.02710, algorithm 1.
    """
    valid = scorable(reward, valid)
    index = group_index(group)
    mean = group_mean(reward, index, valid)
    undefined = ~valid | ~(mean > 0) | is_uniform(reward, index, valid)
    return ((reward - mean) / mean).masked_fill(undefined, 0.0)


def relative_length(num_tokens: Int[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Each rollout's length as a share of the longest one's of its group.

    Args:
        num_tokens: sampled tokens of each rollout, ``[B]``.
        group: any integer id, equal within a group, ``[B]``.

    Returns:
        float32 ``[B]`` in [0, 1]; 0 in a group without sampled tokens.
    """
    index = group_index(group)
    longest = torch.zeros_like(num_tokens).scatter_reduce(0, index, num_tokens, "amax")[index]
    return num_tokens.float() / longest.clamp(min=1)


def gdpo_advantage(
    rewards: Float[Tensor, "B R"],
    group: Int[Tensor, " B"],
    weights: Float[Tensor, " R"],
    valid: Bool[Tensor, "B R"] | None = None,
) -> Float[Tensor, " B"]:
    """GDPO: normalise each reward in its group, weight, sum, normalise over the batch.

    So a reward of small spread is not drowned by one of large spread.

    Args:
        rewards: ``[B, R]``; NaN where a function does not apply.
        group: any integer id, equal within a group, ``[B]``.
        weights: of each reward function, ``[R]``.
        valid: False where there is no reward, ``[B, R]``.

    Returns:
        ``[B]``; 0 for a rollout to which no reward applies.

    See Also:
        Liu et al., 2026, arXiv:2601.05242.
    """
    valid = scorable(rewards, valid)
    columns = zip(rewards.unbind(1), valid.unbind(1), strict=True)
    each = [group_advantage(column, group, ok) for column, ok in columns]
    total = (torch.stack(each, dim=1) * weights).sum(1)
    # The mean over the batch is 0, as that of every reward in every group is.
    return total / (batch_std(total, valid.any(1)) + STD_OFFSET)


def pass_at_k_advantage(
    success: Bool[Tensor, " B"],
    group: Int[Tensor, " B"],
    valid: Bool[Tensor, " B"] | None = None,
    *,
    k: int,
) -> Float[Tensor, " B"]:
    """Advantage of a rollout when a group of k is rewarded if any of its members succeeds.

    The expectation over all subsets of k of the group's n rollouts, in closed form: with
    ``R = 1 - C(n_neg, k) / C(n, k)`` and ``s = sqrt(R (1 - R))``, a success gets ``(1 - R) / s``
    and a failure ``(1 - R - C(n_neg - 1, k - 1) / C(n - 1, k - 1)) / s``.

    Args:
        success: ``[B]``.
        group: any integer id, equal within a group, ``[B]``.
        valid: False where there is no verdict, ``[B]``.
        k: size of the subsets.

    Returns:
        float32 ``[B]``; 0 where every subset, or none, succeeds, and in groups of fewer than k.

    Raises:
        ValueError: k is below 1.

    See Also:
        Chen et al., 2025, arXiv:2508.10751, eq. 14 and 15.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}.")
    valid = torch.ones_like(success) if valid is None else valid
    index = group_index(group)
    count = group_count(index, valid, dtype=torch.float64)
    failures = group_count(index, valid & ~success, dtype=torch.float64)
    all_fail = _choose_ratio(failures, count, k)
    spread = (all_fail * (1 - all_fail)).sqrt()
    fail_with_this = _choose_ratio(failures - 1, count - 1, k - 1)
    numerator = torch.where(success, all_fail, all_fail - fail_with_this)
    undefined = ~valid | (spread == 0) | (count < k)
    return (numerator / spread).masked_fill(undefined, 0.0).float()


def _choose_ratio(
    chosen: Float[Tensor, " B"], total: Float[Tensor, " B"], k: int
) -> Float[Tensor, " B"]:
    """``C(chosen, k) / C(total, k)``: 0 for ``chosen`` below k, undefined for such a ``total``."""
    ratio = torch.ones_like(chosen)
    for i in range(k):
        ratio = ratio * (chosen - i) / (total - i)
    return ratio


# Statistics of groups, each given back to every member -------------------------------------------


def group_index(group: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Number the groups from 0, in the order of their ids."""
    ordered, order = group.sort(stable=True)
    starts = torch.zeros_like(ordered)
    starts[1:] = (ordered[1:] != ordered[:-1]).to(ordered.dtype)
    return torch.zeros_like(starts).scatter(0, order, starts.cumsum(0)).to(torch.int64)


def group_sum(
    values: Float[Tensor, " B"], index: Int[Tensor, " B"], valid: Bool[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Sum over the valid members of the group, given to each member."""
    values = values.masked_fill(~valid, 0.0)
    return torch.zeros_like(values).index_add(0, index, values)[index]


def group_count(
    index: Int[Tensor, " B"], valid: Bool[Tensor, " B"], *, dtype: torch.dtype = torch.float32
) -> Float[Tensor, " B"]:
    """Number of valid members of the group, given to each member."""
    return group_sum(valid.to(dtype), index, valid)


def group_mean(
    values: Float[Tensor, " B"], index: Int[Tensor, " B"], valid: Bool[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Mean over the valid members of the group, given to each member; 0 when there are none."""
    count = group_count(index, valid, dtype=values.dtype)
    return group_sum(values, index, valid) / count.clamp(min=1)


def group_std(
    values: Float[Tensor, " B"], index: Int[Tensor, " B"], valid: Bool[Tensor, " B"]
) -> Float[Tensor, " B"]:
    """Bessel-corrected standard deviation of the group, given to each member."""
    deviation = values - group_mean(values, index, valid)
    count = group_count(index, valid, dtype=values.dtype)
    return (group_sum(deviation.square(), index, valid) / (count - 1).clamp(min=1)).sqrt()


def is_uniform(
    values: Float[Tensor, " B"], index: Int[Tensor, " B"], valid: Bool[Tensor, " B"]
) -> Bool[Tensor, " B"]:
    """Return whether all valid members of the group have the same value, exactly."""
    # A mean of equal floats need not be equal to them, so the deviation cannot tell.
    infinite = torch.full_like(values, torch.inf)
    low = values.masked_fill(~valid, torch.inf)
    high = values.masked_fill(~valid, -torch.inf)
    low = infinite.scatter_reduce(0, index, low, "amin")[index]
    high = (-infinite).scatter_reduce(0, index, high, "amax")[index]
    return low >= high


# Credit per turn: a rollout with a reward after each of its turns, trained turn by turn.
#
# Shape legend: B rollouts, N packed tokens of all of them.


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

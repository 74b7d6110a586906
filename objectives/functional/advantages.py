"""Advantages of rollouts relative to the others of their group, without a critic.

See :mod:`~objectives.functional.groups` for groups, and for rollouts that could not be scored.

Shape legend: B rollouts, R reward functions.
"""

from typing import Final, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .groups import group_count, group_index, group_mean, group_std, is_uniform, scorable

Scale = Literal["group", "batch", "none"]
SCALES: Final[tuple[Scale, ...]] = ("group", "batch", "none")
STD_OFFSET: Final = 1e-4
"""Added to a standard deviation before dividing by it."""


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

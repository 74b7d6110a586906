"""Statistics of groups, each given back to every member of its group.

A group is the rollouts of one prompt draw, told apart by an id; its members may lie anywhere in
the batch, and groups may differ in size. All shapes are static, so the functions compile into one
graph. A rollout that could not be scored (``valid`` False, or a reward that is NaN or infinite)
is left out of all statistics and gets 0.

Shape legend: B rollouts.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def scorable(
    reward: Float[Tensor, "*shape"], valid: Bool[Tensor, "*shape"] | None
) -> Bool[Tensor, "*shape"]:
    """True where a reward is finite and marked valid."""
    finite = reward.isfinite()
    return finite if valid is None else finite & valid


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

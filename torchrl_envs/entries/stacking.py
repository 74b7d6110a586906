"""Rows of different lengths stacked into one batch: nested, or padded on the left.

Shape legend: B rows, T_i tokens of a row, T tokens of the longest.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from tensordict import TensorDictBase
from torch import Tensor


def as_nested_tensor(list_of_tensordicts: Sequence[TensorDictBase]) -> TensorDictBase:
    """Stack rows; each entry becomes a jagged nested tensor ``[B, T_i]``.

    Args:
        list_of_tensordicts: B rows with the same entries, each ``[T_i, ...]``.

    Raises:
        ValueError: there are no rows.
    """
    nest = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    return _stacked(list_of_tensordicts, lambda *values: nest(list(values)), dim=0)


def as_padded_tensor(
    list_of_tensordicts: Sequence[TensorDictBase], dim: int = 0, stack_dim: int = 0
) -> TensorDictBase:
    """Stack rows; each entry is padded on the left with zeros, ``[B, T, ...]``.

    A zero may be a real token too: stack a mask with the tokens.

    Args:
        list_of_tensordicts: B rows with the same entries.
        dim: the dimension of an entry that differs.
        stack_dim: the dimension that is new.

    Raises:
        ValueError: there are no rows, or a dimension is negative.
    """
    if dim < 0 or stack_dim < 0:
        raise ValueError(
            f"as_padded_tensor: dimensions count from the front, got {dim} and {stack_dim}."
        )

    def pad(*values: Tensor) -> Tensor:
        length = max(value.shape[dim] for value in values)
        out = []
        for value in values:
            gap = list(value.shape)
            gap[dim] = length - gap[dim]
            out.append(torch.cat([value.new_zeros(gap), value], dim))
        return torch.stack(out, stack_dim)

    return _stacked(list_of_tensordicts, pad, dim=stack_dim)


def _stacked(
    rows: Sequence[TensorDictBase], stack: Callable[..., Tensor], *, dim: int
) -> TensorDictBase:
    if not rows:
        raise ValueError("There are no rows to stack.")
    size = list(rows[0].shape)
    size.insert(dim, len(rows))
    stacked = rows[0].apply(stack, *rows[1:], batch_size=size)
    assert stacked is not None
    return stacked

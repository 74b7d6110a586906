"""Groups of ragged rows in a TensorDict: a stack of one TensorDict per row, never padded.

Shape legend: B rows, T tokens of a row.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
)


def value_stack(values: Sequence[Any]) -> Any:
    """One leaf of a TensorDict that holds a Python value per element."""
    stack: Any = NonTensorStack
    return stack(*[NonTensorData(value) for value in values])


def ragged_entries(columns: Mapping[str, Sequence[Any]]) -> LazyStackedTensorDict:
    """A stack of one TensorDict per row."""
    # columns: by name, the values of the B rows: tensors [T_i] or leaves of TensorDict.
    counts = {len(values) for values in columns.values()}
    if len(counts) != 1 or not counts.copy().pop():
        raise ValueError(
            f"A ragged group needs columns of one number of rows, got "
            f"{ {name: len(values) for name, values in columns.items()} }."
        )
    size = torch.Size([])
    rows = [
        TensorDict._new_unsafe(dict(zip(columns, values, strict=True)), batch_size=size)
        for values in zip(*columns.values(), strict=True)
    ]
    return LazyStackedTensorDict(*rows)

"""Python values in a TensorDict, one per row: strings, messages, data rows.

They travel as one opaque list for the whole batch, which costs the same whatever the batch.
"""

from collections.abc import Sequence
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDictBase


def write_row_values(batch: TensorDictBase, key: str, values: Sequence[Any]) -> None:
    """Set one Python value per row.

    Args:
        batch: of B rows.
        key: the entry.
        values: B values.

    Raises:
        ValueError: there are not as many values as rows.
    """
    if len(values) != batch.numel():
        raise ValueError(f"{key!r}: {len(values)} values for {batch.numel()} rows.")
    batch.set(key, NonTensorData(list(values), batch_size=batch.batch_size))


def read_row_values(batch: TensorDictBase, key: str, default: Any = None) -> list[Any]:
    """One Python value per row.

    Args:
        batch: of B rows.
        key: the entry.
        default: what each row gets when the entry is absent.

    Returns:
        A new list of B values. A single value (a string, or the messages of one chat) that was set
        for the whole batch is repeated.
    """
    size = batch.numel()
    entry = batch.get(key, None)
    if entry is None:
        return [default] * size
    if isinstance(entry, NonTensorStack):
        value = entry.tolist()
    else:
        value = entry.data if isinstance(entry, NonTensorData) else entry
    if isinstance(value, list | tuple) and len(value) == size and not _is_one_chat(key, value):
        return list(value)
    return [value] * size


def _is_one_chat(key: str, value: Sequence[Any]) -> bool:
    return key == "query" and all(isinstance(item, dict) for item in value)

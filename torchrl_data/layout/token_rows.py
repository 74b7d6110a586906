"""What the groups of token rows share: reading ragged rows, views of them, specs.

Shape legend: B rows, T tokens of a row (ragged), N tokens of all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack
from torch import Tensor

from torchrl_data.ragged.ragged import (
    entries_of,
    nested_view,
    packed_view,
    padded_view,
    ragged_entries,
    rows_of,
)

_RAGGED: Final = NonTensorData(False)


def indexed_by_name(cls: Any) -> Any:
    """Decorate a TensorClass so that ``group["full"]`` is the attribute, as in a TensorDict."""
    indexed = cls.__getitem__

    def __getitem__(self: Any, item: Any) -> Any:
        if isinstance(item, str):
            if item not in self.keys():
                raise KeyError(f"{cls.__name__} has no {item!r}; it has {sorted(self.keys())}.")
            return getattr(self, item)
        return indexed(self, item)

    cls.__getitem__ = __getitem__
    return cls


def read_token_rows(group: Any, name: str, read: Callable[[Any, str], Any]) -> Any:
    """An attribute of a group: ragged ones as lists of rows, others as they are stored."""
    entries = group._tensordict
    if not isinstance(entries, LazyStackedTensorDict):
        return read(group, name)
    if name == "padded":
        return is_padded(group)
    return _nested_rows(entries, name)


def _nested_rows(entries: Any, name: str) -> Any:
    """The rows of a ragged entry as nested lists of the batch's shape, or ``None``."""
    if not isinstance(entries, LazyStackedTensorDict):
        return entries.get(name, None)
    rows = [_nested_rows(part, name) for part in entries.unbind(0)]
    return None if any(row is None for row in rows) else rows


class TokenRows:
    """Views that every group of token rows has."""

    _tensordict: Any
    _from_tensordict: Any

    def _get_tuple(self, key: Any, default: Any, **kwargs: Any) -> Any:
        # What TensorDict calls for a nested key: ragged rows are a list, as for the attribute.
        entries = self._tensordict
        if len(key) == 1 and not kwargs and isinstance(entries, LazyStackedTensorDict):
            rows = _nested_rows(entries, key[0])
            if rows is not None:
                return rows
        return entries._get_tuple(key, default, **kwargs)

    @classmethod
    def from_rows(cls, **columns: Sequence[Tensor]) -> Self:
        """A ragged group.

        Args:
            **columns: for each entry, one tensor ``[T_i]`` a row.

        Raises:
            ValueError: there are no rows, or the entries differ in their number.
        """
        count = len(next(iter(columns.values()), ()))
        return cls._from_tensordict(ragged_entries({**columns, "padded": [_RAGGED] * count}), {})

    def rows(self, name: str) -> list[Tensor]:
        """The rows of an entry, B tensors ``[T_i]``."""
        return rows_of(self, name)

    def packed(self, name: str) -> tuple[Tensor, Tensor]:
        """The rows one after the other ``[N]`` and their lengths, int64 ``[B]``."""
        return packed_view(self, name)

    def nested(self, name: str) -> Tensor:
        """The rows as a jagged nested tensor ``[B, T_i]``."""
        return nested_view(self, name)

    def dense(self, name: str, *, value: float = 0, side: str = "right") -> Tensor:
        """The rows padded with ``value`` on a side, ``[B, T]``."""
        return padded_view(self, name, value=value, side=side)


def is_padded(group: Any) -> bool:
    """Whether a group of token rows says that it is padded."""
    leaf = entries_of(group).get("padded", None)
    if leaf is None:
        return False
    data = leaf.tolist() if isinstance(leaf, NonTensorStack) else leaf.data
    return any(data) if isinstance(data, list) else bool(data)


def token_spec(cls: type, shape: Sequence[int], keys: Sequence[str]) -> Any:
    """A spec of a group of token rows."""
    from torchrl.data import Composite, NonTensor, Unbounded

    size = torch.Size(shape)
    leaves: dict[str, Any] = {key: Unbounded(shape=torch.Size((*size, -1))) for key in keys}
    leaves["padded"] = NonTensor(shape=size, example_data=False)
    return Composite(leaves, shape=size[:-1], data_cls=cls, step_mdp_static=True)

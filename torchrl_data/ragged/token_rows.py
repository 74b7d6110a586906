"""Groups of token rows: reading ragged rows, views of them, specs.

Shape legend: B rows, T tokens of a row (ragged), N tokens of all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    is_non_tensor,
)
from torch import Tensor

from torchrl_data.tensorclass import documented

from .packed import cumulative_lengths, first_entries, pad, read_rows, unpack

_RAGGED: Final = NonTensorData(False)


def token_rows(cls: Any) -> Any:
    """Decorate a group of token rows: ``group["full"]`` is the attribute, as in a TensorDict."""
    indexed = cls.__getitem__

    def __getitem__(self: Any, item: Any) -> Any:
        if isinstance(item, str):
            if item not in self.keys():
                raise KeyError(f"{cls.__name__} has no {item!r}; it has {sorted(self.keys())}.")
            return getattr(self, item)
        return indexed(self, item)

    cls.__getitem__ = __getitem__
    return documented(cls)


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

    def _read_attribute(self, name: str, read: Callable[[Any, str], Any]) -> Any:
        """Ragged entries as lists of rows, others as they are stored."""
        entries = self._tensordict
        if not isinstance(entries, LazyStackedTensorDict):
            return read(self, name)
        if name == "padded":
            return is_padded(self)
        names = {*type(self).__annotations__, *entries.keys()}
        if name not in names:
            raise AttributeError(
                f"{type(self).__name__} has no {name!r}; it has {sorted(names - {'padded'})}."
            )
        return _nested_rows(entries, name)

    def _get_tuple(self, key: Any, default: Any, **kwargs: Any) -> Any:
        # What TensorDict calls for a nested key: ragged rows are a list, as for the attribute.
        entries = self._tensordict
        is_ragged = len(key) == 1 and not kwargs and isinstance(entries, LazyStackedTensorDict)
        rows = _nested_rows(entries, key[0]) if is_ragged else None
        return entries._get_tuple(key, default, **kwargs) if rows is None else rows

    @classmethod
    def from_rows(cls, **columns: Sequence[Tensor]) -> Self:
        """A ragged group.

        Args:
            **columns: for each entry, one tensor ``[T_i]`` a row.

        Raises:
            ValueError: there are no rows, one is no tensor, or the entries differ in their number.
        """
        counts = {name: sum(isinstance(v, Tensor) for v in rows) for name, rows in columns.items()}
        if len(set(counts.values())) != 1 or not all(counts.values()):
            raise ValueError(f"A ragged group needs a tensor a row in each column, got {counts}.")
        size = torch.Size([])
        rows = [
            {**dict(zip(columns, values, strict=True)), "padded": _RAGGED}
            for values in zip(*columns.values(), strict=True)
        ]
        stack = [TensorDict._new_unsafe(row, batch_size=size) for row in rows]
        return cls._from_tensordict(LazyStackedTensorDict(*stack), {})

    def rows(self, name: str) -> list[Tensor]:
        """The rows of an entry, B tensors ``[T_i]``."""
        return list(unpack(*self.packed(name)))

    def packed(self, name: str) -> tuple[Tensor, Tensor]:
        """The rows one after the other ``[N]`` and their lengths, int64 ``[B]``."""
        rows = read_rows(self, name)
        if rows is None:
            raise KeyError(f"{type(self).__name__} has no {name!r} in every row.")
        return rows

    def nested(self, name: str) -> Tensor:
        """The rows as a jagged nested tensor ``[B, T_i]``."""
        values, lengths = self.packed(name)
        offsets = cumulative_lengths(lengths).to(values.device)
        return torch.nested.nested_tensor_from_jagged(values, offsets)

    def dense(self, name: str, *, value: float = 0, side: str = "right") -> Tensor:
        """The rows padded with ``value`` on a side, ``[B, T]``."""
        return pad(self.rows(name), value=value, side=side)

    @classmethod
    def default_spec(cls, shape: Sequence[int] = (-1,), keys: Sequence[str] | None = None) -> Any:
        """A spec of such a group; ``shape`` is that of the batch, ``keys`` the entries."""
        from torchrl.data import Composite, NonTensor, Unbounded

        size = torch.Size(shape)
        names = keys or [name for name in cls.__annotations__ if name != "padded"]
        leaves: dict[str, Any] = {name: Unbounded(shape=torch.Size((*size, -1))) for name in names}
        leaves["padded"] = NonTensor(shape=size, example_data=False)
        return Composite(leaves, shape=size[:-1], data_cls=cls, step_mdp_static=True)


def is_padded(group: Any) -> bool:
    """Whether a group of token rows says that it is padded."""
    leaf = first_entries(group).get("padded", None)
    value = leaf.data if is_non_tensor(leaf) else leaf
    return bool(value.any()) if isinstance(value, Tensor) else bool(value)

"""What the groups of token rows share: reading ragged rows, views of them, specs.

Shape legend: B rows, T tokens of a row (ragged), N tokens of all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, is_non_tensor
from torch import Tensor

from torchrl_data.ragged.groups import ragged_entries
from torchrl_data.ragged.packed import Rows, cumulative_lengths, first_entries, pad, read_rows

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
    names = {*type(group).__annotations__, *entries.keys()}
    if name not in names:
        raise AttributeError(
            f"{type(group).__name__} has no {name!r}; it has {sorted(names - {'padded'})}."
        )
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
        return self._read(name).split()

    def _read(self, name: str) -> Rows:
        rows = read_rows(self, name)
        if rows is None:
            raise KeyError(f"{type(self).__name__} has no {name!r} in every row.")
        return rows

    def packed(self, name: str) -> tuple[Tensor, Tensor]:
        """The rows one after the other ``[N]`` and their lengths, int64 ``[B]``."""
        return self._read(name)

    def nested(self, name: str) -> Tensor:
        """The rows as a jagged nested tensor ``[B, T_i]``."""
        values, lengths = self._read(name)
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

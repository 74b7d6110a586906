"""Python objects in a TensorDict: strings, messages, conversations; one snapshot for a whole batch.

A leaf beside the tensors carries the snapshot and which of its rows it stands for, so that
indexing, splitting, stacking and partial resets keep the rows right, at the cost of one small
tensor, the same whatever the batch.
"""

import reprlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
)
from torch import Tensor

from .keys import QUERY
from .tensorclass import documented

_T = TypeVar("_T")


class RowObjects(list[Any]):
    """A Python value per row."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, Tensor):
            return RowObjects(map(super().__getitem__, index.reshape(-1).tolist()))
        return super().__getitem__(index)

    @staticmethod
    def cat(parts: "Sequence[RowObjects]") -> "RowObjects":
        """The values of several, one after the other."""
        return RowObjects(value for part in parts for value in part)


@documented
class BatchedObject(NonTensorData):
    """A snapshot of a batch as a leaf of a TensorDict, one row per batch element."""

    # The snapshot is one Python object: `RowObjects`, or anything else that has a length, is
    # indexed by a tensor of rows, and has a static method `cat`. `data` is always that of the
    # leaf's own rows. With `shown_as` it is what that view shows: `td["history", "prompt"]` is a
    # `History`, `td["text", "prompt"]` a list of strings, `td["tokens", "prompt"]` a list of int64
    # [T]. Row values are shown as lists of the batch's shape.

    _documentation = __doc__

    data: Any
    rows: Tensor | None = None
    """Which row of the snapshot each batch element is; int64, shaped like the batch."""
    all_rows: Tensor | None = None
    """The ``rows`` of a leaf that was never indexed: the same tensor, so the check is ``is``."""
    shown_as: Any = None
    """How the snapshot is shown to whoever reads the leaf: an object with ``rows(snapshot)``, one
    value per row, and ``show(snapshot, shape)``, those of a batch of a shape; ``None`` shows the
    snapshot itself."""
    _metadata: dict | None = None
    _is_non_tensor: bool = True

    @classmethod
    def of(
        cls,
        snapshot: Any,
        batch_size: torch.Size,
        rows: Tensor | None = None,
        all_rows: Tensor | None = None,
        view: Any = None,
    ) -> "BatchedObject":
        """A leaf of a batch size; without ``rows``, one that stands for all of them in order."""
        if rows is None:
            rows = all_rows = torch.arange(len(snapshot)).view(batch_size)
        # As an entry of the inner TensorDict, the rows follow every operation on the batch.
        entries = TensorDict._new_unsafe({"rows": rows}, batch_size=batch_size)
        rest = {"data": snapshot, "all_rows": all_rows, "shown_as": view, "_is_non_tensor": True}
        return cls._from_tensordict(entries, rest, safe=False)

    def _read_attribute(self, name: str, read: Callable[[Any, str], Any]) -> Any:
        return self.shown() if name == "data" else read(self, name)

    @property
    def dtype(self) -> None:  # type: ignore[override]
        """None, as for all leaves that are not tensors (specs compare it)."""
        return None

    def _shown(self) -> str:
        snapshot = self.snapshot()
        return reprlib.repr([*snapshot]) if type(snapshot) is RowObjects else repr(snapshot)

    def snapshot(self) -> Any:
        """The snapshot of this leaf's rows."""
        state = self.__dict__
        everything = state["_non_tensordict"]["data"]
        rows = state["_tensordict"]._get_str("rows", None)
        if rows is None or rows is state["_non_tensordict"].get("all_rows"):
            return everything
        return everything[rows]

    def shown(self) -> Any:
        """Return what the view shows of this leaf's rows, or the snapshot if there is none."""
        view = self.__dict__["_non_tensordict"].get("shown_as")
        snapshot = self.snapshot()
        if view is not None:
            return view.show(snapshot, self.batch_size)
        return (
            nested_in_shape(snapshot, self.batch_size) if type(snapshot) is RowObjects else snapshot
        )

    def clone(self, recurse: bool = True, **kwargs: Any) -> "BatchedObject":  # noqa: ARG002
        """The same leaf: nothing changes a snapshot."""
        state = self.__dict__
        inner = state["_tensordict"]
        rows = {key: inner._get_str(key, None) for key in inner.keys()}  # noqa: SIM118 (no dict)
        # What tensordict does too, without checking the fields of the leaf again.
        copy = object.__new__(type(self))
        copy.__dict__["_tensordict"] = TensorDict._new_unsafe(rows, batch_size=inner.batch_size)
        copy.__dict__["_non_tensordict"] = dict(state["_non_tensordict"])
        return copy

    _clone = clone

    def empty(
        self,
        recurse: bool = False,  # noqa: ARG002
        *,
        device: Any = None,  # noqa: ARG002
        batch_size: torch.Size | None = None,
        names: Any = None,  # noqa: ARG002
    ) -> "BatchedObject":
        """The same leaf, perhaps of another shape."""
        state = self.__dict__
        size = self.batch_size if batch_size is None else torch.Size(batch_size)
        rows = state["_tensordict"]._get_str("rows", None)
        all_rows = state["_non_tensordict"].get("all_rows")
        if rows is not None and rows.shape != size:
            rows = rows.view(size)
        return type(self).of(state["_non_tensordict"]["data"], size, rows, all_rows, view_of(self))

    def where(  # type: ignore[override]
        self,
        condition: Tensor,
        other: Any,
        *,
        out: Any = None,  # noqa: ARG002
        pad: Any = None,  # noqa: ARG002
    ) -> "BatchedObject":
        """This leaf's rows where a condition holds, another leaf's elsewhere."""
        if not isinstance(other, BatchedObject):
            raise TypeError(f"BatchedObject.where takes another one, got {type(other).__name__}.")
        snapshot = self.snapshot()
        both = snapshot.cat([snapshot, other.snapshot()])
        own = torch.arange(self.numel())
        rows = torch.where(condition.reshape(-1), own, own + self.numel())
        return type(self).of(both[rows], self.batch_size, view=view_of(self))

    def expand(self, *shape: Any) -> "BatchedObject":  # type: ignore[override]
        """The same rows, each as often as a shape has it."""
        state = self.__dict__
        rows = state["_tensordict"]._get_str("rows", None).expand(*shape)
        return type(self).of(state["_non_tensordict"]["data"], rows.shape, rows, view=view_of(self))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The rows of several, one after the other, for ``torch.cat``."""
        leaves = args[0] if func is torch.cat and args else [None]
        if not all(isinstance(leaf, cls) for leaf in leaves):
            return super().__torch_function__(func, types, args, kwargs)
        return cls._cat(*args, **(kwargs or {}))

    @classmethod
    def _cat(cls, leaves: Sequence["BatchedObject"], dim: int = 0) -> "BatchedObject":
        snapshots = [leaf.snapshot() for leaf in leaves]
        first = accumulate((leaf.numel() for leaf in leaves), initial=0)
        places = [
            torch.arange(leaf.numel()).view(leaf.batch_size) + start
            for leaf, start in zip(leaves, first, strict=False)
        ]
        rows = torch.cat(places, dim)
        return cls.of(snapshots[0].cat(snapshots), rows.shape, rows, view=view_of(leaves[0]))

    @classmethod
    def _stack_non_tensor(
        cls, leaves: Sequence[Any], dim: int = 0, raise_if_non_unique: bool = False
    ) -> Any:
        """A leaf of the rows of several, where they are shown alike (TensorDict calls this)."""
        view = view_of(leaves[0])
        if view is None or not all(isinstance(x, cls) and view_of(x) == view for x in leaves):
            return NonTensorData._stack_non_tensor(leaves, dim, raise_if_non_unique)  # type: ignore[attr-defined]
        snapshots = [leaf.snapshot() for leaf in leaves]
        joined = snapshots[0].cat(snapshots)
        rows = torch.arange(len(joined)).view(len(leaves), *leaves[0].batch_size).movedim(0, dim)
        return cls.of(joined, rows.shape, rows, view=view)


def view_of(leaf: Any) -> Any:
    """The view of a leaf, of the first one in a stack of leaves."""
    while isinstance(leaf, NonTensorStack):
        leaf = leaf.unbind(0)[0]
    return leaf.__dict__["_non_tensordict"].get("shown_as")


def snapshot_of(leaf: Any, kind: type[_T]) -> _T | None:
    """The snapshot of a leaf, or of a stack of leaves, if it is of a class, and otherwise None."""
    if isinstance(leaf, BatchedObject):
        data = leaf.snapshot()
    elif isinstance(leaf, NonTensorStack):
        parts = [snapshot_of(part, kind) for part in leaf.unbind(0)]
        return None if any(part is None for part in parts) else kind.cat(parts)  # type: ignore[attr-defined]
    else:
        data = getattr(leaf, "data", None)
    return data if isinstance(data, kind) else None


def nested_in_shape(rows: Sequence[Any], shape: Sequence[int]) -> Any:
    """Rows as nested lists of a batch's shape; the row itself for a batch without dimensions."""
    if not len(shape):
        return rows[0]
    nested = list(rows)
    for size in reversed(shape[1:]):
        nested = [nested[i : i + size] for i in range(0, len(nested), size)]
    return nested


def write_objects(batch: TensorDictBase, key: str, values: Sequence[Any]) -> None:
    """Set one Python value per row."""
    if len(values) != batch.numel():
        raise ValueError(f"{key!r}: {len(values)} values for {batch.numel()} rows.")
    batch.set(key, BatchedObject.of(RowObjects(values), batch.batch_size))


def read_objects(batch: TensorDictBase, key: str, default: Any = None) -> list[Any]:
    """A Python value per row, in a new list; one that was set for the whole batch is repeated."""
    entry = batch.get(key, None)
    if entry is None:
        return [default] * batch.numel()
    return objects_of_leaf(entry, batch.batch_size, one_chat=key == QUERY)


def objects_of_leaf(entry: Any, shape: torch.Size, *, one_chat: bool = False) -> list[Any]:
    """A Python value per row of a leaf, in a new list; a single value is repeated."""
    if isinstance(entry, BatchedObject):
        view = view_of(entry)
        return list(entry.snapshot() if view is None else view.rows(entry.snapshot()))
    if isinstance(entry, NonTensorStack):
        return _flat(entry.tolist(), len(shape))
    value = entry.data if isinstance(entry, NonTensorData) else entry
    size = shape.numel()
    if isinstance(value, list | tuple) and not (
        one_chat and all(isinstance(item, dict) for item in value)
    ):
        if len(value) == size:
            return list(value)
        nested = _flat(value, len(shape))
        if len(nested) == size:
            return nested
    return [value] * size


def _flat(values: Any, dims: int) -> list[Any]:
    """The values of nested lists, ``dims`` deep."""
    if dims <= 1:
        return list(values) if dims == 1 and isinstance(values, list | tuple) else [values]
    if not isinstance(values, list | tuple):
        return [values]
    return [value for part in values for value in _flat(part, dims - 1)]


def value_stack(values: Sequence[Any]) -> Any:
    """A leaf of a TensorDict that holds a Python value per element."""
    stack: Any = NonTensorStack
    return stack(*[NonTensorData(value) for value in values])

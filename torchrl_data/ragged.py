"""What a row of a batch has for itself: tokens of unequal number, and Python objects.

Rows packed, padded, grouped, and as the token entries of a batch.
"""

import reprlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from textwrap import indent
from typing import Any, Final, NamedTuple, Self, TypeVar

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    unravel_key,
)
from torch import Tensor

from .checks import missing_entry
from .keys import ATTENTION_MASK, FULL, IMAGES, MASKS, PROMPT, QUERY, RESPONSE, TOKENS

# What TensorClass would overwrite: docstrings, and attributes computed when they are read.


_C = TypeVar("_C", bound=type)


def documented(cls: _C) -> _C:
    """Decorate a TensorClass so that it keeps its docstring and how its attributes are read."""
    # TensorClass replaces the docstring by the signature; the class keeps a copy: `_documentation =
    # __doc__`. It also writes its own `__getattr__` over that of the class body, and a class says
    # by `_read_attribute(self, name, generated)` what is read through it.
    # Its `__repr__` lists every field, the empty ones too: the class writes its own, or has none.
    made: Any = cls
    made.__doc__ = made._documentation
    made.__repr__ = getattr(made, "_shown", entries_shown)
    read, generated = getattr(cls, "_read_attribute", None), made.__getattr__
    if read is not None:
        made.__getattr__ = lambda self, name: read(self, name, generated)
        for name in made.__expected_keys__:  # tensordict 0.15: getters, found before `__getattr__`
            if any(name in vars(each) for each in made.__mro__):
                setattr(made, name, _Field(name, made.__getattr__))
    return cls


class _Field:
    """Reads an attribute of an instance as its ``__getattr__`` does."""

    def __init__(self, name: str, read: Callable[[Any, str], Any]) -> None:
        self._name, self._read = name, read

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else self._read(instance, self._name)


def entries_shown(group: Any) -> str:
    """A group as ``print`` shows it: its entries, without those that it has not."""
    lines = [f"{name}: {_entry_shown(group, name)},\n" for name in group._tensordict.keys()]  # noqa: SIM118
    inside = indent("".join(lines), "    ")
    return f"{type(group).__name__}(\n{inside}    batch_size={list(group.batch_size)})"


def _entry_shown(group: Any, name: str) -> str:
    stored = group._tensordict
    rows = [stored] if not isinstance(stored, LazyStackedTensorDict) else stored.unbind(0)
    values = [row.get(name, None) for row in rows]
    if not all(isinstance(value, Tensor) for value in values):
        return repr(stored.get(name))
    if len({value.shape for value in values}) == 1:
        first = values[0]
        shape = [*([len(values)] if stored is not rows[0] else []), *first.shape]
        return f"Tensor(shape={shape}, dtype={first.dtype})"
    lengths = [value.shape[-1] for value in values]
    told = f"{min(lengths)} to {max(lengths)} long, dtype={values[0].dtype}"
    return f"{len(values)} rows, {told}"


# Python objects in a TensorDict: strings, messages, conversations; one snapshot for a whole batch.
#
# A leaf beside the tensors carries the snapshot and which of its rows it stands for, so that
# indexing, splitting, stacking and partial resets keep the rows right, at the cost of one small
# tensor, the same whatever the batch.

_T = TypeVar("_T")


class RowObjects(list[Any]):
    """One Python value per row."""

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
        """What the view shows of this leaf's rows, or the snapshot if there is none."""
        view = self.__dict__["_non_tensordict"].get("shown_as")
        snapshot = self.snapshot()
        if view is not None:
            return view.show(snapshot, self.batch_size)
        return in_shape(snapshot, self.batch_size) if type(snapshot) is RowObjects else snapshot

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
        """One leaf of the rows of several, where they are shown alike (TensorDict calls this)."""
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


def in_shape(rows: Sequence[Any], shape: Sequence[int]) -> Any:
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
    """One Python value per row, in a new list; one that was set for the whole batch is repeated."""
    entry = batch.get(key, None)
    if entry is None:
        return [default] * batch.numel()
    return objects_of_leaf(entry, batch.batch_size, one_chat=key == QUERY)


def objects_of_leaf(entry: Any, shape: torch.Size, *, one_chat: bool = False) -> list[Any]:
    """One Python value per row of a leaf, in a new list; a single value is repeated."""
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
    """One leaf of a TensorDict that holds a Python value per element."""
    stack: Any = NonTensorStack
    return stack(*[NonTensorData(value) for value in values])


# Values of the host on a device, without waiting for what the device is doing.


def on_device(
    values: Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Bring values of the host to a device.

    Args:
        values: numbers, nested or not; or a tensor, which stays as it is where it is on the device.
        device: where to.
        dtype: of the result; that of the values when not given.

    Returns:
        A tensor of the shape of the values. On CUDA it is copied from pinned memory, behind what
        the device was told before: an ordinary copy would first wait for all of that.
    """
    if not isinstance(values, Tensor):
        values = torch.tensor(values, dtype=dtype)
    elif dtype is not None:
        values = values.to(dtype)
    if values.device.type == device.type or device.type == "cpu":
        return values.to(device)
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def on_host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Bring tensors to the host, with one look at a device for all of them.

    Args:
        *tensors: of one dimension; numbers that double precision holds, as token ids are.

    Returns:
        The same values, of the same types.
    """
    far = [one for one in tensors if one.device.type != "cpu"]
    if not far:
        return tensors
    values = torch.cat([one.double() for one in far]).cpu()
    found = iter(values.split([len(one) for one in far]))
    return tuple(x if x.device.type == "cpu" else next(found).to(x.dtype) for x in tensors)


# Packed sequences: rows one after the other, without padding, beside their lengths.
#
# Packed is the layout from buffer to loss; padded is a view for whoever asks for it. Whatever a
# batch holds ragged rows in, :func:`read_rows` gives them packed.
#
# Shape legend: B sequences, T tokens of the longest one, N tokens of all of them.


def pack(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Concatenate ragged rows.

    Args:
        rows: B tensors ``[T_i, ...]`` of one dtype; empty rows are allowed, no rows are not.

    Returns:
        The values ``[N, ...]`` and the lengths, int64 ``[B]``.

    Raises:
        ValueError: there are no rows.

    Example:
        >>> values, lengths = pack([torch.tensor([1, 2, 3]), torch.tensor([4])])
        >>> values
        tensor([1, 2, 3, 4])
        >>> lengths
        tensor([3, 1])
    """
    if not rows:
        raise ValueError("pack needs at least one row, got none.")
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return torch.cat(list(rows)), lengths


def unpack(values: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    """Split packed values into rows, the inverse of :func:`pack`.

    Args:
        values: ``[N, ...]``.
        lengths: int64 ``[B]``; must sum to N.

    Returns:
        B views ``[T_i, ...]`` of the values.

    Raises:
        ValueError: the lengths do not sum to N.

    Example:
        >>> unpack(torch.tensor([1, 2, 3, 4]), torch.tensor([3, 1]))
        (tensor([1, 2, 3]), tensor([4]))
    """
    if int(lengths.sum()) != len(values):
        raise ValueError(
            f"unpack: the lengths sum to {int(lengths.sum())}, but there are {len(values)} values."
        )
    return values.split(lengths.tolist())


def cumulative_lengths(lengths: Tensor) -> Tensor:
    """Offsets of packed sequences (``cu_seqlens``).

    Args:
        lengths: int64 ``[B]``.

    Returns:
        int64 ``[B + 1]``: 0, then the running sum; sequence i is ``values[out[i]:out[i + 1]]``.
    """
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def sequence_index(lengths: Tensor) -> Tensor:
    """Which sequence each packed token belongs to.

    Args:
        lengths: int64 ``[B]``.

    Returns:
        int64 ``[N]``.
    """
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def pad(rows: Sequence[Tensor], *, value: float | int | bool, side: str = "right") -> Tensor:
    """Padded view of ragged rows.

    Args:
        rows: B tensors ``[T_i]``.
        value: what fills the gaps.
        side: ``"right"`` or ``"left"``, where the padding goes.

    Returns:
        ``[B, T]``.

    Raises:
        ValueError: the side is neither.

    Example:
        >>> pad([torch.tensor([1, 2, 3]), torch.tensor([4])], value=0, side="left")
        tensor([[1, 2, 3],
                [0, 0, 4]])
    """
    if side not in ("left", "right"):
        raise ValueError(f"pad: side must be 'left' or 'right', got {side!r}.")
    return torch.nn.utils.rnn.pad_sequence(
        list(rows), batch_first=True, padding_value=value, padding_side=side
    )


class Rows(NamedTuple):
    """Ragged rows, one after the other."""

    values: Tensor
    """``[N]``."""
    lengths: Tensor
    """int64 ``[B]``, on the CPU, summing to N."""

    def split(self) -> list[Tensor]:
        """B views ``[T]`` of the values."""
        return list(unpack(*self))

    def where(self, mask: Tensor) -> "Rows":
        """The values where a mask over all of them, bool ``[N]``, is True."""
        before = torch.nn.functional.pad(mask.cumsum(0), (1, 0)).cpu()
        ends = self.lengths.cumsum(0)
        return Rows(self.values[mask], before[ends] - before[ends - self.lengths])


def entries_of(group: Any) -> TensorDictBase:
    """The TensorDict inside a TensorClass, or the TensorDict itself."""
    return group if isinstance(group, TensorDictBase) else group._tensordict


def first_entries(group: Any) -> TensorDictBase:
    """The TensorDict of a stack's first row, or the TensorDict itself."""
    # Ragged rows can't be one tensor, so what all rows have in common is looked up in the first.
    entries = entries_of(group)
    while isinstance(entries, LazyStackedTensorDict):
        entries = entries_of(entries.tensordicts[0])
    return entries


def read_rows(batch: Any, key: NestedKey) -> Rows | None:
    """The rows of an entry, one after the other; ``None`` where the batch, or a row, has none.

    The entry may be a tensor, dense ``[*B, T]`` or nested; a stack of rows of different lengths;
    or one Python object per row: tensors, lists of numbers, conversations shown as tokens.

    Args:
        batch: a TensorDict or TensorClass ``[*B]``, lazily stacked or not; without batch size it
            is one row.
        key: the entry. More dimensions than ``[*B, T]`` are flattened into T.
    """
    path: Any = unravel_key(key)
    values: list[Tensor] = []
    lengths: list[int] = []
    if not _collect(batch, (path,) if isinstance(path, str) else path, values, lengths):
        return None
    packed = torch.cat(values) if len(values) != 1 else values[0]
    return Rows(packed, torch.tensor(lengths, dtype=torch.int64))


def _collect(group: Any, path: tuple[str, ...], values: list[Tensor], lengths: list[int]) -> bool:
    """Add the rows of an entry to those so far; whether all of them have it."""
    entries = entries_of(group)
    if isinstance(entries, LazyStackedTensorDict):
        for row in entries.unbind(0):
            # What nearly every row is, read with one call.
            leaf = row.get(path, None) if type(row) is TensorDict and not row.batch_size else None
            if type(leaf) is Tensor and not leaf.is_nested:
                values.append(leaf if leaf.ndim == 1 else leaf.reshape(-1))
                lengths.append(leaf.numel())
            elif not _collect(row, path, values, lengths):
                return False
        return True
    leaf = entries.get(path[0], None)
    if leaf is None or (len(path) > 1 and (is_non_tensor(leaf) or isinstance(leaf, Tensor))):
        return False
    if len(path) > 1:
        return _collect(leaf, path[1:], values, lengths)
    if isinstance(leaf, Tensor) and not leaf.is_nested:
        count = entries.batch_size.numel()
        values.append(leaf.reshape(-1))
        lengths.extend([leaf.numel() // max(count, 1)] * count)
        return True
    if isinstance(leaf, Tensor):
        rows: Sequence[Any] = leaf.unbind()
    else:
        rows = objects_of_leaf(leaf, entries.batch_size) if is_non_tensor(leaf) else [None]
    if any(row is None for row in rows):
        return False
    flat = [torch.as_tensor(row).reshape(-1) for row in rows]
    values.extend(flat)
    lengths.extend(map(len, flat))
    return True


def read_images(batch: Any) -> list[list[str]] | None:
    """The images of each row, in order and in base 64; ``None`` where no row has any."""
    # Rows of a lazy stack are asked one by one: those without images lack the entry.
    entries = entries_of(batch)
    if isinstance(entries, LazyStackedTensorDict):
        found = [read_images(row) for row in entries.unbind(0)]
        if all(row is None for row in found):
            return None
        sizes = [row.batch_size.numel() for row in entries.unbind(0)]
        lists = [[[]] * n if row is None else row for row, n in zip(found, sizes, strict=True)]
        return [row for rows in lists for row in rows]
    leaf = entries.get(IMAGES, None)
    if leaf is None:
        return None
    rows = objects_of_leaf(leaf, entries.batch_size)
    return [[] if row is None else list(row["data"]) for row in rows]


# Padded form of the token entries of a batch: prompt on the left, response on the right.
#
# Shape legend: B rows, P and R tokens of the longest prompt and response.

_FILL = {"policy_versions": -1}


def padded_rows(rows: Sequence[TensorDictBase], *, pad_token_id: int) -> TensorDict:
    """Pad what :func:`~torchrl_data.row_tensordicts` gives.

    Args:
        rows: B rows, at least one, of the same entries.
        pad_token_id: fills the gaps of the tokens; ``("masks", "all_attention_mask")`` tells them
            from real ones.

    Returns:
        Dense entries: ``prompt`` ``[B, P]`` padded on the left, ``response`` ``[B, R]`` on the
        right, ``full`` and the masks ``[B, P + R]``. Gaps are False in masks, -1 in policy
        versions, 0 in what else there is.
    """
    starts = [row.get((TOKENS, PROMPT)).shape[-1] for row in rows]
    padded = TensorDict(batch_size=[len(rows)])
    for group, entries in rows[0].items():
        fill = pad_token_id if group == TOKENS else _FILL.get(group, 0)
        for name in entries_of(entries).keys() if is_tensor_collection(entries) else ():
            assert name in (PROMPT, RESPONSE, FULL) or group == MASKS
            values = [row.get((group, name)) for row in rows]
            cuts = {PROMPT: map(len, values), RESPONSE: [0] * len(rows)}.get(name, starts)
            parts = [(value[:n], value[n:]) for value, n in zip(values, cuts, strict=True)]
            left = pad([part for part, _ in parts], value=fill, side="left")
            right = pad([part for _, part in parts], value=fill)
            padded.set((group, name), torch.cat([left, right], -1))
    return padded


# What the groups of token rows share: reading ragged rows, views of them, specs.
#
# Shape legend: B rows, T tokens of a row (ragged), N tokens of all of them.

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


# Token rows of a batch in whatever layout: ragged, dense, nested, or padded beside a mask.
#
# Shape legend: B rows, T tokens of a row (ragged).


class TokenEntries:
    """One part of the tokens of a batch, and what is aligned with it, without padding."""

    def __init__(self, batch: TensorDictBase, which: str, *, who: str) -> None:
        self._batch, self._key, self._who = batch, (TOKENS, which), who
        rows, size = read_rows(batch, self._key), batch.batch_size.numel()
        if rows is None:
            raise missing_entry(batch, self._key, who)
        if (found := len(rows.lengths)) != size:
            raise ValueError(f"{who}: {self._key} has {found} rows in a batch of {size}.")
        if rows.values.is_floating_point() or rows.values.dtype == torch.bool:
            raise TypeError(f"{who}: token ids are integers, {self._key} has {rows.values.dtype}.")
        self._rows = rows
        # Which of the values are tokens, bool ``[N]``; ``None`` where all are.
        mask, padded = read_rows(batch, ATTENTION_MASK), is_padded(batch.get(TOKENS))
        if mask is not None and which == PROMPT:
            # A row begins with its prompt, and the mask is of the whole row.
            parts = zip(mask.split(), rows.lengths.tolist(), strict=True)
            mask = Rows(*pack([row[:length] for row, length in parts]))
        is_aligned = mask is not None and torch.equal(mask.lengths, rows.lengths)
        is_token = mask.values.bool() if mask is not None and is_aligned else None
        if is_token is None and padded:
            raise ValueError(
                f"{who}: {self._key} is padded, and a pad id may be a real token too. Put a bool "
                f"mask of its shape at {ATTENTION_MASK}, or use ragged rows: Tokens.from_rows(...)."
            )
        has_gaps = is_token is not None and (padded or not bool(is_token.all()))
        self._mask = is_token if has_gaps else None

    @property
    def keep(self) -> list[Tensor] | None:
        """Where the tokens are among padding, a bool tensor per row; ``None`` without padding."""
        return None if self._mask is None else Rows(self._mask, self._rows.lengths).split()

    def ids(self) -> list[list[int]]:
        """Token ids per row."""
        return [row.tolist() for row in self._kept(self._rows)]

    def aligned(self, key: tuple[str, str]) -> list[Tensor] | None:
        """Rows of an entry that is aligned with the tokens, or ``None`` if there is none."""
        rows = read_rows(self._batch, key)
        if rows is None:
            return None
        pairs = zip(rows.lengths.tolist(), self._rows.lengths.tolist(), strict=True)
        for row, (found, length) in enumerate(pairs):
            if found != length:
                raise ValueError(
                    f"{self._who}: {key} has {found} values in row {row}, which has {length} "
                    f"tokens at {self._key}. They must be aligned."
                )
        return self._kept(rows)

    def _kept(self, rows: Rows) -> list[Tensor]:
        return (rows if self._mask is None else rows.where(self._mask)).split()

"""Any state as JSON and tensors and back, without pickle."""

import base64
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_tensorclass,
)

from torchrl_data.batch_objects import BatchedObject, RowObjects, view_of
from torchrl_data.conversation import Conversations, conversation_states, conversations_from_states
from torchrl_data.layout import HistoryView

from .files import DTYPES, CheckpointError, Entry, TensorFile, as_bytes

# From a nested state to what is written: a JSON tree, and tensors by name.
#
# The tree is the state itself where JSON can say it; everything else is an object with the key
# ``"!"``, which says what it is. ``decoding`` reads it.

MAX_DEPTH: Final = 64
"""Levels of nesting that a state may have."""
TAG: Final = "!"
_MAX_NAME: Final = 200
_ARRAY_KINDS: Final = frozenset("biufcSUmM")


_KEPT_BYTES: Final = 1 << 16


class StagingBuffers:
    """Copies of tensors by name; large ones reuse the memory of the save before.

    Fresh memory costs several times what the copy does, so it is kept between saves.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._used: set[str] = set()
        self._on_their_way = False

    def begin(self) -> None:
        """Start the next save: what the last one copied is overwritten."""
        self._kept = {name: self._kept[name] for name in self._used if name in self._kept}
        self._used.clear()

    def copied(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """A copy in host memory of a uint8 tensor ``[N]``; it is there after :meth:`finish`."""
        device = values.device.type
        if device == "cpu" and len(values) < _KEPT_BYTES:
            return values.clone()
        pinned = device == "cuda"
        self._used.add(name)
        kept = self._kept.get(name)
        if kept is None or len(kept) != len(values):
            kept = torch.empty(len(values), dtype=torch.uint8, pin_memory=pinned)
            self._kept[name] = kept
        self._on_their_way |= pinned
        return kept.copy_(values, non_blocking=pinned)

    def finish(self) -> None:
        """Wait for copies that are on their way from a device."""
        if self._on_their_way:
            torch.cuda.synchronize()
            self._on_their_way = False


class Encoder:
    """Turns one state into a tree and tensors.

    Args:
        buffers: copy tensors into these, so that the state may change meanwhile; ``None`` takes
            them as they are.
    """

    def __init__(self, buffers: StagingBuffers | None = None) -> None:
        self.entries: dict[str, Entry] = {}
        """What goes into the tensor file, by name."""
        self.root = "state"
        """What errors call the value that is encoded."""
        self._buffers = buffers
        self._path: list[Any] = []
        # Tensors that are the same memory are stored once; the tensor is kept, so that no other one
        # gets its address.
        self._stored: dict[tuple[Any, ...], tuple[torch.Tensor, dict[str, Any]]] = {}

    # Where we are -------------------------------------------------------------------------------

    def under(self, key: Any, value: Any) -> Any:
        """Encode what lies under a key of the value being encoded."""
        self._path.append(key)
        if len(self._path) > MAX_DEPTH:
            raise self.error(f"lies more than {MAX_DEPTH} levels deep, or holds itself")
        encoded = self.encode(value)
        self._path.pop()
        return encoded

    def error(self, what: str) -> CheckpointError:
        """The error for the value being encoded."""
        place = "".join(f"[{key!r}]" for key in self._path[:12])
        rest = "..." if len(self._path) > 12 else ""
        return CheckpointError(f"{self.root}{place}{rest}: {what}.")

    def refused(self, value: Any, instead: str = "") -> CheckpointError:
        """The error for a value of a type that can't be stored."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        return self.error(f"cannot store {kind}" + (f"; {instead}" if instead else ""))

    # Values -------------------------------------------------------------------------------------

    def encode(self, value: Any) -> Any:
        """The tree of a value.

        Raises:
            CheckpointError: it can't be stored; the message names its place in the state.
        """
        encode = _ENCODERS.get(type(value))
        return self._other(value) if encode is None else encode(self, value)

    def _other(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            return self._numpy_scalar(value)
        if isinstance(value, torch.Tensor):
            raise self.refused(value, _instead_of_tensor(value))
        raise self.refused(value, "make it plain values, tensors or TensorDicts first")

    def _int(self, value: int) -> Any:
        # Python reads no decimal of more than 4,300 digits.
        return value if value.bit_length() < 4096 else {TAG: "int", "hex": hex(value)}

    def _float(self, value: float) -> Any:
        if math.isfinite(value):
            return value
        return {TAG: "float", "hex": struct.pack(">d", value).hex()}

    def _bytes(self, value: bytes | bytearray) -> Any:
        return {TAG: type(value).__name__, "base64": base64.b64encode(value).decode()}

    def _list(self, value: list[Any]) -> Any:
        return [self.under(index, item) for index, item in enumerate(value)]

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        return {TAG: "tuple", "of": [self.under(i, item) for i, item in enumerate(value)]}

    def _dict(self, value: dict[Any, Any]) -> Any:
        if TAG not in value and all(type(key) is str for key in value):
            return {key: self.under(key, item) for key, item in value.items()}
        return {TAG: "dict", "of": self._pairs(value)}

    def _ordered(self, value: OrderedDict[Any, Any]) -> Any:
        tree = {TAG: "OrderedDict", "of": self._pairs(value)}
        # What a module's `state_dict()` says of the versions of its parts.
        if (metadata := getattr(value, "_metadata", None)) is not None:
            tree["metadata"] = self.under("_metadata", metadata)
        return tree

    def _counter(self, value: Counter[Any]) -> Any:
        return {TAG: "Counter", "of": self._pairs(value)}

    def _pairs(self, value: Mapping[Any, Any]) -> list[Any]:
        for key in value:
            if type(key) not in (str, int):
                raise self.error(
                    f"cannot store a key of type {type(key).__name__}, only str and int"
                )
        return [[key, self.under(key, item)] for key, item in value.items()]

    # Tensors and arrays -------------------------------------------------------------------------

    def _tensor(self, value: torch.Tensor) -> Any:
        if value.layout is not torch.strided or value.device.type == "meta" or value.is_quantized:
            raise self.refused(value, _instead_of_tensor(value))
        # Temporaries of TensorDict have no address of their own where nothing is in them.
        same = (
            value.data_ptr(),
            value.dtype,
            value.shape,
            value.stride(),
            value.device,
            value.is_conj(),
            value.is_neg(),
        )
        if value.numel() and (known := self._stored.get(same)) is not None:
            return dict(known[1])
        tree = self._new_tensor(value)
        if value.numel():
            self._stored[same] = (value, tree)
        return tree

    def _new_tensor(self, value: torch.Tensor) -> dict[str, Any]:
        name, dtype, shape = self._new_name(), value.dtype, tuple(value.shape)
        flat = as_bytes(value)
        if self._buffers is not None:
            flat = self._buffers.copied(name, flat)
        elif flat.device.type != "cpu":
            flat = flat.cpu()
        data = flat.numpy().data if len(flat) else b""
        if dtype in DTYPES:
            self.entries[name] = Entry(DTYPES[dtype], shape, data)
            return {TAG: "tensor", "at": name}
        self.entries[name] = Entry("U8", (len(data),), data)
        return {
            TAG: "tensor",
            "at": name,
            "dtype": str(dtype).removeprefix("torch."),
            "shape": list(shape),
        }

    def _array(self, value: np.ndarray) -> Any:
        self._check_dtype(value)
        name = self._new_name()
        data = value.tobytes()
        self.entries[name] = Entry("U8", (len(data),), data)
        return {TAG: "ndarray", "at": name, "dtype": value.dtype.str, "shape": list(value.shape)}

    def _numpy_scalar(self, value: np.generic) -> Any:
        self._check_dtype(value)
        return {TAG: "numpy", "dtype": value.dtype.str, "hex": value.tobytes().hex()}

    def _check_dtype(self, value: np.ndarray | np.generic) -> None:
        dtype = value.dtype
        if dtype.kind not in _ARRAY_KINDS or not dtype.itemsize or dtype.str[1:] in ("f16", "c32"):
            raise self.error(f"cannot store a numpy array of dtype {dtype}")

    def _new_name(self) -> str:
        """A name of the tensor file: where the tensor lies in the state."""
        name = ".".join(map(str, self._path))[:_MAX_NAME].encode(errors="replace").decode()
        name = "tensor" if name in ("", "__metadata__") else name
        if name not in self.entries:
            return name
        number = len(self.entries)
        while f"{name}#{number}" in self.entries:
            number += 1
        return f"{name}#{number}"


def _instead_of_tensor(value: torch.Tensor) -> str:
    if type(value).__name__ == "DTensor":
        return "give the sharded state dict by `sharded=`, or gather it first"
    if value.device.type == "meta":
        return "a tensor on the meta device has no values"
    return "make it a plain dense tensor first"


def _as_it_is(encoder: Encoder, value: Any) -> Any:  # noqa: ARG001 (one signature for all)
    return value


_ENCODERS: Final[dict[type, Callable[[Encoder, Any], Any]]] = {
    type(None): _as_it_is,
    bool: _as_it_is,
    str: _as_it_is,
    int: Encoder._int,
    float: Encoder._float,
    bytes: Encoder._bytes,
    bytearray: Encoder._bytes,
    list: Encoder._list,
    tuple: Encoder._tuple,
    dict: Encoder._dict,
    OrderedDict: Encoder._ordered,
    Counter: Encoder._counter,
    torch.Tensor: Encoder._tensor,
    torch.nn.Parameter: Encoder._tensor,
    np.ndarray: Encoder._array,
    np.memmap: Encoder._array,
}


# From a JSON tree and tensors back to a nested state; what ``encoding`` wrote, and nothing else.
#
# Only values are made, never a class that the file names freely, and nothing is unpickled.

_ARRAY_DTYPE: Final = re.compile(r"[<>|=]([biufcSU]\d{1,9}|[mM]8(\[\d*[a-zA-Zμ]{1,2}\])?)")
_RAW_DTYPES: Final = {
    name: getattr(torch, name)
    for name in (
        *("complex32", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        *("float8_e8m0fnu", "float4_e2m1fn_x2"),
    )
}


class Decoder:
    """Builds the state of a tree.

    Args:
        tensors: the file in which its tensors are.
    """

    def __init__(self, tensors: TensorFile) -> None:
        self._tensors = tensors
        self._depth = 0
        self._read: dict[str, torch.Tensor] = {}

    def decode(self, tree: Any) -> Any:
        """The value of a tree.

        Raises:
            ValueError: the tree is not what an ``Encoder`` wrote.
        """
        if isinstance(tree, dict):
            self._depth += 1
            # A level of the state can take several of the tree.
            if self._depth > 4 * MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
            value = self._object(tree)
            self._depth -= 1
            return value
        if isinstance(tree, list):
            return self._list(tree)
        return tree

    def _object(self, tree: dict[str, Any]) -> Any:
        if TAG not in tree:
            return {key: self.decode(item) for key, item in tree.items()}
        kind = tree[TAG]
        decode = self.kinds().get(kind) if isinstance(kind, str) else None
        if decode is None:
            raise ValueError(f"it holds something of the unknown kind {kind!r:.80}")
        return decode(self, tree)

    def kinds(self) -> dict[str, Callable[[Any, dict[str, Any]], Any]]:
        """How each kind of tagged object is read."""
        return DECODERS

    def _list(self, tree: Any) -> list[Any]:
        if not isinstance(tree, list):
            raise ValueError(f"it holds a {type(tree).__name__} where a list belongs")
        self._depth += 1
        if self._depth > 4 * MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        values = [self.decode(item) for item in tree]
        self._depth -= 1
        return values

    def _int(self, tree: dict[str, Any]) -> int:
        return int(tree["hex"], 16)

    def _float(self, tree: dict[str, Any]) -> float:
        return struct.unpack(">d", bytes.fromhex(tree["hex"]))[0]

    def _bytes(self, tree: dict[str, Any]) -> bytes:
        return base64.b64decode(tree["base64"], validate=True)

    def _bytearray(self, tree: dict[str, Any]) -> bytearray:
        return bytearray(self._bytes(tree))

    def _tuple(self, tree: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(self._list(tree["of"]))

    def _pairs(self, tree: dict[str, Any]) -> dict[Any, Any]:
        pairs = {}
        for key, item in tree["of"]:
            if type(key) not in (str, int):
                raise ValueError(f"it holds a key of type {type(key).__name__}")
            pairs[key] = self.decode(item)
        return pairs

    def _ordered(self, tree: dict[str, Any]) -> OrderedDict[Any, Any]:
        value: Any = OrderedDict(self._pairs(tree))
        if "metadata" in tree:
            value._metadata = self.decode(tree["metadata"])
        return value

    def _counter(self, tree: dict[str, Any]) -> Counter[Any]:
        return Counter(self._pairs(tree))

    def _tensor(self, tree: dict[str, Any]) -> torch.Tensor:
        name = tree["at"]
        if name in self._read:
            # One memory in the state that was saved, one memory now.
            return self._read[name].detach()
        value = self._tensors.tensor(name)
        if "dtype" in tree:
            value = value.view(_RAW_DTYPES[tree["dtype"]]).view(tree["shape"])
        self._read[name] = value
        return value

    def _array(self, tree: dict[str, Any]) -> np.ndarray:
        data = self._tensors.data(tree["at"])
        return np.frombuffer(data, _array_dtype(tree["dtype"])).reshape(tree["shape"])

    def _numpy_scalar(self, tree: dict[str, Any]) -> np.generic:
        return np.frombuffer(bytes.fromhex(tree["hex"]), _array_dtype(tree["dtype"]))[0]


def _array_dtype(name: Any) -> np.dtype:
    if not isinstance(name, str) or _ARRAY_DTYPE.fullmatch(name) is None:
        raise ValueError(f"it holds an array of dtype {name!r:.80}")
    return np.dtype(name)


DECODERS: Final[dict[str, Callable[[Any, dict[str, Any]], Any]]] = {
    "int": Decoder._int,
    "float": Decoder._float,
    "bytes": Decoder._bytes,
    "bytearray": Decoder._bytearray,
    "tuple": Decoder._tuple,
    "dict": Decoder._pairs,
    "OrderedDict": Decoder._ordered,
    "Counter": Decoder._counter,
    "tensor": Decoder._tensor,
    "ndarray": Decoder._array,
    "numpy": Decoder._numpy_scalar,
}


# TensorDicts, their stacks, and the tensorclasses that may be stored.

# Imported when a checkpoint has one, since some are expensive.
_OWN: Final = {
    "ChatHistory": "torchrl_data.layout",
    "ContentBase": "torchrl_data.history",
    "History": "torchrl_data.history",
    "IFEvalScoreData": "torchrl_envs.tasks.ifeval",
    "LogProbs": "torchrl_data.layout",
    "Masks": "torchrl_data.layout",
    "Text": "torchrl_data.layout",
    "Tokens": "torchrl_data.layout",
}


class Tensorclasses:
    """The tensorclasses that may be stored and loaded, by name: this library's and some more.

    Args:
        further: classes of your own.

    Raises:
        TypeError: one is no tensorclass.
        ValueError: two have one name.
    """

    def __init__(self, further: Sequence[type] = ()) -> None:
        self._further: dict[str, type] = {}
        for cls in further:
            name = getattr(cls, "__name__", repr(cls))
            if not (isinstance(cls, type) and is_tensorclass(cls)):
                raise TypeError(f"CheckpointStore: tensorclasses has {name}, which is none.")
            if name in _OWN or name in self._further:
                raise ValueError(
                    f"CheckpointStore: tensorclasses has a second {name}; rename the class."
                )
            self._further[name] = cls

    def name(self, cls: type) -> str | None:
        """The name of a class that may be stored."""
        name = cls.__name__
        known = self._further.get(name) is cls or _OWN.get(name) == cls.__module__
        return name if known else None

    def named(self, name: Any) -> Any:
        """The class of a name.

        Raises:
            ValueError: there is none.
        """
        if name in self._further:
            return self._further[name]
        if name not in _OWN:
            raise ValueError(
                f"it holds the tensorclass {name!r:.80}, which is not listed in "
                "CheckpointStore(tensorclasses=)"
            )
        return getattr(import_module(_OWN[name]), name)


class StateEncoder(Encoder):
    """An encoder that knows TensorDicts, too."""

    def __init__(self, tensorclasses: Tensorclasses, buffers: StagingBuffers | None = None) -> None:
        super().__init__(buffers)
        self._tensorclasses = tensorclasses

    def _other(self, value: Any) -> Any:
        if (encode := _TENSORDICT_ENCODERS.get(type(value))) is not None:
            return encode(self, value)
        if is_tensorclass(value):
            return self._tensorclass(value)
        return super()._other(value)

    def _tensordict(self, value: TensorDict) -> Any:
        tree: dict[str, Any] = {TAG: "TensorDict", "size": list(value.batch_size)}
        if value.device is not None:
            tree["on_device"] = True
        if value._has_names():
            tree["names"] = list(value.names)
        tree["of"] = {key: self.under(key, item) for key, item in value.items()}
        return tree

    def _lazy_stack(self, value: LazyStackedTensorDict) -> Any:
        tree = {TAG: type(value).__name__, "dim": value.stack_dim}
        if value._has_names():
            tree["names"] = list(value.names)
        parts = enumerate(value.tensordicts)
        tree["of"] = [self.under(number, part) for number, part in parts]
        return tree

    def _non_tensor(self, value: NonTensorData) -> Any:
        data = self.encode(value.__dict__["_non_tensordict"]["data"])
        return {TAG: "NonTensorData", "size": list(value.batch_size), "of": data}

    def _batched_object(self, value: BatchedObject) -> Any:
        snapshot, view = value.snapshot(), view_of(value)
        if isinstance(snapshot, Conversations) and (view is None or type(view) is HistoryView):
            rows: Any = conversation_states(snapshot)
        elif type(snapshot) is RowObjects and view is None:
            rows = list(snapshot)
        else:
            shown = "" if view is None else f" shown by a {type(view).__name__}"
            raise self.error(
                f"cannot store rows of {type(snapshot).__name__}{shown}; store the rows of a "
                "collector"
            )
        return {
            TAG: "BatchedObject",
            "size": list(value.batch_size),
            "type": type(snapshot).__name__,
            "view": None if view is None else view.part,
            "of": self.encode(rows),
        }

    def _tensorclass(self, value: Any) -> Any:
        name = self._tensorclasses.name(type(value))
        if name is None:
            raise self.refused(value, "name its class in CheckpointStore(tensorclasses=[...])")
        fields = value.__dict__["_non_tensordict"]
        return {
            TAG: "tensorclass",
            "name": name,
            "of": self.encode(value.__dict__["_tensordict"]),
            "fields": {key: self.under(key, item) for key, item in fields.items()},
        }

    def _memory_mapped(self, value: MemoryMappedTensor) -> Any:
        return self._tensor(value.as_subclass(torch.Tensor))


_TENSORDICT_ENCODERS: Final[dict[Any, Callable[[Any, Any], Any]]] = {
    TensorDict: StateEncoder._tensordict,
    LazyStackedTensorDict: StateEncoder._lazy_stack,
    NonTensorStack: StateEncoder._lazy_stack,
    NonTensorData: StateEncoder._non_tensor,
    BatchedObject: StateEncoder._batched_object,
    MemoryMappedTensor: StateEncoder._memory_mapped,
}


class StateDecoder(Decoder):
    """A decoder that knows TensorDicts, too."""

    def __init__(self, tensors: TensorFile, tensorclasses: Tensorclasses) -> None:
        super().__init__(tensors)
        self._tensorclasses = tensorclasses

    def kinds(self) -> dict[str, Callable[[Any, dict[str, Any]], Any]]:
        """How each kind of tagged object is read."""
        return _DECODERS

    def _tensordict(self, tree: dict[str, Any]) -> TensorDict:
        size = torch.Size(tree["size"])
        entries = {key: self.decode(item) for key, item in _mapping(tree["of"]).items()}
        for key, item in entries.items():
            shape = getattr(item, "shape", None)
            if shape is None or shape[: len(size)] != size:
                raise ValueError(
                    f"the entry {key!r:.80} of a TensorDict {list(size)} is a "
                    f"{type(item).__name__} of the shape {shape}"
                )
        device = torch.device("cpu") if tree.get("on_device") else None
        value = TensorDict._new_unsafe(entries, batch_size=size, device=device)
        if "names" in tree:
            value.names = tree["names"]
        return value

    def _lazy_stack(self, tree: dict[str, Any]) -> LazyStackedTensorDict:
        cls: Any = NonTensorStack if tree[TAG] == "NonTensorStack" else LazyStackedTensorDict
        value = cls(*self._list(tree["of"]), stack_dim=tree["dim"])
        if "names" in tree:
            value.names = tree["names"]
        return value

    def _non_tensor(self, tree: dict[str, Any]) -> NonTensorData:
        return NonTensorData(self.decode(tree["of"]), batch_size=tree["size"])

    def _batched_object(self, tree: dict[str, Any]) -> BatchedObject:
        rows, view = self._list(tree["of"]), tree["view"]
        size = torch.Size(tree["size"])
        if len(rows) != size.numel():
            raise ValueError(f"a batch {list(size)} has {len(rows)} values")
        snapshot: Any = RowObjects(rows)
        if tree["type"] == "Conversations":
            snapshot = conversations_from_states(rows)
        return BatchedObject.of(snapshot, size, view=None if view is None else HistoryView(view))

    def _tensorclass(self, tree: dict[str, Any]) -> Any:
        cls = self._tensorclasses.named(tree["name"])
        fields = {key: self.decode(item) for key, item in _mapping(tree["fields"]).items()}
        return cls._from_tensordict(self.decode(tree["of"]), fields)


def _mapping(tree: Any) -> Mapping[str, Any]:
    if not isinstance(tree, dict):
        raise ValueError(f"it holds a {type(tree).__name__} where entries by name belong")
    return tree


_DECODERS: Final[dict[str, Callable[[Any, dict[str, Any]], Any]]] = {
    **DECODERS,
    "TensorDict": StateDecoder._tensordict,
    "LazyStackedTensorDict": StateDecoder._lazy_stack,
    "NonTensorStack": StateDecoder._lazy_stack,
    "NonTensorData": StateDecoder._non_tensor,
    "BatchedObject": StateDecoder._batched_object,
    "tensorclass": StateDecoder._tensorclass,
}

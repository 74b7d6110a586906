"""Any state as JSON and tensors and back, without pickle.

The JSON is the state itself where JSON can say it; everything else is an object with the key
``"!"``, which says what it is. Only values are made of it, never a class that the file names.
"""

import base64
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
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

from torchrl_data.batched_object import BatchedObject, RowObjects, view_of
from torchrl_data.conversation import Conversations
from torchrl_data.conversation_state import conversation_states, conversations_from_states
from torchrl_data.conversation_view import ConversationView
from torchrl_data.keys import HISTORY

from .errors import CheckpointError
from .tensor_file import DTYPES, TensorEntry, as_bytes

MAX_DEPTH: Final = 64
"""Levels of nesting that a state may have."""
TAG: Final = "!"
_MAX_NAME: Final = 200
_ARRAY_KINDS: Final = frozenset("biufcSUmM")
_ARRAY_DTYPE: Final = re.compile(r"[<>|=]([biufcSU]\d{1,9}|[mM]8(\[\d*[a-zA-Zμ]{1,2}\])?)")
_RAW = "complex32 complex128 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
_RAW_DTYPES: Final = {name: getattr(torch, name) for name in _RAW.split()}
"""Those of tensors that are stored as bytes."""

_WORDS: Final[dict[str, Callable[[str], Any]]] = {
    **{kind.__name__: kind.fromisoformat for kind in (datetime, date, time)},
    "Decimal": Decimal,
    "Timestamp": lambda text: import_module("pandas").Timestamp(text),
}
"""What reads the values that are stored as their text; data sets have columns of them."""

# Tensorclasses that may be stored, imported when a checkpoint has one: some are expensive.
_OWN: Final = {
    **dict.fromkeys(["ChatHistory", "LogProbs", "Masks", "Text", "Tokens"], "torchrl_data.layout"),
    "ContentBase": "torchrl_data.content",
    "History": "torchrl_data.history",
    "IFEvalScoreData": "torchrl_tasks.ifeval.ifeval",
}


def known_tensorclasses(further: Sequence[type] = ()) -> dict[str, Any]:
    """The tensorclasses that may be stored and loaded, by name: some more, and the modules of ours.

    Raises:
        TypeError: one is no tensorclass.
        ValueError: two have one name.
    """
    known: dict[str, Any] = dict(_OWN)
    for cls in further:
        name = getattr(cls, "__name__", repr(cls))
        if not (isinstance(cls, type) and is_tensorclass(cls)):
            raise TypeError(f"CheckpointStore: tensorclasses has {name}, which is none.")
        if name in known:
            raise ValueError(
                f"CheckpointStore: tensorclasses has a second {name}; rename the class."
            )
        known[name] = cls
    return known


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
        if device == "cpu" and len(values) < 1 << 16:
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
        tensorclasses: that may be in it, see :func:`known_tensorclasses`.
        buffers: copy tensors into these, so that the state may change meanwhile; ``None`` takes
            them as they are.
    """

    def __init__(
        self, tensorclasses: Mapping[str, Any], buffers: StagingBuffers | None = None
    ) -> None:
        self.entries: dict[str, TensorEntry] = {}
        """What goes into the tensor file, by name."""
        self.root = "state"
        """What errors call the value that is encoded."""
        self._tensorclasses = tensorclasses
        self._buffers = buffers
        self._path: list[Any] = []
        # Tensors that are the same memory are stored once; the tensor is kept, so that no other one
        # gets its address.
        self._stored: dict[tuple[Any, ...], tuple[torch.Tensor, dict[str, Any]]] = {}

    def encode(self, value: Any) -> Any:
        """The tree of a value.

        Raises:
            CheckpointError: it can't be stored; the message names its place in the state.
        """
        kind: Any = type(value)
        if (encode := _ENCODERS.get(kind)) is not None:
            return encode(self, value)
        if isinstance(value, np.generic):
            return self._array(value)
        if is_tensorclass(value):
            return self._tensorclass(value)
        if kind.__name__ == "Timestamp" and isinstance(value, datetime):  # of pandas
            return self._plain(value)
        instead = "make it plain values, tensors or TensorDicts first"
        if kind.__name__ == "DTensor":
            instead = "give the sharded state dict by `sharded=`, or gather it first"
        elif isinstance(value, torch.Tensor):
            instead = "make it a plain dense tensor first"
        raise self._refused(value, instead)

    def _under(self, key: Any, value: Any) -> Any:
        """Encode what lies under a key of the value being encoded."""
        self._path.append(key)
        if len(self._path) > MAX_DEPTH:
            raise self._error(f"lies more than {MAX_DEPTH} levels deep, or holds itself")
        encoded = self.encode(value)
        self._path.pop()
        return encoded

    def _error(self, what: str) -> CheckpointError:
        """The error for the value being encoded."""
        place = "".join(f"[{key!r}]" for key in self._path[:12])
        rest = "..." if len(self._path) > 12 else ""
        return CheckpointError(f"{self.root}{place}{rest}: {what}.")

    def _refused(self, value: Any, instead: str) -> CheckpointError:
        """The error for a value of a type that can't be stored."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        return self._error(f"cannot store {kind}; {instead}")

    def _plain(self, value: Any) -> Any:
        if isinstance(value, bytes | bytearray):
            return {TAG: type(value).__name__, "base64": base64.b64encode(value).decode()}
        if isinstance(value, float) and not math.isfinite(value):
            return {TAG: "float", "hex": struct.pack(">d", value).hex()}
        if isinstance(value, int) and value.bit_length() >= 4096:
            # Python reads no decimal of more than 4,300 digits.
            return {TAG: "int", "hex": hex(value)}
        if isinstance(value, date | time | Decimal):
            return {TAG: type(value).__name__, "words": str(value)}
        return value

    def _sequence(self, value: Sequence[Any]) -> Any:
        items = [self._under(number, item) for number, item in enumerate(value)]
        return {TAG: "tuple", "of": items} if isinstance(value, tuple) else items

    def _mapping(self, value: dict[Any, Any]) -> Any:
        if type(value) is dict and TAG not in value and all(type(key) is str for key in value):
            return {key: self._under(key, item) for key, item in value.items()}
        for key in value:
            if type(key) not in (str, int):
                raise self._error(
                    f"cannot store a key of type {type(key).__name__}, only str and int"
                )
        pairs = [[key, self._under(key, item)] for key, item in value.items()]
        tree: dict[str, Any] = {TAG: type(value).__name__, "of": pairs}
        # What a module's `state_dict()` says of the versions of its parts.
        if (metadata := getattr(value, "_metadata", None)) is not None:
            tree["metadata"] = self._under("_metadata", metadata)
        return tree

    def _tensor(self, value: torch.Tensor) -> Any:
        if value.device.type == "meta":
            raise self._refused(value, "a tensor on the meta device has no values")
        if value.layout is not torch.strided or value.is_quantized:
            raise self._refused(value, "make it a plain dense tensor first")
        # Temporaries of TensorDict have no address of their own where nothing is in them.
        same = (
            *(value.data_ptr(), value.dtype, value.shape, value.stride(), value.device),
            *(value.is_conj(), value.is_neg()),
        )
        if value.numel() and (known := self._stored.get(same)) is not None:
            return dict(known[1])
        tree: dict[str, Any] = {TAG: "tensor"}
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype in DTYPES:
            tree["at"] = self._add(dtype, tuple(value.shape), as_bytes(value))
        elif dtype in _RAW_DTYPES:
            data = as_bytes(value)
            tree["at"] = self._add("uint8", (len(data),), data)
            tree |= {"dtype": dtype, "shape": list(value.shape)}
        else:
            raise self._error(f"cannot store a tensor of dtype {dtype}")
        if value.numel():
            self._stored[same] = (value, tree)
        return tree

    def _add(self, dtype: str, shape: tuple[int, ...], data: torch.Tensor) -> str:
        """Put bytes into the tensor file, under a name that says where they lie in the state."""
        name = ".".join(map(str, self._path))[:_MAX_NAME].encode(errors="replace").decode()
        name = place = "tensor" if name in ("", "__metadata__") else name
        number = len(self.entries)
        while name in self.entries:
            name, number = f"{place}#{number}", number + 1
        if self._buffers is not None:
            data = self._buffers.copied(name, data)
        self.entries[name] = TensorEntry(dtype, shape, data.cpu())
        return name

    def _array(self, value: np.ndarray | np.generic) -> Any:
        dtype = value.dtype
        if dtype.kind not in _ARRAY_KINDS or not dtype.itemsize or dtype.str[1:] in ("f16", "c32"):
            raise self._error(f"cannot store a numpy array of dtype {dtype}")
        if isinstance(value, np.generic):
            return {TAG: "numpy", "dtype": dtype.str, "hex": value.tobytes().hex()}
        data = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
        name = self._add("uint8", (len(data),), data)
        return {TAG: "ndarray", "at": name, "dtype": dtype.str, "shape": list(value.shape)}

    def _tensordict(self, value: Any) -> Any:
        tree: dict[str, Any] = {TAG: type(value).__name__}
        if isinstance(value, NonTensorData):
            data = self.encode(value.__dict__["_non_tensordict"]["data"])
            return tree | {"size": list(value.batch_size), "of": data}
        if value._has_names():
            tree["names"] = list(value.names)
        if not isinstance(value, TensorDict):
            parts = [self._under(number, part) for number, part in enumerate(value.tensordicts)]
            return tree | {"dim": value.stack_dim, "of": parts}
        if value.device is not None:
            tree["on_device"] = True
        entries = {key: self._under(key, item) for key, item in value.items()}
        return tree | {"size": list(value.batch_size), "of": entries}

    def _batched_object(self, value: BatchedObject) -> Any:
        snapshot, view = value.snapshot(), view_of(value)
        as_messages = isinstance(view, ConversationView) and view.mode == HISTORY
        if isinstance(snapshot, Conversations) and (view is None or as_messages):
            rows: Any = conversation_states(snapshot)
        elif type(snapshot) is RowObjects and view is None:
            rows = list(snapshot)
        else:
            shown = "" if view is None else f" shown by a {type(view).__name__}"
            raise self._error(
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
        cls = type(value)
        if self._tensorclasses.get(cls.__name__) not in (cls, cls.__module__):
            raise self._refused(value, "name its class in CheckpointStore(tensorclasses=[...])")
        fields = value.__dict__["_non_tensordict"]
        return {
            TAG: "tensorclass",
            "name": cls.__name__,
            "of": self.encode(value.__dict__["_tensordict"]),
            "fields": {key: self._under(key, item) for key, item in fields.items()},
        }


_ENCODERS: Final[dict[Any, Callable[[Encoder, Any], Any]]] = {
    **dict.fromkeys((type(None), bool, str, int, float, bytes, bytearray), Encoder._plain),
    **dict.fromkeys((datetime, date, time, Decimal), Encoder._plain),
    **dict.fromkeys((list, tuple), Encoder._sequence),
    **dict.fromkeys((dict, OrderedDict, Counter), Encoder._mapping),
    **dict.fromkeys((torch.Tensor, torch.nn.Parameter), Encoder._tensor),
    MemoryMappedTensor: lambda encoder, value: encoder._tensor(value.as_subclass(torch.Tensor)),
    **dict.fromkeys((np.ndarray, np.memmap), Encoder._array),
    **dict.fromkeys(
        (TensorDict, LazyStackedTensorDict, NonTensorStack, NonTensorData), Encoder._tensordict
    ),
    BatchedObject: Encoder._batched_object,
}


class Decoder:
    """Builds the state of a tree that an :class:`Encoder` wrote.

    Args:
        tensors: reads a tensor of the tensor file by its name.
        tensorclasses: that may be in it, see :func:`known_tensorclasses`.
    """

    def __init__(
        self, tensors: Callable[[str], torch.Tensor], tensorclasses: Mapping[str, Any]
    ) -> None:
        self._tensors = tensors
        self._tensorclasses = tensorclasses
        self._depth = 0
        self._read: dict[str, torch.Tensor] = {}

    def decode(self, tree: Any) -> Any:
        """The value of a tree.

        Raises:
            ValueError: the tree is not what an ``Encoder`` wrote.
        """
        if not isinstance(tree, dict | list):
            return tree
        self._depth += 1
        # A level of the state can take several of the tree.
        if self._depth > 4 * MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        if isinstance(tree, list):
            value: Any = [self.decode(item) for item in tree]
        elif TAG not in tree:
            value = {key: self.decode(item) for key, item in tree.items()}
        else:
            kind = tree[TAG]
            decode = _DECODERS.get(kind) if isinstance(kind, str) else None
            if decode is None:
                raise ValueError(f"it holds something of the unknown kind {kind!r:.80}")
            value = decode(self, tree)
        self._depth -= 1
        return value

    def _plain(self, tree: dict[str, Any]) -> Any:
        if tree[TAG] == "int":
            return int(tree["hex"], 16)
        if "words" in tree:
            return _WORDS[tree[TAG]](tree["words"])
        if tree[TAG] == "float":
            return struct.unpack(">d", bytes.fromhex(tree["hex"]))[0]
        data = base64.b64decode(tree["base64"], validate=True)
        return data if tree[TAG] == "bytes" else bytearray(data)

    def _parts(self, tree: Any, kind: type) -> Any:
        """The values of a list, or of a dictionary whatever its keys are."""
        if not isinstance(tree, kind):
            where = "a list belongs" if kind is list else "entries by name belong"
            raise ValueError(f"it holds a {type(tree).__name__} where {where}")
        if kind is list:
            return self.decode(tree)
        return {key: self.decode(item) for key, item in tree.items()}

    def _mapping(self, tree: dict[str, Any]) -> dict[Any, Any]:
        value: Any = {"OrderedDict": OrderedDict, "Counter": Counter}.get(tree[TAG], dict)()
        for key, item in tree["of"]:
            if type(key) not in (str, int):
                raise ValueError(f"it holds a key of type {type(key).__name__}")
            value[key] = self.decode(item)
        if "metadata" in tree:
            value._metadata = self.decode(tree["metadata"])
        return value

    def _tensor(self, tree: dict[str, Any]) -> torch.Tensor:
        name = tree["at"]
        if name in self._read:
            # One memory in the state that was saved, one memory now.
            return self._read[name].detach()
        value = self._tensors(name)
        if "dtype" in tree:
            value = value.view(_RAW_DTYPES[tree["dtype"]]).view(tree["shape"])
        self._read[name] = value
        return value

    def _array(self, tree: dict[str, Any]) -> np.ndarray | np.generic:
        dtype = tree["dtype"]
        if not isinstance(dtype, str) or _ARRAY_DTYPE.fullmatch(dtype) is None:
            raise ValueError(f"it holds an array of dtype {dtype!r:.80}")
        if tree[TAG] == "numpy":
            return np.frombuffer(bytes.fromhex(tree["hex"]), dtype)[0]
        data = self._tensors(tree["at"]).view(-1).view(torch.uint8).numpy()
        return data.view(dtype).reshape(tree["shape"])

    def _tensordict(self, tree: dict[str, Any]) -> Any:
        if tree[TAG] == "NonTensorData":
            return NonTensorData(self.decode(tree["of"]), batch_size=tree["size"])
        if tree[TAG] == "TensorDict":
            size = torch.Size(tree["size"])
            entries = self._parts(tree["of"], dict)
            for key, item in entries.items():
                shape = getattr(item, "shape", None)
                if shape is None or shape[: len(size)] != size:
                    raise ValueError(
                        f"the entry {key!r:.80} of a TensorDict {list(size)} is a "
                        f"{type(item).__name__} of the shape {shape}"
                    )
            device = torch.device("cpu") if tree.get("on_device") else None
            value: Any = TensorDict._new_unsafe(entries, batch_size=size, device=device)
        else:
            cls: Any = NonTensorStack if tree[TAG] == "NonTensorStack" else LazyStackedTensorDict
            value = cls(*self._parts(tree["of"], list), stack_dim=tree["dim"])
        if "names" in tree:
            value.names = tree["names"]
        return value

    def _batched_object(self, tree: dict[str, Any]) -> BatchedObject:
        rows, view = self._parts(tree["of"], list), tree["view"]
        size = torch.Size(tree["size"])
        if len(rows) != size.numel():
            raise ValueError(f"a batch {list(size)} has {len(rows)} values")
        snapshot: Any = RowObjects(rows)
        if tree["type"] == "Conversations":
            snapshot = conversations_from_states(rows)
        return BatchedObject.of(snapshot, size, view=view and ConversationView(view))

    def _tensorclass(self, tree: dict[str, Any]) -> Any:
        name = tree["name"]
        cls = self._tensorclasses.get(name)
        if cls is None:
            raise ValueError(
                f"it holds the tensorclass {name!r:.80}, which is not listed in "
                "CheckpointStore(tensorclasses=)"
            )
        cls = getattr(import_module(cls), name) if isinstance(cls, str) else cls
        return cls._from_tensordict(self.decode(tree["of"]), self._parts(tree["fields"], dict))


_DECODERS: Final[dict[str, Callable[[Decoder, dict[str, Any]], Any]]] = {
    **dict.fromkeys(("int", "float", "bytes", "bytearray", *_WORDS), Decoder._plain),
    "tuple": lambda decoder, tree: tuple(decoder._parts(tree["of"], list)),
    **dict.fromkeys(("dict", "OrderedDict", "Counter"), Decoder._mapping),
    "tensor": Decoder._tensor,
    **dict.fromkeys(("ndarray", "numpy"), Decoder._array),
    **dict.fromkeys(
        ("TensorDict", "LazyStackedTensorDict", "NonTensorStack", "NonTensorData"),
        Decoder._tensordict,
    ),
    "BatchedObject": Decoder._batched_object,
    "tensorclass": Decoder._tensorclass,
}

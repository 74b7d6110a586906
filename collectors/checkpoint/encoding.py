"""From a nested state to what is written: a JSON tree, and tensors by name.

The tree is the state itself where JSON can say it; everything else is an object with the key
``"!"``, which says what it is. ``decoding`` reads it.
"""

import base64
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from .errors import CheckpointError
from .tensor_file import DTYPES, Entry, as_bytes

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

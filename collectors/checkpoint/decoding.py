"""From a JSON tree and tensors back to a nested state; what ``encoding`` wrote, and nothing else.

Only values are made, never a class that the file names freely, and nothing is unpickled.
"""

import base64
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from .encoding import MAX_DEPTH, TAG
from .tensor_file import TensorFile

_ARRAY_DTYPE: Final = re.compile(r"[<>|=]([biufcSU]\d{1,9}|[mM]8(\[\d*[a-zA-Zμ]{1,2}\])?)")
_RAW_DTYPES: Final = {
    name: getattr(torch, name)
    for name in (
        "complex32",
        "complex128",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
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

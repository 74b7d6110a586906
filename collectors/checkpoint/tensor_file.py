"""The safetensors format: eight bytes of length, a JSON header, the bytes of the tensors.

Written and read here rather than by the library, because a checkpoint is hashed while it is
written, read with bounds that come from the file itself, and stopped at every write by tests; any
safetensors reader reads what is written.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from . import fsio

MAX_HEADER_BYTES: Final = 100_000_000
"""What the safetensors library reads."""
DTYPES: Final[dict[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
_BY_NAME: Final = {name: dtype for dtype, name in DTYPES.items()}


class Entry(NamedTuple):
    """What is to be written under a name."""

    dtype: str
    """The format's name of it."""
    shape: tuple[int, ...]
    data: fsio.Buffer
    """The bytes, in C order."""


class Written(NamedTuple):
    """A file as the manifest lists it."""

    num_bytes: int
    sha256: str


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in C order, uint8 ``[N]``; its own memory where that is in order."""
    flat = value.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if len(flat) < 2:
        # Of one element the stride says nothing, and may be anything.
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def write_tensors(
    path: Path, entries: dict[str, Entry], metadata: dict[str, str] | None = None
) -> Written:
    """Write a new file and sync it."""
    # The widest first, so that each is aligned in a file that is mapped into memory.
    ordered = sorted(entries.items(), key=lambda item: -_BY_NAME[item[1].dtype].itemsize)
    entries = dict(ordered)
    return write_file(
        path, [_header(entries, metadata), *(entry.data for entry in entries.values())]
    )


def check_header(entries: dict[str, Entry]) -> None:
    """Check that the names of all entries fit a header.

    Raises:
        ValueError: they do not.
    """
    if (length := len(_header(entries))) > MAX_HEADER_BYTES:
        raise ValueError(
            f"{len(entries)} tensors need a header of {length} bytes, a safetensors file has at "
            f"most {MAX_HEADER_BYTES}. Store fewer rows, or stack them."
        )


def _header(entries: dict[str, Entry], metadata: dict[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, entry in entries.items():
        end = offset + len(entry.data)
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, parts: Sequence[fsio.Buffer]) -> Written:
    """Write a new file of some parts and sync it."""
    digest, count, pending = hashlib.sha256(), 0, bytearray()
    with fsio.named(path):
        descriptor = fsio.create(path)
        try:
            for part in parts:
                count += len(part)
                digest.update(part)
                # Small parts together, since each write is a call of the system.
                if len(part) < 1 << 16:
                    pending += part
                    if len(pending) < 1 << 20:
                        continue
                    part = b""
                fsio.write(descriptor, pending)
                pending.clear()
                fsio.write(descriptor, part)
            fsio.write(descriptor, pending)
            fsio.sync(descriptor)
        finally:
            fsio.close(descriptor)
    return Written(count, digest.hexdigest())


class TensorFile:
    """A safetensors file that is open for reading.

    Raises:
        ValueError: the file is not one.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = fsio.open_file(path)
        try:
            self._entries, self._start = _read_header(self._descriptor)
        except BaseException:
            self.close()
            raise

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of its own, as it was stored.

        Raises:
            ValueError: there is none of the name.
        """
        dtype, shape, begin = self._entry(name)
        value = torch.empty(shape, dtype=dtype)
        if value.numel():
            self._fill(value.view(-1).view(torch.uint8).numpy().data, begin)
        return value

    def data(self, name: str) -> bytearray:
        """The bytes of an entry.

        Raises:
            ValueError: there is none of the name.
        """
        dtype, shape, begin = self._entry(name)
        buffer = bytearray(math.prod(shape) * dtype.itemsize)
        self._fill(memoryview(buffer), begin)
        return buffer

    def _entry(self, name: str) -> tuple[torch.dtype, list[int], int]:
        if name not in self._entries:
            raise ValueError(f"there is no tensor {name!r:.200}")
        return self._entries[name]

    def _fill(self, buffer: memoryview, begin: int) -> None:
        if fsio.read_into(self._descriptor, buffer, self._start + begin) != len(buffer):
            raise ValueError("the file ends early")

    def close(self) -> None:
        """Close the file."""
        fsio.close(self._descriptor)


def _read_header(descriptor: int) -> tuple[dict[str, tuple[torch.dtype, list[int], int]], int]:
    available = fsio.size(descriptor)
    prefix = bytearray(8)
    if fsio.read_into(descriptor, memoryview(prefix), 0) != 8:
        raise ValueError("it has no safetensors header")
    length = int.from_bytes(prefix, "little")
    if length > min(MAX_HEADER_BYTES, available - 8):
        raise ValueError(f"its header claims {length} bytes, the file has {available}")
    text = bytearray(length)
    fsio.read_into(descriptor, memoryview(text), 8)
    header = json.loads(text.decode())
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    end = available - 8 - length
    return {
        name: _checked(name, entry, end) for name, entry in header.items() if name != "__metadata__"
    }, 8 + length


def _checked(name: str, entry: Any, end: int) -> tuple[torch.dtype, list[int], int]:
    """The dtype, shape and offset of an entry, all within the file."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(stop)]}:
            pass
        case _:
            raise ValueError(f"the header's entry {name!r:.200} has not the safetensors form")
    if dtype not in _BY_NAME:
        raise ValueError(f"the header's entry {name!r:.200} has the unknown dtype {dtype!r:.50}")
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in shape):
        raise ValueError(f"the header's entry {name!r:.200} has the shape {shape!r:.200}")
    expected = math.prod(shape) * _BY_NAME[dtype].itemsize
    if not (0 <= begin <= stop <= end and stop - begin == expected):
        raise ValueError(
            f"the header's entry {name!r:.200} has bytes {begin} to {stop} of {end}, its shape "
            f"needs {expected}"
        )
    return _BY_NAME[dtype], shape, begin

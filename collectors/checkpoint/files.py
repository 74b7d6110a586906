"""The files of a checkpoint: tensors, a manifest with their hashes, and a lock."""

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from . import fsio

# What can go wrong with a checkpoint.


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file and what is wrong."""


class CheckpointWarning(RuntimeWarning):
    """Something is wrong with a checkpoint, and the run goes on without it."""


class NoCheckpoint(CheckpointError):
    """Nothing was saved where a checkpoint was looked for."""


# One writer at a time: a lock that ends with its process, whatever becomes of that.

LOCK: Final = ".lock"
# Record locks do not hold within a process, and end when it closes the file anywhere: it is opened
# once, by whoever enters its name here.
_held_here: set[tuple[int, str]] = set()


class WriterLock:
    """The right to write into a folder, once :meth:`acquire` got it."""

    # A record lock, because one of `flock` would live on in processes that were forked meanwhile.

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None
        self._name = (0, "")

    def acquire(self) -> None:
        """Get the lock, unless it is held already.

        Raises:
            CheckpointError: somebody else has it.
            OSError: the file system has no locks, or does not let us write.
        """
        if self._descriptor is not None and self._name[0] == os.getpid():
            return
        self._name = (os.getpid(), str(self._folder.resolve()))
        if self._name in _held_here:
            raise CheckpointError(
                f"{self._folder}: another CheckpointStore of this process saves here. Close it, or "
                "give this one a folder of its own."
            )
        descriptor = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            writer = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise CheckpointError(
                f"{self._folder}: another process saves here ({writer or 'unknown'}). Two runs "
                "can't share a folder: end the other one, or choose another folder."
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        self._descriptor = descriptor
        _held_here.add(self._name)

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held_here.discard(self._name)


# The safetensors format: eight bytes of length, a JSON header, the bytes of the tensors.
#
# Written and read here rather than by the library, because a checkpoint is hashed while it is
# written, read with bounds that come from the file itself, and stopped at every write by tests; any
# safetensors reader reads what is written.

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


# The list of a checkpoint's files, with the length and SHA-256 of each, and of itself.

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
_MAX_BYTES: Final = 1 << 26
# The file is JSON; its first line is the SHA-256 of what stands between these two.
_START: Final = b'{"sha256":"%s",\n"manifest":'
_END: Final = b"}\n"


def write_manifest(folder: Path, about: dict[str, Any], files: dict[str, Written]) -> None:
    """Write the manifest of a folder and sync it."""
    listed = {
        name: {"bytes": file.num_bytes, "sha256": file.sha256} for name, file in files.items()
    }
    body = json.dumps({"format": FORMAT, **about, "files": listed}, indent=1).encode()
    head = _START % hashlib.sha256(body).hexdigest().encode()
    write_file(folder / MANIFEST, [head, body, _END])


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, if it is whole.

    Raises:
        CheckpointError: it is missing, changed, or of another format.
    """
    path = folder / MANIFEST
    try:
        text = _read(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from error
    head = len(_START % (b"0" * 64))
    body = text[head : -len(_END)]
    if text != _START % hashlib.sha256(body).hexdigest().encode() + body + _END:
        raise CheckpointError(f"{path}: its SHA-256 is not that of what it says; it was changed.")
    try:
        manifest = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no JSON ({error}).") from error
    _check(path, manifest)
    return manifest


def _read(path: Path) -> bytes:
    descriptor = fsio.open_file(path)
    try:
        count = fsio.size(descriptor)
        if count > _MAX_BYTES:
            raise OSError(f"it has {count} bytes, a manifest at most {_MAX_BYTES}")
        buffer = bytearray(count)
        fsio.read_into(descriptor, memoryview(buffer), 0)
        return bytes(buffer)
    finally:
        fsio.close(descriptor)


def _check(path: Path, manifest: Any) -> None:
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise CheckpointError(
            f"{path}: has the format {found!r:.80}, this version reads {FORMAT}. Read it with the "
            "version that wrote it."
        )
    match manifest:
        case {"step": int(), "save": int(), "metric": None | float() | int(), "files": dict(files)}:
            good = all(
                isinstance(file, dict)
                and type(file.get("bytes")) is int
                and isinstance(file.get("sha256"), str)
                for file in files.values()
            )
        case _:
            good = False
    if not good:
        raise CheckpointError(f"{path}: lacks what a manifest has, or has it in another form.")


def check_lengths(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """What is wrong with the names and lengths of a folder's files; nothing is opened."""
    listed, found = manifest["files"], fsio.tree(folder)
    found.pop(MANIFEST, None)
    missing = [name.encode(errors="backslashreplace").decode() for name in set(listed) - set(found)]
    problems = [f"{folder}/{name:.500}: is missing" for name in sorted(missing)]
    for name, count in found.items():
        if count is None:
            problems.append(f"{folder / name}: is no regular file")
        elif name not in listed:
            problems.append(f"{folder / name}: is not in the manifest")
        elif count != listed[name]["bytes"]:
            problems.append(
                f"{folder / name}: has {count} bytes, the manifest says {listed[name]['bytes']}"
            )
    return problems


def verify(folder: Path, manifest: dict[str, Any], share: tuple[int, int] = (0, 1)) -> None:
    """Check every file of a folder against its manifest.

    Args:
        folder: of the checkpoint.
        manifest: of the folder.
        share: read only every so many-th file, from one on: ``(first, every)``.

    Raises:
        CheckpointError: naming each file that differs, and how.
    """
    try:
        problems = check_lengths(folder, manifest)
        named = {problem.split(": ")[0] for problem in problems}
        for name in list(fsio.tree(folder))[share[0] :: share[1]]:
            path = folder / name
            if name == MANIFEST or str(path) in named:
                continue
            if sha256(path) != manifest["files"][name]["sha256"]:
                problems.append(f"{path}: its SHA-256 is not that of the manifest; it was changed")
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error}).") from error
    if problems:
        raise CheckpointError("; ".join(problems) + ".")


def sha256(path: Path) -> str:
    """The digest of a file, in hexadecimal."""
    digest = hashlib.sha256()
    descriptor = fsio.open_file(path)
    try:
        for chunk in fsio.chunks(descriptor):
            digest.update(chunk)
    finally:
        fsio.close(descriptor)
    return digest.hexdigest()

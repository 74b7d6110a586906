"""The files of a checkpoint: tensors, the manifest with their hashes, the lock of the folder."""

import fcntl
import hashlib
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError, TensorSpec, serialize_file

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
        except BaseException as error:
            writer = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            if not isinstance(error, BlockingIOError | PermissionError):
                raise
            raise CheckpointError(
                f"{self._folder}: another process saves here ({writer or 'unknown'}). Two runs "
                "can't share a folder: end the other one, or choose another folder."
            ) from error
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


# Files and folders, synced: what a crash leaves of anything else is not known.


def make_folders(path: Path) -> None:
    """A folder and those above it, as far as they are missing."""
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir()
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)  # which a descriptor can't name
        raise
    finally:
        os.close(descriptor)


def open_file(path: Path) -> BufferedReader:
    """A regular file to be read; a link, pipe or device is refused."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"not a regular file: {path}")
    return os.fdopen(descriptor, "rb")


def tree(folder: Path) -> dict[str, int | None]:
    """Paths of all files below a folder, ``/`` between names, and their bytes.

    What is neither a regular file nor a folder (a link, a pipe) has ``None`` bytes.
    """
    found: dict[str, int | None] = {}
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            below = tree(Path(entry.path))
            found.update({f"{entry.name}/{name}": count for name, count in below.items()})
        else:
            status = entry.stat(follow_symlinks=False)
            found[entry.name] = status.st_size if stat.S_ISREG(status.st_mode) else None
    return found


def sha256(path: Path) -> str:
    """The digest of a file, in hexadecimal."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def synced(path: Path) -> dict[str, Any]:
    """A file as a manifest lists it, which is read-only and on the disk from now on."""
    with open_file(path) as file:
        descriptor = file.fileno()
        try:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) & ~0o222)
            os.fsync(descriptor)
        except OSError as error:
            error.filename = str(path)
            raise
        return {"bytes": os.fstat(descriptor).st_size, "sha256": digest}


# Tensors, as any safetensors reader reads them.

DTYPES: Final = {
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("bool", "complex64"),
}
"""Those of torch that the format has; all else is stored as bytes."""


class Entry(NamedTuple):
    """What is written under a name."""

    dtype: str
    """One of :data:`DTYPES`."""
    shape: tuple[int, ...]
    data: torch.Tensor
    """The bytes in C order in host memory, uint8 ``[N]``."""


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in C order, uint8 ``[N]``; its own memory where that is in order."""
    flat = value.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if len(flat) < 2:
        # Of one element the stride says nothing, and may be anything.
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def write_tensors(
    path: Path, entries: dict[str, Entry], metadata: dict[str, str] | None = None
) -> None:
    """Write a new safetensors file.

    Raises:
        CheckpointError: it could not be written.
    """
    specs = {
        name: TensorSpec(dtype=dtype, shape=shape, data_ptr=data.data_ptr(), data_len=len(data))
        for name, (dtype, shape, data) in entries.items()
    }
    try:
        serialize_file(specs, path, metadata=metadata)
    except SafetensorError as error:
        hint = " Store fewer rows, or stack them." if "header" in str(error) else ""
        raise CheckpointError(f"{path}: {error}.{hint}") from error
    # The library lets nobody else read what it makes; the folder's permissions say who may.
    path.chmod(stat.S_IMODE(path.parent.stat().st_mode) & 0o444)


# The list of a checkpoint's files, with the length and SHA-256 of each, and of itself.

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
_MAX_BYTES: Final = 1 << 26
# The file is JSON; its first line is the SHA-256 of what stands between these two.
_START: Final = b'{"sha256":"%s",\n"manifest":'
_END: Final = b"}\n"


def write_manifest(folder: Path, about: dict[str, Any], files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest of a folder and sync it; files are listed as :func:`synced` says them."""
    body = json.dumps({"format": FORMAT, **about, "files": files}, indent=1).encode()
    head = _START % hashlib.sha256(body).hexdigest().encode()
    (folder / MANIFEST).write_bytes(head + body + _END)
    synced(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, if it is whole.

    Raises:
        CheckpointError: it is missing, changed, or of another format.
    """
    path = folder / MANIFEST
    try:
        with open_file(path) as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise OSError(f"it has more than the {_MAX_BYTES} bytes of a manifest")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}).") from error
    body = text[len(_START % (b"0" * 64)) : -len(_END)]
    if text != _START % hashlib.sha256(body).hexdigest().encode() + body + _END:
        raise CheckpointError(f"{path}: its SHA-256 is not that of what it says; it was changed.")
    try:
        manifest = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no JSON ({error}).") from error
    found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
    if not isinstance(manifest, dict) or found != FORMAT:
        raise CheckpointError(
            f"{path}: has the format {found!r:.80}, this version reads {FORMAT}. Read it with the "
            "version that wrote it."
        )
    match manifest:
        case {"step": int(), "save": int(), "metric": None | float() | int(), "files": dict(files)}:
            listed = [
                isinstance(file, dict)
                and type(file.get("bytes")) is int
                and isinstance(file.get("sha256"), str)
                for file in files.values()
            ]
            if all(listed):
                return manifest
    raise CheckpointError(f"{path}: lacks what a manifest has, or has it in another form.")


def problems_of(
    folder: Path, manifest: dict[str, Any], share: tuple[int, int] | None = None
) -> list[str]:
    """What is wrong with the files of a folder, each of them named.

    Args:
        folder: of the checkpoint.
        manifest: of the folder.
        share: read every so many-th file, from one on, and compare its hash: ``(first, every)``;
            ``None`` compares names and lengths only, and opens nothing.
    """
    listed, found = manifest["files"], tree(folder)
    found.pop(MANIFEST, None)
    missing = [name.encode(errors="backslashreplace").decode() for name in set(listed) - set(found)]
    problems = [f"{folder}/{name:.500}: is missing" for name in sorted(missing)]
    read = set() if share is None else set(list(found)[share[0] :: share[1]])
    for name, count in found.items():
        path = folder / name
        if count is None:
            problems.append(f"{path}: is no regular file")
        elif name not in listed:
            problems.append(f"{path}: is not in the manifest")
        elif count != listed[name]["bytes"]:
            expected = listed[name]["bytes"]
            problems.append(f"{path}: has {count} bytes, the manifest says {expected}")
        elif name in read and sha256(path) != listed[name]["sha256"]:
            problems.append(f"{path}: its SHA-256 is not that of the manifest; it was changed")
    return problems

"""Files and folders, synced: what a crash leaves of anything else is not known."""

import hashlib
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any


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

"""Every call of the file system with which checkpoints are written and read.

They are few, and all in one place, so that tests can stop a writer at each of them, let one fail,
or lose what was not synced.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CHUNK = 1 << 22
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

Buffer = bytes | bytearray | memoryview


# What changes something ---------------------------------------------------------------------------


def make_folder(path: Path) -> None:
    """A new folder."""
    os.mkdir(path)


def make_folders(path: Path) -> None:
    """A folder and those above it, as far as they are missing."""
    if not path.is_dir():
        make_folders(path.parent)
        make_folder(path)
        sync_folder(path.parent)


def create(path: Path) -> int:
    """A new file that nobody may write to but through the descriptor returned."""
    return os.open(path, _NEW_FILE, 0o444)


def write(descriptor: int, data: Buffer) -> None:
    """Append all of the bytes."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:_CHUNK]) :]


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of what is done with a file's descriptor name the file, too."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def sync(descriptor: int) -> None:
    """Wait until the bytes of a file are on the disk."""
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with named(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_read_only(descriptor: int) -> None:
    """Take the permission to write from a file."""
    os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) & ~0o222)


def rename(old: Path, new: Path) -> None:
    """Give another name, at once or not at all."""
    os.rename(old, new)


def remove_file(path: Path) -> None:
    """Remove a file, or a link itself."""
    os.unlink(path)


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    os.rmdir(path)


def remove_tree(path: Path) -> None:
    """Remove a folder and all that is in it; links are not followed."""
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            remove_file(Path(entry.path))
    remove_folder(path)


# What only looks ----------------------------------------------------------------------------------


def close(descriptor: int) -> None:
    """Close a descriptor."""
    os.close(descriptor)


def open_file(path: Path) -> int:
    """A descriptor to read a regular file with; a link, pipe or device is refused."""
    descriptor = os.open(path, _READ)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"not a regular file: {path}")
    return descriptor


def size(descriptor: int) -> int:
    """Bytes of an open file."""
    return os.fstat(descriptor).st_size


def read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer with the bytes from an offset on; how many there were."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done : done + _CHUNK]], offset + done)
        if not count:
            break
        done += count
    return done


def chunks(descriptor: int) -> Iterator[memoryview]:
    """The bytes of an open file; each chunk is overwritten by the next."""
    buffer, offset = memoryview(bytearray(min(_CHUNK, size(descriptor) + 1))), 0
    while count := read_into(descriptor, buffer, offset):
        yield buffer[:count]
        offset += count


def names(folder: Path) -> list[str]:
    """The names in a folder, in order."""
    return sorted(os.listdir(folder))


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


def folders(folder: Path) -> list[Path]:
    """A folder and all folders below it, the deepest first."""
    below = [
        Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)
    ]
    return [path for child in below for path in folders(child)] + [folder]

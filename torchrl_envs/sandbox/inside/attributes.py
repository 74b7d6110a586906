"""Modes and times of a program's files, which its supervisor sets: Landlock restricts neither.

The supervisor reads from the program's memory what it asks for, once, and acts by its own copy. It
changes nothing but what is in the program's folder, where files of others can't be linked.
"""

import ctypes
import errno
import os

from . import kernel

_HERE, _NO_FOLLOW, _EMPTY_PATH = -100, 0x100, 0x1000
_MAX_PATH = 4096
_TIMES = 32
_PLACE_FLAGS = os.O_PATH | os.O_CLOEXEC
# Where each call has its folder, its path (none: a descriptor takes the folder's place), what it
# sets, and its flags.
_CALLS = {
    "chmod": (None, 0, 1, None),
    "fchmod": (0, None, 1, None),
    "fchmodat": (0, 1, 2, None),
    "fchmodat2": (0, 1, 2, 3),
    "utime": (None, 0, 1, None),
    "utimes": (None, 0, 1, None),
    "futimesat": (0, 1, 2, None),
    "utimensat": (0, 1, 2, 3),
}


def set_attribute(call, name, folder):
    """Set the mode or the times of a file in a folder; refuse those of others."""
    try:
        place = _opened(call, name)
        try:
            path = f"/proc/self/fd/{place}"
            where = os.readlink(path)
            if where != folder and not where.startswith(folder + "/"):
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            value = call.arguments[_CALLS[name][2]]
            if "chmod" in name:
                os.chmod(path, value & 0o7777)
            else:
                times = _times(call, name, value)
                kernel.call_libc("utimensat", _HERE, path.encode(), times, 0)
        finally:
            os.close(place)
    except OSError as error:
        call.fail(error.errno)
    else:
        call.give(0)


def _opened(call, name):
    """Open what a call names, without a right to read it."""
    folder_at, path_at, _, flags_at = _CALLS[name]
    flags = 0 if flags_at is None else call.arguments[flags_at]
    number = _HERE if folder_at is None else call.integer(folder_at)
    own = f"/proc/{call.task}/"
    above = own + ("cwd" if number == _HERE else f"fd/{number}")
    path = b"" if path_at is None else _text(call, call.arguments[path_at])
    if not path and (path_at is None or flags & _EMPTY_PATH or not call.arguments[path_at]):
        return os.open(above, _PLACE_FLAGS)
    if not path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    path = (
        path.replace(b"/proc/self/", own.encode(), 1) if path.startswith(b"/proc/self/") else path
    )
    no_follow = os.O_NOFOLLOW if flags & _NO_FOLLOW else 0
    if path.startswith(b"/"):
        return os.open(path, _PLACE_FLAGS | no_follow)
    start = os.open(above, _PLACE_FLAGS | os.O_DIRECTORY)
    try:
        return os.open(path, _PLACE_FLAGS | no_follow, dir_fd=start)
    finally:
        os.close(start)


def _times(call, name, address):
    """Two times as the kernel takes them, with nanoseconds; none for now."""
    if not address:
        return None
    size = _TIMES // 2 if name == "utime" else _TIMES
    data = call.memory(address, size)
    if len(data) < size:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
    numbers = memoryview(data).cast("q").tolist()
    if name == "utime":
        numbers = [numbers[0], 0, numbers[1], 0]
    elif name != "utimensat":
        numbers[1::2] = [1000 * part for part in numbers[1::2]]
    return (ctypes.c_long * 4)(*numbers)


def _text(call, address):
    data = call.memory(address, _MAX_PATH) if address else b""
    text, end, _ = data.partition(b"\0")
    if address and not end:
        number = errno.ENAMETOOLONG if len(data) == _MAX_PATH else errno.EFAULT
        raise OSError(number, os.strerror(number))
    return text

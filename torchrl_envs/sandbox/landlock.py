"""Isolation by Landlock, for machines and containers that allow no namespaces.

A program is one process there, so that nothing escapes when it is killed, and asks its supervisor
for each thread. What Landlock does not restrict (modes and times of files, signals and truncation
on older kernels) is denied by the filter of system calls.
"""

import contextlib
import ctypes
import errno
import functools
import os
import socket
import stat
import sys
import tempfile
import time
import warnings
from pathlib import PurePath
from typing import Any, Final

from .bubblewrap import DEVICES
from .errors import SandboxUnavailableError
from .inside import disk
from .interpreter import Interpreter
from .syscall_filter import (
    COMMON,
    MASKED_EQUAL,
    NOT_EQUAL,
    Rule,
    asking_filter,
    call_number,
    is_int,
    syscall_filter,
)
from .users import UNPRIVILEGED_USER, can_care_for_other_user

_VERSION: Final = 1
_PID_MARK: Final = 0x5EA1D0B7
"""Stands in the compiled filter for the program's own process number, which is not yet known."""
_O_TRUNC, _O_TMPFILE = os.O_TRUNC, 0o20000000
_THREAD_FLAGS: Final = (0x100, 0x200, 0x400, 0x800, 0x10000)
"""CLONE_VM, CLONE_FS, CLONE_FILES, CLONE_SIGHAND, CLONE_THREAD: all that threads share."""
_REMOVE_TRIES: Final = 20

# fmt: off
_DENIED: Final = (
    # What Landlock allows with files of this user that may be read: to watch them, and these.
    "inotify_init", "inotify_init1",
    "chown", "fchown", "lchown", "fchownat", "setxattr", "lsetxattr", "fsetxattr", "setxattrat",
    "removexattr", "lremovexattr", "fremovexattr", "removexattrat", "file_setattr",
    # Objects of System V, which others of this user have by number; sockets that wait for others.
    "bind", "listen", "accept", "accept4",
    "shmat", "shmctl", "semop", "semtimedop", "semctl", "msgsnd", "msgrcv", "msgctl",
    "statmount", "listmount",
    # Memory could be hidden in it from who counts it.
    "io_setup",
)
_DENIED_TO_CODE: Final = (
    # Other processes: to start one, to signal one of another number.
    "fork", "vfork", "execve", "execveat", "tkill", "pidfd_open", "pidfd_send_signal",
    "connect",
    # Files could be hidden in a message to itself from who counts them.
    "sendmsg", "sendmmsg",
)
MODES_AND_TIMES: Final = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "utime", "utimes", "utimensat", "futimesat",
)
"""Calls that change these of any file of this user, and that Landlock lets pass."""
_OF_ANY_PATH: Final = (
    "getxattr", "lgetxattr", "fgetxattr", "listxattr", "llistxattr", "flistxattr", "getxattrat",
    "listxattrat",
)
# fmt: on
_OWN_SIGNALS: Final = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
# F_SETOWN, F_SETSIG, F_SETOWN_EX: a signal to others; F_SETLEASE, F_NOTIFY: on files of others;
# F_SETPIPE_SZ: memory of all pipes of this user.
_FCNTL: Final = (8, 10, 15, 1024, 1026, 1031)
_IOCTL: Final = (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP
_NO_STREAMS: Final = (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_RDM, socket.SOCK_SEQPACKET)
_READS_OR_WRITES: Final = (0x40000000, 0x80000000, 0xC0000000)
"""Direction bits of an ioctl that a file system has for its files, for one."""
_NO_DEATH_SIGNAL, _NOT_DUMPABLE = 1, 4


@functools.cache
def landlock_version() -> int:
    """Version of Landlock that this kernel has.

    Raises:
        SandboxUnavailableError: it has none, or what this process runs in forbids it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    create_ruleset = call_number("landlock_create_ruleset")
    version = libc.syscall(create_ruleset, None, ctypes.c_size_t(0), _VERSION)
    if version > 0:
        return int(version)
    number, kernel = ctypes.get_errno(), f"Linux {os.uname().release}"
    causes = {
        errno.ENOSYS: f"{kernel} has no Landlock; it takes 5.13 or newer, built with it",
        errno.EOPNOTSUPP: f"{kernel} was started without Landlock (its option lsm= leaves it out)",
        errno.EPERM: "the container forbids the system calls landlock_*, as seccomp profiles did "
        "before 2022",
    }
    raise SandboxUnavailableError(causes.get(number, f"Landlock: {os.strerror(number)}"))


def reason_against_landlock() -> str | None:
    """Return why this kernel can't confine a process so, as far as one can see without trying."""
    if sys.platform != "linux":
        return f"works on Linux only, this is {sys.platform}"
    try:
        landlock_version()
        asking_filter("clone")
    except SandboxUnavailableError as error:
        return str(error)
    return None


def user_under_landlock(interpreter: Interpreter) -> int | None:
    """Return the user that a program becomes; none where this is no root, or only root reads it."""
    paths = (*interpreter.readable, interpreter.executable)
    if can_care_for_other_user() and _are_open_to_others((*paths, tempfile.gettempdir())):
        return UNPRIVILEGED_USER
    return None


@functools.cache
def _are_open_to_others(paths: tuple[str, ...]) -> bool:
    """Return, as far as modes say, whether users may read paths that they don't own."""
    for path in map(os.path.realpath, filter(os.path.exists, paths)):
        above = PurePath(path).parents
        folders = (path, *above) if os.path.isdir(path) else above
        can_pass = all(os.stat(folder).st_mode & stat.S_IXOTH for folder in folders)
        if not can_pass or not os.stat(path).st_mode & stat.S_IROTH:
            return False
    return True


@functools.cache
def landlock_filter(version: int, user: int | None) -> bytes:
    """Filter for one process, whose number is put into it when it is known.

    Args:
        version: Landlock's; what an older one does not restrict is denied here.
        user: whom the program becomes; a program that stays who started it could change the modes
            and times of their files.
    """
    rules = [*COMMON, *beside_landlock(version), *(Rule(name) for name in _DENIED_TO_CODE)]
    rules += [Rule("clone", ((0, MASKED_EQUAL, flag, 0),)) for flag in _THREAD_FLAGS]
    rules += [Rule(name, ((0, NOT_EQUAL, _PID_MARK, 0),)) for name in _OWN_SIGNALS]
    rules += [Rule("prctl", (is_int(0, _NO_DEATH_SIGNAL),))]
    if user is None:
        rules += [Rule(name) for name in MODES_AND_TIMES]
    return syscall_filter(tuple(rules))


def beside_landlock(version: int) -> list[Rule]:
    """What a version of Landlock lets pass, and no program needs."""
    rules = [Rule(name) for name in _DENIED]
    # Attributes of files that Landlock does not let it read; so `shutil` goes on without them.
    rules += [Rule(name, error=errno.ENOTSUP) for name in _OF_ANY_PATH]
    rules += [Rule("fcntl", (is_int(1, command),)) for command in _FCNTL]
    rules += [Rule("ioctl", (is_int(1, request),)) for request in _IOCTL]
    rules += [Rule("ioctl", ((1, MASKED_EQUAL, 0xC0000000, way),)) for way in _READS_OR_WRITES]
    # A datagram may be sent to whom one likes; pairs of streams lead nowhere else.
    rules += [Rule("socketpair", ((1, MASKED_EQUAL, 0xF, kind),)) for kind in _NO_STREAMS]
    rules += [Rule("prctl", (is_int(0, _NOT_DUMPABLE),))]
    # Space that is taken without being written would be gone before somebody looks.
    rules += [Rule("fallocate", error=errno.EOPNOTSUPP), Rule("openat2", error=errno.ENOSYS)]
    rules += _opens(_O_TMPFILE, 0, errno.EOPNOTSUPP)
    if version < 3:
        rules += [Rule("truncate"), *_opens(_O_TRUNC, os.O_RDONLY), *_opens(_O_TRUNC, 3)]
    return rules


def _opens(flag: int, access: int, error: int = errno.EPERM) -> list[Rule]:
    """Rules that deny to open a file with a flag and, where it matters, a way to access it."""
    mask = flag | (os.O_ACCMODE if flag == _O_TRUNC else 0)
    value = flag | access
    return [
        Rule(name, ((place, MASKED_EQUAL, mask, value),), error)
        for name, place in (("open", 1), ("openat", 2))
    ]


def landlock_config(user: int | None) -> dict[str, Any]:
    """Settings for a supervisor beside those of all isolations."""
    version = landlock_version()
    return {
        "landlock_version": version,
        "devices": [f"/dev/{name}" for name in DEVICES],
        "parent": os.getpid(),
        "syscall_filter": landlock_filter(version, user),
        "pid_mark": _PID_MARK.to_bytes(4, sys.byteorder),
        "asking_filter": asking_filter("clone"),
        "seccomp_number": call_number("seccomp"),
    }


def private_folder(user: int | None) -> str:
    """A new folder of a program's own, where this process makes its temporary files."""
    folder = os.path.realpath(tempfile.mkdtemp(prefix="sandbox-"))
    if user is not None:
        os.chown(folder, user, user)
    return folder


def remove_folder(folder: str) -> None:
    """Remove it with what is left in it; its program ends just now, where it has not yet."""
    for _ in range(_REMOVE_TRIES):
        with contextlib.suppress(OSError):
            disk.remove_tree(folder)
            return
        time.sleep(0.05)
    warnings.warn(
        f"Sandbox: {folder} could not be removed; what a program wrote is still there.",
        RuntimeWarning,
        stacklevel=2,
    )

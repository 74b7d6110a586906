"""Filter of system calls that a sandboxed program may not make, compiled by libseccomp."""

import ctypes
import errno
import functools
import os
import signal
import tempfile
from collections.abc import Sequence
from typing import Final, NamedTuple

from .errors import SandboxUnavailableError

_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_NOTIFY: Final = 0x7FC00000
NOT_EQUAL, MASKED_EQUAL = 1, 7
_INT: Final = 0xFFFFFFFF
"""What the kernel reads of an argument that is an int."""
_UNKNOWN_CALL: Final = -1
_AF_UNIX: Final = 1

# What reaches other processes, the kernel's objects that outlive a process or escape its memory
# limit, and all that makes or changes namespaces.
# fmt: off
_DENIED: Final = (
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp",
    "mount", "umount2", "pivot_root", "chroot", "fsopen", "fsconfig", "fsmount", "fspick",
    "move_mount", "open_tree",
    "mount_setattr", "unshare", "setns",
    "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter",
    "io_uring_register",
    "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self",
    "add_key", "keyctl", "request_key",
    "memfd_create", "memfd_secret", "shmget", "msgget", "semget", "mq_open",
    "vmsplice", "splice", "tee",
    "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot",
    "swapon", "swapoff", "syslog", "acct", "quotactl", "open_by_handle_at", "name_to_handle_at",
    "fanotify_init", "lookup_dcookie", "vhangup", "personality",
    "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname",
    "setpriority", "sched_setscheduler", "sched_setattr", "sched_setparam", "sched_setaffinity",
    "ioprio_set",
    "migrate_pages", "move_pages", "mbind", "set_mempolicy",
)
# fmt: on
# Newer than some libseccomp; such calls have one number on all architectures.
_NUMBERS: Final = {
    **{"landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446},
    **{"pidfd_send_signal": 424, "pidfd_open": 434, "openat2": 437, "process_madvise": 440},
    **{"mount_setattr": 442, "memfd_secret": 447, "fchmodat2": 452, "statmount": 457},
    **{"listmount": 458, "setxattrat": 463, "getxattrat": 464, "listxattrat": 465},
    **{"removexattrat": 466, "file_setattr": 469},
}
_NEW_NAMESPACE_FLAGS: Final = (1 << 17, *(1 << bit for bit in range(25, 31)))


def is_int(place: int, value: int) -> tuple[int, int, int, int]:
    """An argument that is an int has this value."""
    return place, MASKED_EQUAL, _INT, value


_DENIED_WITH: Final = (
    ("socketpair", (0, NOT_EQUAL, _AF_UNIX, 0)),
    # Limits of this process may be lowered, those of others not.
    ("prlimit64", (0, NOT_EQUAL, 0, 0)),
    *(("clone", (0, MASKED_EQUAL, flag, flag)) for flag in _NEW_NAMESPACE_FLAGS),
    *(("ioctl", is_int(1, request)) for request in (0x5412, 0x541C)),  # TIOCSTI, TIOCLINUX
    # It counts record locks of processes: F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW
    *(("fcntl", is_int(1, command)) for command in (36, 37, 38)),
    # What is stopped wakes itself with no signal: F_SETSIG, PR_SET_PDEATHSIG
    ("fcntl", is_int(1, 10), is_int(2, signal.SIGCONT)),
    ("prctl", is_int(0, 1), is_int(1, signal.SIGCONT)),
)


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


class Rule(NamedTuple):
    """An error for a system call, where its arguments compare so."""

    call: str
    arguments: tuple[tuple[int, int, int, int], ...] = ()
    error: int = errno.EPERM


EVERYWHERE: Final = (
    *(Rule(name) for name in _DENIED),
    *(Rule(name, tuple(comparisons)) for name, *comparisons in _DENIED_WITH),
    # The flags of clone3 are in memory, where a filter can't look; the C library then uses clone.
    Rule("clone3", error=errno.ENOSYS),
)
"""Rules of every sandbox, those of agents' programs too."""
COMMON: Final = (
    *EVERYWHERE,
    # No network at all: not even a socket.
    *(Rule("socket"), Rule("timer_create")),
    # The supervisor counts sockets, each with a buffer of the usual size: SO_SNDBUF, SO_SNDBUFFORCE
    *(Rule("setsockopt", (is_int(1, 1), is_int(2, option))) for option in (7, 32)),
)
"""Rules of every sandbox of code."""


@functools.cache
def syscall_filter(rules: tuple[Rule, ...] = COMMON) -> bytes:
    """The filter as a BPF program; what no rule names is allowed.

    Raises:
        SandboxUnavailableError: there is no libseccomp, or it is too old.
    """
    return _compiled([(rule.call, rule.arguments, _ERRNO | rule.error) for rule in rules])


@functools.cache
def asking_filter(*calls: str) -> bytes:
    """A filter that has some system calls wait for an answer."""
    return _compiled([(call, (), _NOTIFY) for call in calls])


def call_number(name: str) -> int:
    """Number of a system call on this machine."""
    return _NUMBERS.get(name) or int(_library().seccomp_syscall_resolve_name(name.encode()))


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise SandboxUnavailableError(
            "libseccomp.so.2 is missing, which filters system calls. Install it, on Debian and "
            "Ubuntu with `apt-get install libseccomp2`."
        ) from error
    library.seccomp_init.restype = ctypes.c_void_p
    return library


def _compiled(rules: Sequence[tuple[str, tuple[tuple[int, int, int, int], ...], int]]) -> bytes:
    library = _library()
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    try:
        for name, comparisons, action in rules:
            number = call_number(name)
            if number == _UNKNOWN_CALL:
                raise SandboxUnavailableError(
                    f"libseccomp does not know the system call {name!r}: install 2.5 or later."
                )
            count = len(comparisons)
            array = (_Comparison * max(1, count))(*comparisons)
            result = library.seccomp_rule_add_array(
                context, ctypes.c_uint32(action), number, count, array
            )
            if result != 0:
                message = f"libseccomp refuses the rule for {name!r}: {os.strerror(-result)}."
                raise SandboxUnavailableError(message)
        with tempfile.TemporaryFile() as file:
            result = library.seccomp_export_bpf(context, file.fileno())
            if result != 0:
                message = f"libseccomp can't compile the filter: {os.strerror(-result)}."
                raise SandboxUnavailableError(message)
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)

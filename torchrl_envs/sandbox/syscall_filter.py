"""Which system calls a sandboxed program may not make, compiled by libseccomp."""

import ctypes
import errno
import functools
import os
import tempfile
from typing import Final

from .errors import SandboxUnavailableError

_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_NOT_EQUAL, _MASKED_EQUAL = 1, 7
_INT: Final = 0xFFFFFFFF
"""What the kernel reads of an argument that is an int."""
_UNKNOWN_CALL: Final = -1
_AF_UNIX: Final = 1

# No network at all: not even a socket. What reaches other processes, the kernel's objects that
# outlive a process or escape its memory limit, and all that makes or changes namespaces.
# fmt: off
_DENIED: Final = (
    "socket",
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp",
    "mount", "umount2", "pivot_root", "chroot", "fsopen", "fsconfig", "fsmount", "fspick",
    "move_mount", "open_tree",
    "mount_setattr", "unshare", "setns",
    "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter",
    "io_uring_register",
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
_NUMBERS: Final = {"process_madvise": 440, "mount_setattr": 442, "memfd_secret": 447}
_NEW_NAMESPACE_FLAGS: Final = (1 << 17, *(1 << bit for bit in range(25, 31)))
_TERMINAL_REQUESTS: Final = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
_SOL_SOCKET: Final = 1
_BUFFER_SIZES: Final = (7, 32)  # SO_SNDBUF, SO_SNDBUFFORCE


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


@functools.cache
def syscall_filter() -> bytes:
    """The filter as a BPF program; what it denies fails with ``EPERM``."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise SandboxUnavailableError(
            "libseccomp.so.2 is missing, which filters system calls. Install it, on Debian and "
            "Ubuntu with `apt-get install libseccomp2`."
        ) from error
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    try:
        _add_rules(library, context)
        return _export(library, context)
    finally:
        library.seccomp_release(context)


def _add_rules(library: ctypes.CDLL, context: ctypes.c_void_p) -> None:
    def deny(name: str, *comparisons: tuple[int, int, int, int], error: int = errno.EPERM) -> None:
        number = _NUMBERS.get(name)
        if number is None:
            number = library.seccomp_syscall_resolve_name(name.encode())
        if number == _UNKNOWN_CALL:
            raise SandboxUnavailableError(
                f"libseccomp does not know the system call {name!r}: it is too old. Install "
                "version 2.5 or later."
            )
        array = (_Comparison * max(1, len(comparisons)))(*comparisons)
        result = library.seccomp_rule_add_array(
            context, ctypes.c_uint32(_ERRNO | error), number, len(comparisons), array
        )
        if result != 0:
            raise SandboxUnavailableError(
                f"libseccomp refuses the rule for {name!r}: {os.strerror(-result)}."
            )

    for name in _DENIED:
        deny(name)
    deny("socketpair", (0, _NOT_EQUAL, _AF_UNIX, 0))
    # Limits of this process may be lowered, those of others not.
    deny("prlimit64", (0, _NOT_EQUAL, 0, 0))
    for flag in _NEW_NAMESPACE_FLAGS:
        deny("clone", (0, _MASKED_EQUAL, flag, flag))
    # Its flags are in memory, where a filter can't look; the C library then uses clone.
    deny("clone3", error=errno.ENOSYS)
    for request in _TERMINAL_REQUESTS:
        deny("ioctl", (1, _MASKED_EQUAL, _INT, request))
    # The supervisor counts sockets, each with a buffer of the usual size.
    for option in _BUFFER_SIZES:
        deny(
            "setsockopt",
            (1, _MASKED_EQUAL, _INT, _SOL_SOCKET),
            (2, _MASKED_EQUAL, _INT, option),
        )


def _export(library: ctypes.CDLL, context: ctypes.c_void_p) -> bytes:
    with tempfile.TemporaryFile() as file:
        result = library.seccomp_export_bpf(context, file.fileno())
        if result != 0:
            raise SandboxUnavailableError(
                f"libseccomp can't compile the filter: {os.strerror(-result)}."
            )
        file.seek(0)
        return file.read()

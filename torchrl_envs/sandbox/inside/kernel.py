"""The system calls that the standard library lacks."""

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWUSER = 0x10000000

_MS_NOSUID, _MS_NODEV, _MS_BIND = 0x2, 0x4, 0x1000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION = 0x20080522
_SIGKILL = 9


def checked(name, *arguments):
    """Call a function of the C library; raise ``OSError`` where it fails."""
    result = getattr(_libc, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def unshare(flags):
    """Leave namespaces for new ones."""
    checked("unshare", ctypes.c_int(flags))


def prctl(option, value):
    """Change something about this process."""
    checked("prctl", option, *(ctypes.c_ulong(v) for v in (value, 0, 0, 0)))


def die_with_parent():
    """Be killed when the thread that started this process ends."""
    prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def forbid_new_privileges():
    """Gain nothing by starting a set-user-ID program, ever."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def set_dumpable(flag):
    """Whether processes of the same user may look into this one."""
    prctl(_PR_SET_DUMPABLE, int(flag))


def drop_capabilities():
    """Give up every capability."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    checked("capset", header, (ctypes.c_uint32 * 6)())


def mount_small_disk(path, num_bytes, num_files):
    """A file system in memory, of limited size."""
    options = f"size={num_bytes},nr_inodes={num_files},mode=1777"
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    checked("mount", b"tmpfs", path.encode(), b"tmpfs", flags, options.encode())


def mount_again(path, where):
    """Show a directory at another place too."""
    flags = ctypes.c_ulong(_MS_BIND)
    checked("mount", path.encode(), where.encode(), None, flags, None)


class _Program(ctypes.Structure):
    _fields_ = (("num_instructions", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def load_syscall_filter(program):
    """Apply a compiled seccomp filter to this process and all that it starts."""
    instructions = ctypes.create_string_buffer(program, len(program))
    filter_program = _Program(len(program) // 8, ctypes.addressof(instructions))
    checked(
        "prctl",
        _PR_SET_SECCOMP,
        ctypes.c_ulong(_SECCOMP_MODE_FILTER),
        ctypes.byref(filter_program),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
    )

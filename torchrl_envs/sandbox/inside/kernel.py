"""The system calls that the standard library lacks."""

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 0x1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
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


def system_call(number, *arguments):
    """Call a system call that the C library has no function for."""
    return checked("syscall", ctypes.c_long(number), *arguments)


def unshare(flags):
    """Leave namespaces for new ones."""
    checked("unshare", ctypes.c_int(flags))


def prctl(option, value):
    """Change something about this process."""
    checked("prctl", option, *(ctypes.c_ulong(v) for v in (value, 0, 0, 0)))


def die_with_parent():
    """Be killed when the thread that started this process ends."""
    prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def adopt_orphans():
    """Become the parent of descendants whose parents end."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


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


def mount_small_disk(path, num_bytes, num_files, mode="1777"):
    """A file system in memory, of limited size."""
    options = f"size={num_bytes},nr_inodes={num_files},mode={mode}"
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    checked("mount", b"tmpfs", path.encode(), b"tmpfs", flags, options.encode())


def mount_proc():
    """Show the processes of this process namespace in ``/proc``."""
    checked("mount", b"proc", b"/proc", b"proc", ctypes.c_ulong(_MS_NOSUID | _MS_NODEV), None)


def mount_again(path, where):
    """Show a directory at another place too."""
    flags = ctypes.c_ulong(_MS_BIND)
    checked("mount", path.encode(), where.encode(), None, flags, None)


def make_mounts_private():
    """Keep what is mounted from now on out of other mount namespaces."""
    checked("mount", None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None)


def make_mounts_read_only():
    """Forbid writing to every file system that is mounted now."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    system_call(
        _MOUNT_SETATTR,
        ctypes.c_int(_AT_FDCWD),
        b"/",
        ctypes.c_uint(_AT_RECURSIVE),
        attributes,
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )


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

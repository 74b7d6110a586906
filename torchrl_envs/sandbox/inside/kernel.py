"""The system calls that the standard library lacks, and how a process gives its rights up."""

import ctypes
import os
import signal

_libc = ctypes.CDLL(None, use_errno=True)

_CLONE_NEWUSER = 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_BIND = 0x2, 0x4, 0x1000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION = 0x20080522


def call_libc(name, *arguments):
    """Call a function of the C library; raise ``OSError`` where it fails."""
    result = getattr(_libc, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def prctl(option, value, pointer=None):
    """Change something about this process."""
    none = ctypes.c_ulong(0)
    call_libc("prctl", option, ctypes.c_ulong(value), pointer or none, none, none)


def set_dumpable(flag):
    """Let processes of the same user look into this one, or keep them out."""
    prctl(_PR_SET_DUMPABLE, int(flag))


def make_private_disk(config):
    """A small ``/tmp``, which is also ``/dev/shm``; what is readable below it shows through."""
    below = [path for path in config["readable"] if path.startswith("/tmp/")]
    places = {path: os.open(path, os.O_PATH) for path in below}
    options = f"size={config['disk_bytes']},nr_inodes={config['num_files']},mode=1777"
    flags = ctypes.c_ulong(_MS_NOSUID | _MS_NODEV)
    call_libc("mount", b"tmpfs", b"/tmp", b"tmpfs", flags, options.encode())
    for path, place in places.items():
        os.makedirs(path, exist_ok=True)
        shown = f"/proc/self/fd/{place}".encode()
        call_libc("mount", shown, path.encode(), None, ctypes.c_ulong(_MS_BIND), None)
        os.close(place)
    os.chdir("/tmp")


def give_up_rights(config):
    """Another user where this one is root, a user namespace of its own, no capabilities."""
    # The kernel does not limit the processes of its own root user, so being root in a user
    # namespace does not do.
    user = config["change_user_to"]
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        set_dumpable(True)  # else /proc/self/uid_map belongs to root
        # A namespace in which this user alone exists: processes are counted in it.
        call_libc("unshare", ctypes.c_int(_CLONE_NEWUSER))
        own = f"{user} {user} 1"
        for name, text in (("setgroups", "deny"), ("uid_map", own), ("gid_map", own)):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    drop_capabilities()
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # forgotten when the user changed


def drop_capabilities():
    """Hold no capability and gain none; no process of this user looks into this one."""
    no_capabilities = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    call_libc("capset", *no_capabilities)
    forbid_new_privileges()
    set_dumpable(False)


def end_with(parent):
    """Be killed as soon as the process that started this one has ended."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans():
    """Become the parent of what this process's children leave behind."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap(child):
    """The exit status of a child once it has one; orphans are buried."""
    ended = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        if pid == child:
            ended = os.waitstatus_to_exitcode(status)


def forbid_new_privileges():
    """Gain nothing by starting a set-user-ID program, ever."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


class _Program(ctypes.Structure):
    _fields_ = (("num_instructions", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def filter_program(compiled):
    """A compiled filter of system calls, as the kernel takes it."""
    instructions = ctypes.create_string_buffer(compiled, len(compiled))
    program = _Program(len(compiled) // 8, ctypes.addressof(instructions))
    program.kept = instructions
    return program


def load_syscall_filter(compiled):
    """Apply a compiled seccomp filter to this process and all that it starts."""
    prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_program(compiled)))

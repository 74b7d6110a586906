"""What confines a program.

Limits, users, namespaces, a filter of system calls, and a test that they hold.
"""

import ctypes
import errno
import functools
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path, PurePosixPath
from types import CodeType
from typing import Final, Literal, NamedTuple

# What can keep a sandbox from working.


class SandboxUnavailableError(RuntimeError):
    """This machine can't isolate untrusted code; the message says what is missing."""


class SandboxStartError(RuntimeError):
    """A sandbox did not start, though it did when it was constructed."""


class UnsandboxedCodeWarning(UserWarning):
    """Untrusted code runs with the rights of this process, because somebody opted out."""


# How much a sandboxed program may use.

_MIB: Final = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What one sandbox may use, all of its processes together unless said otherwise.

    Attributes:
        timeout_s: wall-clock time of one run; no process uses more CPU time than that either.
        memory_bytes: memory of all processes in sum; one process alone gets a ``MemoryError``.
        disk_bytes: size of the private ``/tmp``, which is held in memory.
        num_files: files and directories in it.
        num_processes: processes and threads at once.
        num_open_files: open files of one process.
        max_output_bytes: how much of standard output, and of standard error, is kept: the start
            and the end of what is longer.
        max_code_bytes: longer programs are refused.

    Raises:
        ValueError: a limit is too small to start an interpreter, or not a finite number.
    """

    timeout_s: float = 10.0
    memory_bytes: int = 512 * _MIB
    disk_bytes: int = 64 * _MIB
    num_files: int = 4096
    num_processes: int = 32
    num_open_files: int = 128
    max_output_bytes: int = 64 * 1024
    max_code_bytes: int = _MIB

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            wrong = f"must be positive and finite, got {self.timeout_s!r}"
            raise ValueError(f"SandboxLimits.timeout_s {wrong}.")
        smallest = {"memory_bytes": 64 * _MIB, "disk_bytes": 4096, "max_output_bytes": 256}
        smallest |= {"num_files": 16, "num_open_files": 16, "num_processes": 1, "max_code_bytes": 1}
        for name, least in smallest.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                wrong = f"must be an integer of at least {least}, got {value!r}"
                raise ValueError(f"SandboxLimits.{name} {wrong}.")


# What a run in the sandbox gave.

Isolation = Literal["bubblewrap", "none"]


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """Output and end of one run.

    Attributes:
        stdout: standard output, decoded as UTF-8 with replacement characters.
        stderr: standard error, likewise.
        exit_status: exit code; the negative number of the signal that killed it; ``None`` where
            the run was stopped at a limit.
        timed_out: the run was stopped at its deadline.
        out_of_memory: the run was stopped because its processes together used too much memory.
        truncated: output was longer than the cap and has a mark where it was cut.
        state_lost: the variables of a session are gone; the next run starts afresh.
        wall_s: duration, start of the sandbox included.
        isolation: how the run was isolated; ``"none"`` records that somebody opted out.
    """

    stdout: str
    stderr: str
    exit_status: int | None
    timed_out: bool = False
    out_of_memory: bool = False
    truncated: bool = False
    state_lost: bool = False
    wall_s: float = 0.0
    isolation: Isolation = "none"

    @property
    def succeeded(self) -> bool:
        """The program ended by itself with exit code 0."""
        return self.exit_status == 0


# Who runs inside: never the kernel's root, whose processes the kernel does not limit.

UNPRIVILEGED_USER: Final = 65534
"""``nobody``, the id that Linux itself uses for users without one."""


_CAP_SETGID: Final = 6
_CAP_SETUID: Final = 7
_CAP_SYS_ADMIN: Final = 21


def changes_user() -> bool:
    """Whether this process is root and becomes another user inside the sandbox."""
    return _can_be_other_user() and _has(_CAP_SYS_ADMIN)


def starts_as() -> int | None:
    """Whom a root that may not make namespaces, as in most containers, has to start it as."""
    return UNPRIVILEGED_USER if _can_be_other_user() and not _has(_CAP_SYS_ADMIN) else None


@functools.cache
def _can_be_other_user() -> bool:
    if os.geteuid() != 0 or not (_has(_CAP_SETUID) and _has(_CAP_SETGID)):
        return False
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= UNPRIVILEGED_USER < first + size for first, _, size in ranges)


@functools.cache
def _has(capability: int) -> bool:
    with open("/proc/self/status") as file:
        capabilities = next(line.split()[1] for line in file if line.startswith("CapEff:"))
    return bool(int(capabilities, 16) >> capability & 1)


# Which Python runs inside, and what of the file system it needs.

_PACKAGE = "inside"
_MODULES = ("kernel", "frames", "worker", "supervisor")
_RECEIVE = f"""
import marshal, os, sys, types
def read(size):
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            os._exit(0)
        data += part
    return data
modules = marshal.loads(read(int.from_bytes(read(4), "big")))
parent = sys.modules["{_PACKAGE}"] = types.ModuleType("{_PACKAGE}")
parent.__path__ = []
for name, code in modules.items():
    made = sys.modules["{_PACKAGE}." + name] = types.ModuleType("{_PACKAGE}." + name)
    made.__package__ = "{_PACKAGE}"
    exec(code, made.__dict__)
    setattr(parent, name, made)
parent.supervisor.main()
"""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_LOADER_CACHE = "/etc/ld.so.cache"
_FORBIDDEN = ("/", "/etc", "/home", "/root", "/var", "/proc", "/sys", "/dev", "/run", "/tmp")


@dataclass(frozen=True)
class Interpreter:
    """An interpreter and the directories that it reads, all without symbolic links.

    Attributes:
        executable: absolute path.
        prefix: the directory of its installation.
        packages: directories that are added to ``sys.path``.
    """

    executable: str
    prefix: str
    packages: tuple[str, ...] = ()

    @classmethod
    def current(cls, packages: Sequence[str | Path] = ()) -> "Interpreter":
        """The interpreter that this process runs, outside of its virtual environment."""
        # packages: directories to import from, such as a `site-packages`; everything in them can be
        # read inside.
        executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        found = tuple(_directory(path) for path in packages)
        return cls(executable, _directory(sys.base_prefix), found)

    @property
    def readable(self) -> tuple[str, ...]:
        """What has to be readable inside."""
        return (*_SYSTEM, _LOADER_CACHE, self.prefix, *self.packages)

    def command(self) -> list[str]:
        """Command line that runs what comes first on its standard input: :func:`program`."""
        return [self.executable, "-I", "-S", "-B", "-c", _RECEIVE]


def _directory(path: str | Path) -> str:
    real = os.path.realpath(path)
    if not os.path.isdir(real):
        raise ValueError(f"The sandbox can't offer {str(path)!r}: it is not a directory.")
    if real.startswith("/dev/"):
        raise ValueError(
            f"The sandbox can't offer {real!r}: there are other files in /dev inside. Put the "
            "packages somewhere else."
        )
    home = os.path.realpath(os.path.expanduser("~"))
    if real in _FORBIDDEN or home == real or home.startswith(real + os.sep):
        raise ValueError(
            f"The sandbox won't offer {real!r}: everything in it could be read inside. Name the "
            "directory of the packages themselves."
        )
    return real


@functools.cache
def program() -> dict[str, CodeType]:
    """The supervisor's modules, compiled by this interpreter, which is the one that runs inside."""
    # They are sent, so that no file of this project has to be readable, and compiled, because that
    # takes longer than all the rest.
    sources = files(str(__package__)) / _PACKAGE
    return {
        name: compile((sources / f"{name}.py").read_text("utf-8"), f"{_PACKAGE}.{name}", "exec")
        for name in _MODULES
    }


# The command line of bubblewrap: a file system of its own, and namespaces.

_DEVICES = ("null", "zero", "full", "random", "urandom")


def bubblewrap_command(interpreter: Interpreter) -> list[str]:
    """Everything before the interpreter's own command line; it dies with the thread that starts it.

    Args:
        interpreter: decides what is readable.
    """
    own = ["--as-pid-1"]
    if not changes_user():
        user = str(UNPRIVILEGED_USER)
        own += ["--unshare-user", "--uid", user, "--gid", user]
        own += ["--cap-add", "CAP_SYS_ADMIN"]  # to mount /tmp; given up after that
    own += ["--dir", "/dev"]
    for name in _DEVICES:
        own += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    own += ["--dir", "/tmp", "--symlink", "../tmp", "/dev/shm", "--chdir", "/"]
    return bubblewrap(interpreter.readable, own)


def bubblewrap(readable: Sequence[str], own: Iterable[str]) -> list[str]:
    """A file system of what is readable, in namespaces of its own.

    Args:
        readable: absolute paths; those that are not there are left out.
        own: further options, of what is mounted before them.
    """
    command = [shutil.which("bwrap") or "bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc"]
    command += ["--unshare-uts", "--hostname", "sandbox", "--unshare-cgroup-try", "--new-session"]
    command += ["--die-with-parent", *own]
    above = {str(parent) for path in readable for parent in PurePosixPath(path).parents}
    for path in sorted(above - {"/"}):  # each after its own parent
        command += ["--dir", path]  # else they are made unreadable for others
    for path in dict.fromkeys(readable):
        if any(str(parent) in readable for parent in PurePosixPath(path).parents):
            continue  # with that
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    return [*command, "--proc", "/proc", "--remount-ro", "/", "--"]


# Which system calls a sandboxed program may not make, compiled by libseccomp.

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
    "memfd_create", "memfd_secret", "shmget", "msgget", "semget", "mq_open", "timer_create",
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


def _is(place: int, value: int) -> tuple[int, int, int, int]:
    """An argument that is an int has this value."""
    return place, _MASKED_EQUAL, _INT, value


_DENIED_WITH: Final = (
    ("socketpair", (0, _NOT_EQUAL, _AF_UNIX, 0)),
    # Limits of this process may be lowered, those of others not.
    ("prlimit64", (0, _NOT_EQUAL, 0, 0)),
    *(("clone", (0, _MASKED_EQUAL, flag, flag)) for flag in _NEW_NAMESPACE_FLAGS),
    *(("ioctl", _is(1, request)) for request in (0x5412, 0x541C)),  # TIOCSTI, TIOCLINUX
    # The supervisor counts sockets, each with a buffer of the usual size: SO_SNDBUF, SO_SNDBUFFORCE
    *(("setsockopt", _is(1, 1), _is(2, option)) for option in (7, 32)),
    # It counts record locks of processes: F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW
    *(("fcntl", _is(1, command)) for command in (36, 37, 38)),
    # What is stopped wakes itself with no signal: F_SETSIG, PR_SET_PDEATHSIG
    ("fcntl", _is(1, 10), _is(2, signal.SIGCONT)),
    ("prctl", _is(0, 1), _is(1, signal.SIGCONT)),
)


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
    # The flags of clone3 are in memory, where a filter can't look; the C library then uses clone.
    rules = [(name, (), errno.EPERM) for name in _DENIED]
    rules += [(name, comparisons, errno.EPERM) for name, *comparisons in _DENIED_WITH]
    rules += [("clone3", (), errno.ENOSYS)]
    try:
        for name, comparisons, error in rules:
            number = _NUMBERS.get(name) or library.seccomp_syscall_resolve_name(name.encode())
            if number == _UNKNOWN_CALL:
                raise SandboxUnavailableError(
                    f"libseccomp does not know the system call {name!r}: install 2.5 or later."
                )
            count, action = len(comparisons), ctypes.c_uint32(_ERRNO | error)
            array = (_Comparison * max(1, count))(*comparisons)
            result = library.seccomp_rule_add_array(context, action, number, count, array)
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


# Programs that try what a sandbox must prevent; cheap enough to run at construction.

TRIAL_LIMITS: Final = SandboxLimits(num_processes=16, num_files=64, num_open_files=64)
"""The limits under which the checks run."""


class Check(NamedTuple):
    """One thing that must hold."""

    name: str
    enforced_by: str
    attempt: str
    """An expression that raises ``OSError`` or ``MemoryError`` where it holds."""


CHECKS: Final = (
    Check("no files of others", "own file system", "os.listdir('/home/.')"),
    Check("no password hashes", "own file system", "open('/etc/shadow')"),
    Check("the system is read-only", "read-only mounts", "open('/usr/probe', 'w')"),
    Check("no internet sockets", "system call filter", "socket(AF_INET, SOCK_STREAM)"),
    Check("no unix sockets", "system call filter", "socket(AF_UNIX, SOCK_STREAM)"),
    Check("no network devices", "network namespace", "network_devices()"),
    Check("other processes are not seen", "process namespace", "other_processes()"),
    Check("no signals to the supervisor", "process namespace", "survive(1)"),
    Check("no tracing of processes", "system call filter", "libc('ptrace', 16, 1, None, None)"),
    Check("no new namespaces", "system call filter", "libc('unshare', 0x10000000)"),
    Check("no mounts", "no capabilities", "libc('mount', b'x', b'/tmp', b'tmpfs', 0, None)"),
    Check("no other user", "no capabilities", "os.setuid(0)"),
    Check("processes are limited", "RLIMIT_NPROC in a user namespace", "fork_to_the_limit()"),
    Check("memory of a process is limited", "RLIMIT_AS", "bytearray(1 << 30)"),
    Check("the disk is limited", "size of the private /tmp", "fill('/tmp/disk', 80 << 20)"),
    Check("files are limited", "size of the private /tmp", "many_files()"),
    Check("open files are limited", "RLIMIT_NOFILE", "[os.dup(0) for _ in range(200)]"),
)

_PROGRAM: Final = """
import ctypes, os, signal
from _socket import AF_INET, AF_UNIX, SOCK_STREAM, socket

def libc(name, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)

def fork_to_the_limit():
    for _ in range(64):
        if os.fork() == 0:
            os.execv("/bin/sleep", ["sleep", "60"])

def network_devices():
    with open("/proc/net/dev") as file:
        devices = {line.split(":")[0].strip() for line in file if ":" in line}
    if devices <= {"lo"}:
        raise OSError

def other_processes():
    if os.getpid() < 10 and max(int(n) for n in os.listdir("/proc") if n.isdigit()) < 10:
        raise OSError

def survive(pid):
    os.kill(pid, signal.SIGKILL)
    raise OSError

def fill(path, num_bytes):
    for part in range(8):
        with open(f"{path}{part}", "wb") as file:
            file.truncate(0)
            os.posix_fallocate(file.fileno(), 0, num_bytes // 8)

def many_files():
    for n in range(100):
        open(f"/tmp/{n}", "w").close()

def fails(attempt):
    try:
        eval(attempt)
    except (OSError, MemoryError):
        return False
    return True

print("failed", [name for name, attempt in CHECKS if fails(attempt)])
"""


def failing_checks(run: Callable[[str], SandboxResult]) -> list[str]:
    """What does not hold in a sandbox."""
    attempts = [(check.name, check.attempt) for check in CHECKS]
    result = run(f"CHECKS = {attempts!r}\n{_PROGRAM}")
    failed = [check.name for check in CHECKS if repr(check.name) in result.stdout]
    if not result.succeeded or not result.stdout.startswith("failed ["):
        return [f"the checks could not be made: {result}"]
    return failed

"""Programs that try what a sandbox must prevent; cheap enough to run at construction."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from .limits import SandboxLimits
from .result import Isolation, SandboxResult

TRIAL_LIMITS: Final = SandboxLimits(
    disk_bytes=8 << 20, num_processes=16, num_files=64, num_open_files=64
)
"""The limits under which the checks run."""


class Check(NamedTuple):
    """A condition that must hold."""

    name: str
    enforced_by: str
    attempt: str
    """An expression that raises ``OSError`` or ``MemoryError`` where it holds."""


_FILTER: Final = "system call filter"
_COMMON: Final = (
    Check("no internet sockets", _FILTER, "socket(AF_INET, SOCK_STREAM)"),
    Check("no unix sockets", _FILTER, "socket(AF_UNIX, SOCK_STREAM)"),
    Check("no tracing of processes", _FILTER, "libc('ptrace', 16, 1, None, None)"),
    Check("no new namespaces", _FILTER, "libc('unshare', 0x10000000)"),
    Check("no mounts", "no capabilities", "libc('mount', b'x', b'/tmp', b'tmpfs', 0, None)"),
    Check("no other user", "no capabilities", "os.setuid(0 if os.getuid() else 1)"),
    Check("memory of a process is limited", "RLIMIT_AS", "bytearray(1 << 30)"),
    Check("open files are limited", "RLIMIT_NOFILE", "[os.dup(0) for _ in range(200)]"),
)
CHECKS: Final[Mapping[Isolation, tuple[Check, ...]]] = {
    "bubblewrap": (
        Check("no files of others", "own file system", "os.listdir('/home/.')"),
        Check("no password hashes", "own file system", "open('/etc/shadow')"),
        Check("the system is read-only", "read-only mounts", "open('/usr/probe', 'w')"),
        Check("no network devices", "network namespace", "network_devices()"),
        Check("other processes are not seen", "process namespace", "other_processes()"),
        Check("no signals to the supervisor", "process namespace", "survive(1)"),
        Check("processes are limited", "RLIMIT_NPROC in a user namespace", "fork_to_the_limit()"),
        Check("the disk is limited", "size of the private /tmp", "fill('/tmp/disk', 80 << 20)"),
        Check("files are limited", "size of the private /tmp", "many_files()"),
        *_COMMON,
    ),
    "landlock": (
        Check("no files of others", "Landlock", "os.listdir('/home/.')"),
        Check("no password file", "Landlock", "open('/etc/passwd')"),
        Check("no list of processes", "Landlock", "os.listdir('/proc')"),
        Check("no environment of others", "Landlock", "open(f'/proc/{os.getppid()}/environ')"),
        Check("the system is read-only", "Landlock", "open('/usr/probe', 'w')"),
        Check("nothing is written elsewhere", "Landlock", "open('/tmp/probe-of-a-sandbox', 'w')"),
        Check("nothing read is cut", "Landlock or filter", "os.truncate(os.__file__, size())"),
        Check("no times of files", "another user, or filter", "os.utime(os.__file__, times())"),
        Check("nobody is watched", _FILTER, "libc('inotify_init')"),
        Check("no signals to the supervisor", _FILTER, "os.kill(os.getppid(), 0)"),
        Check("no signals by a descriptor", _FILTER, "fcntl.fcntl(0, 8, os.getppid())"),
        Check("no processes", _FILTER, "os.fork() or os._exit(0)"),
        Check("no programs", _FILTER, "os.execv('/bin/true', ['true'])"),
        Check("threads are limited", "the supervisor, asked for each", "threads_to_the_limit()"),
        *_COMMON,
    ),
}
"""Checks of each way to isolate code."""

_PROGRAM: Final = """
import _thread, ctypes, fcntl, os, signal, time
from _socket import AF_INET, AF_UNIX, SOCK_DGRAM, SOCK_STREAM, socket

def libc(name, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)

def fork_to_the_limit():
    for _ in range(64):
        if os.fork() == 0:
            os.execv("/bin/sleep", ["sleep", "60"])

def threads_to_the_limit():
    try:
        for _ in range(64):
            _thread.start_new_thread(time.sleep, (60,))
    except RuntimeError as error:
        raise OSError(str(error))

def size():
    return os.stat(os.__file__).st_size

def mode():
    return os.stat(os.__file__).st_mode & 0o7777

def connection(name):
    link = socket(AF_INET, SOCK_STREAM)
    link.connect(("127.0.0.1", PORTS[name]))
    return link

def reached(name):
    try:
        connection(name)
    except OSError:
        return
    raise OSError

def times():
    status = os.stat(os.__file__)
    return status.st_atime, status.st_mtime

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

print("failed", [name for name, attempt in CHECKS if fails(attempt)], flush=True)
os._exit(0)  # threads sleep on, and no file can be opened any more
"""


_DELETED: Final = """
import os
held = [open(f"{os.environ['TMPDIR']}/{n}", "wb", buffering=0) for n in range(2)]
for file in held:
    os.unlink(file.name)
    file.write(bytes(6 << 20))
import time
time.sleep(5)
"""
LOOKED_AT: Final = Check("the disk is limited", "the supervisor, deleted files too", _DELETED)
"""A limit under Landlock, whose breach ends the program."""


def program_of(checks: Sequence[Check]) -> str:
    """Return a program that tries what must not work, and prints what does."""
    attempts = [(check.name, check.attempt) for check in checks]
    return f"CHECKS = {attempts!r}\n{_PROGRAM}"


def failed_of(checks: Sequence[Check], printed: str) -> list[str] | None:
    """Return the names of what does not hold; none where the program printed something else."""
    if not printed.startswith("failed ["):
        return None
    return [check.name for check in checks if repr(check.name) in printed]


def failing_checks(way: Isolation, run: Callable[[str], SandboxResult]) -> list[str]:
    """Return what does not hold in a sandbox."""
    result = run(program_of(CHECKS[way]))
    failed = failed_of(CHECKS[way], result.stdout)
    if not result.succeeded or failed is None:
        return [f"the checks could not be made: {result}"]
    if way == "landlock" and not run(LOOKED_AT.attempt).out_of_disk:
        failed.append(LOOKED_AT.name)
    return failed

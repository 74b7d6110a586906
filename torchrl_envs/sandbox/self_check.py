"""Programs that try what a sandbox must prevent; cheap enough to run at construction."""

from collections.abc import Callable
from typing import Final, NamedTuple

from .limits import SandboxLimits
from .result import SandboxResult

TRIAL_LIMITS: Final = SandboxLimits(num_processes=16, num_files=64, num_open_files=64)
"""The limits under which the checks run."""


class Check(NamedTuple):
    """A condition that must hold."""

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
    """Return what does not hold in a sandbox."""
    attempts = [(check.name, check.attempt) for check in CHECKS]
    result = run(f"CHECKS = {attempts!r}\n{_PROGRAM}")
    failed = [check.name for check in CHECKS if repr(check.name) in result.stdout]
    if not result.succeeded or not result.stdout.startswith("failed ["):
        return [f"the checks could not be made: {result}"]
    return failed

"""Agents' programs, which start others and ask one address: how each is watched and confined.

A program that runs in bubblewrap has namespaces, and is watched so that it does not take too much.
One under Landlock is confined by it, by a filter of system calls, and by the answers of its
supervisor to what neither can decide.
"""

import errno
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from .bubblewrap import DEVICES
from .inside import signals
from .inside.frames import framed_bytes
from .interpreter import PROGRAMS, Interpreter, inside_program
from .landlock import MODES_AND_TIMES, beside_landlock, landlock_version
from .limits import ProgramLimits
from .result import Isolation
from .syscall_filter import (
    EVERYWHERE,
    MASKED_EQUAL,
    Rule,
    asking_filter,
    call_number,
    syscall_filter,
)

_SCOPES: Final = 6
"""The version of Landlock that restricts signals."""
_SEES: Final = (
    *(f"/proc/{name}" for name in ("cpuinfo", "meminfo", "stat", "loadavg", "uptime", "version")),
    *("/proc/filesystems", "/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/osrelease"),
    *("/proc/sys/vm/max_map_count", "/proc/sys/kernel/random", "/sys/devices/system/cpu"),
)
"""What runtimes read of the machine: its processor and memory, and of no process."""
SYSTEM_SETTINGS: Final = (
    *("/etc/alternatives", "/etc/bash.bashrc", "/etc/gitconfig", "/etc/group", "/etc/host.conf"),
    *("/etc/hosts", "/etc/localtime", "/etc/mime.types", "/etc/nsswitch.conf", "/etc/os-release"),
    *("/etc/passwd", "/etc/protocols", "/etc/services", "/etc/ssl/certs", "/etc/ssl/openssl.cnf"),
)
"""Settings that many programs read as they begin, and end where they may not."""
_OPEN_FILES: Final = 4096
_FAST_OPEN: Final = 0x20000000
"""MSG_FASTOPEN, which connects a socket without a call that connects."""
_SENDS: Final = (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3))


@dataclass(frozen=True, kw_only=True)
class WatchedProgram:
    """A program that is watched, and confined under Landlock.

    Attributes:
        command: the program and its arguments; in bubblewrap with what confines it.
        isolation: the way.
        limits: what it may take.
        readable: under Landlock, absolute paths of what it can read and start.
        folder: under Landlock, the one folder in which it writes.
        where: under Landlock, the folder in which it begins.
        policy: under Landlock, host and port of what it may reach.
        port: under Landlock, where it finds that on 127.0.0.1.
    """

    command: Sequence[str]
    isolation: Isolation
    limits: ProgramLimits
    readable: Sequence[str] = ()
    folder: str = ""
    where: str = "/"
    policy: tuple[str, int] = ("127.0.0.1", 0)
    port: int = 0

    def start(self) -> tuple[list[str], bytes]:
        """Return a command, and what it has to read before the program's own input."""
        limits = self.limits
        resources = {"RLIMIT_CORE": 0, "RLIMIT_MSGQUEUE": 0, "RLIMIT_NOFILE": _OPEN_FILES}
        if self.isolation == "landlock":
            resources["RLIMIT_FSIZE"] = limits.disk_bytes
        config: dict[str, Any] = {
            "isolation": self.isolation,
            "command": list(self.command),
            "resource_limits": list(resources.items()),
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
            "num_files": limits.num_files,
            "num_processes": limits.num_processes,
        }
        if self.isolation == "landlock":
            version = landlock_version()
            calls = _asked_calls(version)
            config |= {
                "landlock_version": version,
                "readable": [*self.readable, *_SEES],
                "devices": [f"/dev/{name}" for name in DEVICES],
                "folder": self.folder,
                "where": self.where,
                "policy": self.policy,
                "port": self.port,
                "calls": {call_number(name): name for name in calls},
                "asking_filter": asking_filter(*calls),
                "seccomp_number": call_number("seccomp"),
                "syscall_filter": program_filter(version),
            }
        begin = framed_bytes(inside_program(PROGRAMS)) + framed_bytes(config)
        return Interpreter.current().command(), begin


def _asked_calls(version: int) -> tuple[str, ...]:
    """Return the calls that the supervisor answers."""
    asked = ("clone", "fork", "vfork", "socket", "connect", *MODES_AND_TIMES)
    return asked if version >= _SCOPES else (*asked, *signals.CALLS)


@functools.cache
def program_filter(version: int) -> bytes:
    """Filter for a program and all that it starts.

    Args:
        version: Landlock's; what an older one does not restrict is denied here.
    """
    rules = [*EVERYWHERE, *beside_landlock(version)]
    rules += [Rule(name, ((at, MASKED_EQUAL, _FAST_OPEN, _FAST_OPEN),)) for name, at in _SENDS]
    if version < _SCOPES:
        rules += [Rule("pidfd_send_signal", error=errno.ENOSYS)]
    return syscall_filter(tuple(rules))

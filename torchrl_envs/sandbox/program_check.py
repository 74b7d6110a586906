"""Trial of the way in which agents' programs are confined by Landlock, made once per process."""

import contextlib
import functools
import os
import socket
import subprocess
from typing import Final

from torchrl_envs.processes import kept_command

from .interpreter import Interpreter
from .landlock import (
    landlock_version,
    private_folder,
    reason_against_landlock,
    remove_folder,
    user_under_landlock,
)
from .limits import ProgramLimits
from .process import ENVIRONMENT
from .result import Isolation
from .sandbox import WAYS, reason_against_way
from .self_check import Check, failed_of, program_of
from .watched_program import WatchedProgram

_LIMITS: Final = ProgramLimits(memory_bytes=160 << 20, disk_bytes=8 << 20, num_processes=16)
_END_S: Final = 30.0
_FILTER, _ASKED, _LOOKS = "system call filter", "the supervisor, asked", "the supervisor, looking"
_TOO_MUCH: Final = "held = b'x' * (400 << 20)\nimport time\ntime.sleep(20)"
PROGRAM_CHECKS: Final = (
    Check("no files of others", "Landlock", "os.listdir('/home/.')"),
    Check("no password hashes", "Landlock", "open('/etc/shadow')"),
    Check("no list of processes", "Landlock", "os.listdir('/proc')"),
    Check("no environment of others", "Landlock", "open(f'/proc/{os.getppid()}/environ')"),
    Check("the system is read-only", "Landlock", "open('/usr/probe', 'w')"),
    Check("nothing is written elsewhere", "Landlock", "open('/tmp/probe-of-a-sandbox', 'w')"),
    Check("nothing read is cut", "Landlock or filter", "os.truncate(os.__file__, size())"),
    Check("no modes of files of others", _ASKED, "os.chmod(os.__file__, mode())"),
    Check("no times of files of others", _ASKED, "os.utime(os.__file__, times())"),
    Check("nobody is watched", _FILTER, "libc('inotify_init')"),
    Check("the policy is reached", _ASKED, "reached('policy')"),
    Check("no other address is", _ASKED, "connection('other')"),
    Check("no datagrams", _ASKED, "socket(AF_INET, SOCK_DGRAM)"),
    Check("no unix sockets", _ASKED, "socket(AF_UNIX, SOCK_STREAM)"),
    Check("no servers", _FILTER, "connection('policy').listen()"),
    Check("no signals to the supervisor", "Landlock, or asked", "os.kill(os.getppid(), 0)"),
    Check("no signals by a descriptor", _FILTER, "fcntl.fcntl(0, 8, os.getppid())"),
    Check("no tracing of processes", _FILTER, "libc('ptrace', 16, os.getppid(), None, None)"),
    Check("no new namespaces", _FILTER, "libc('unshare', 0x10000000)"),
    Check("no mounts", _FILTER, "libc('mount', b'x', b'/tmp', b'tmpfs', 0, None)"),
    Check("no other user", "no capabilities", "os.setuid(0 if os.getuid() else 1)"),
    Check("processes are limited", _ASKED, "fork_to_the_limit()"),
)
"""What must hold for an agent's program under Landlock."""
MEMORY: Final = Check("memory of all processes is limited", _LOOKS, _TOO_MUCH)
"""The same, whose breach ends the program."""


def reason_against_programs(way: Isolation, interpreter: Interpreter) -> str | None:
    """Return why agents' programs can't be confined so here, or ``None``; tried once per process.

    Args:
        way: the way.
        interpreter: decides what they can read.
    """
    if way == "bubblewrap":
        return reason_against_way(way, interpreter)
    reason = reason_against_landlock()
    if reason is None and (failed := failing_program_checks()):
        reason = f"these do not hold here: {', '.join(failed)}"
    return reason


def working_ways() -> tuple[Isolation | None, Isolation | None]:
    """Return how code is isolated on this machine, and how agents' programs are confined."""
    interpreter, found = Interpreter.current(), []
    for reason_against in (reason_against_way, reason_against_programs):
        working = (way for way in WAYS if reason_against(way, interpreter) is None)
        found.append(next(working, None))
    return found[0], found[1]


def failing_program_checks() -> list[str]:
    """Return what does not hold here for an agent's program under Landlock."""
    interpreter = Interpreter.current()
    return list(_failing(landlock_version(), user_under_landlock(interpreter)))


@functools.cache
def _failing(_: int, user: int | None) -> tuple[str, ...]:
    with (
        socket.create_server(("127.0.0.1", 0)) as policy,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        ports = {"policy": policy.getsockname()[1], "other": other.getsockname()[1]}
        done = _run(f"PORTS = {ports!r}\n{program_of(PROGRAM_CHECKS)}", ports["policy"], user)
    failed = None if done.returncode else failed_of(PROGRAM_CHECKS, done.stdout)
    if failed is None:
        return (f"the checks could not be made: {done.stdout}{done.stderr.strip()}",)
    done = _run(MEMORY.attempt, 0, user)
    return tuple(failed + ([] if "memory_bytes" in done.stderr else [MEMORY.name]))


def _run(code: str, port: int, user: int | None) -> "subprocess.CompletedProcess[str]":
    interpreter, folder = Interpreter.current(), private_folder(user)
    program = WatchedProgram(
        command=[interpreter.executable, "-I", "-S", "-c", code],
        isolation="landlock",
        limits=_LIMITS,
        readable=interpreter.readable,
        folder=folder,
        where=folder,
        policy=("127.0.0.1", port),
        port=port,
    )
    command, begin = program.start()
    with contextlib.ExitStack() as stack:
        stack.callback(remove_folder, folder)
        done = subprocess.run(
            kept_command(command, user=user),
            input=begin,
            capture_output=True,
            timeout=_END_S,
            env={**ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
            cwd=os.sep,
            check=False,
            start_new_session=True,
        )
    out, err = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)

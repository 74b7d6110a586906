"""Sandbox of an agent's program: the way in which it is confined, and what starts it so."""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult

from torchrl_envs.processes.worker_process import RELAY, kept_command, relayed_command
from torchrl_envs.sandbox import Isolation, ProgramLimits, SandboxUnavailableError
from torchrl_envs.sandbox.bubblewrap import bubblewrap
from torchrl_envs.sandbox.interpreter import Interpreter
from torchrl_envs.sandbox.landlock import (
    private_folder,
    remove_folder,
    user_under_landlock,
)
from torchrl_envs.sandbox.process import ENVIRONMENT
from torchrl_envs.sandbox.program_check import WAYS, reason_against_programs
from torchrl_envs.sandbox.users import starts_as
from torchrl_envs.sandbox.watched_program import SYSTEM_SETTINGS, WatchedProgram

_PROCESSES: Final = "/proc"


class WeakerSandboxWarning(UserWarning):
    """An agent's program is confined by Landlock, as bubblewrap does not work here."""


@dataclass(frozen=True, kw_only=True)
class PlacedProgram:
    """A program that can be started.

    Attributes:
        command: ends with this process, and leaves nothing behind.
        near: host and port at which the program finds the policy.
        variables: its environment variables, but for the policy's.
        begin: comes before the program's input.
    """

    command: list[str]
    near: str
    variables: dict[str, str]
    begin: bytes = b""


class AgentSandbox:
    """Confines programs that start others and reach the policy alone.

    Args:
        folder: where a program begins.
        shown: folders that it can read, besides that and this Python.
        isolation: ``"bubblewrap"`` or ``"landlock"``; the first that works when not given.
        limits: what a program may take.

    Raises:
        ValueError: there is no such way, or a folder can't be shown.
        SandboxUnavailableError: nothing confines programs here.
    """

    def __init__(
        self,
        folder: str,
        shown: Sequence[str],
        *,
        isolation: Isolation | None = None,
        limits: ProgramLimits | None = None,
    ) -> None:
        if isolation not in (None, *WAYS):
            raise ValueError(
                "AgentCommand: isolation must be one of 'bubblewrap', 'landlock' and None, got "
                f"{isolation!r}."
            )
        self.limits = ProgramLimits() if limits is None else limits
        self._folder = os.path.abspath(folder)
        paths = [os.path.abspath(path) for path in (sys.prefix, folder, *shown)]
        self._shows_processes = _PROCESSES in paths
        paths = [path for path in paths if path != _PROCESSES]
        self._interpreter = Interpreter.current(paths)
        own = self._interpreter.readable
        self._readable = (*own, *paths, str(RELAY), *SYSTEM_SETTINGS)
        reasons = {}
        for way in WAYS if isolation is None else (isolation,):
            reason = reason_against_programs(way, self._interpreter)
            if reason is None:
                self.isolation: Isolation = way
                break
            reasons[way] = reason
        else:
            told = "; ".join(f"{way}: {reason}" for way, reason in reasons.items())
            raise SandboxUnavailableError(
                f"AgentCommand: nothing confines an agent's program on this machine. {told}. "
                "`python -m torchrl_envs.sandbox` shows what works."
            )
        if reasons:
            warnings.warn(
                "AgentCommand: agents' programs run under Landlock, which enforces less than "
                f"bubblewrap (docs/sandbox.md); bubblewrap: {reasons['bubblewrap']}. Pass "
                "isolation='landlock' where that is meant.",
                WeakerSandboxWarning,
                stacklevel=3,
            )
        if self.isolation == "bubblewrap" and limits is not None and not _bounds_tmp():
            raise ValueError(
                "AgentCommand: this release of bubblewrap can't bound /tmp, as limits asks for. "
                "Install 0.7 or later, leave limits out, or pass isolation='landlock'."
            )

    @contextlib.contextmanager
    def place(self, command: Sequence[str], policy: SplitResult) -> Iterator[PlacedProgram]:
        """Place a program; what it writes is gone afterwards.

        Args:
            command: the program and its arguments.
            policy: where the policy is.
        """
        place = self._under_landlock if self.isolation == "landlock" else self._in_bubblewrap
        with place(list(command), policy) as placed:
            yield placed

    @contextlib.contextmanager
    def _in_bubblewrap(self, command: list[str], policy: SplitResult) -> Iterator[PlacedProgram]:
        user, near = starts_as(), f"127.0.0.1:{policy.port}"
        with tempfile.TemporaryDirectory() as door:
            if user is not None:
                os.chown(door, user, -1)
            own = ["--unshare-user-try", "--cap-drop", "ALL", "--dev", "/dev"]
            own += ["--size", str(self.limits.disk_bytes)] if _bounds_tmp() else []
            own += ["--tmpfs", "/tmp", "--ro-bind", door, door, "--chdir", self._folder]
            command = relayed_command(near, f"{door}/policy", command)
            command = bubblewrap(self._readable, own) + command
            far = f"{policy.hostname}:{policy.port}"
            command = relayed_command(f"{door}/policy", far, command)
            program = WatchedProgram(command=command, isolation="bubblewrap", limits=self.limits)
            command, begin = program.start()
            yield PlacedProgram(
                command=kept_command(command, user=user),
                near=near,
                variables=_variables("/tmp"),
                begin=begin,
            )

    @contextlib.contextmanager
    def _under_landlock(self, command: list[str], policy: SplitResult) -> Iterator[PlacedProgram]:
        user, port = user_under_landlock(self._interpreter), policy.port or 80
        folder = private_folder(user)
        try:
            program = WatchedProgram(
                command=command,
                isolation="landlock",
                limits=self.limits,
                readable=[*self._readable, *([_PROCESSES] if self._shows_processes else [])],
                folder=folder,
                where=self._folder,
                policy=(policy.hostname or "127.0.0.1", port),
                port=port,
            )
            command, begin = program.start()
            yield PlacedProgram(
                command=kept_command(command, user=user, folder=folder),
                near=f"127.0.0.1:{port}",
                variables=_variables(folder),
                begin=begin,
            )
        finally:
            remove_folder(folder)


def _variables(folder: str) -> dict[str, str]:
    path = f"{sys.prefix}/bin:{os.environ.get('PATH', '')}"
    return {**ENVIRONMENT, "PATH": path, "HOME": folder, "TMPDIR": folder}


@functools.cache
def _bounds_tmp() -> bool:
    """Return whether this bubblewrap can bound a file system in memory."""
    words = [shutil.which("bwrap") or "bwrap", "--help"]
    told = subprocess.run(words, capture_output=True, text=True, check=False)
    return "--size " in told.stdout + told.stderr

"""Sandbox that runs untrusted Python code."""

import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from torchrl_data import page

from .bubblewrap import bubblewrap_command
from .errors import SandboxStartError, SandboxUnavailableError, UnsandboxedCodeWarning
from .interpreter import Interpreter
from .landlock import (
    landlock_config,
    private_folder,
    reason_against_landlock,
    user_under_landlock,
)
from .limits import SandboxLimits
from .process import SandboxProcess
from .result import Isolation, SandboxResult
from .self_check import TRIAL_LIMITS, failing_checks
from .syscall_filter import syscall_filter
from .users import UNPRIVILEGED_USER, changes_user, starts_as

WAYS: Final[tuple[Isolation, ...]] = ("bubblewrap", "landlock")
"""Ways to isolate code, the strictest first."""
_IN_CONTAINERS: Final = {
    "bubblewrap": "user namespaces (a seccomp profile that allows unshare and mount)",
    "landlock": "Landlock (Linux 5.13, and a seccomp profile that allows landlock_*)",
}
_SOCKET_BUFFER_BYTES: Final = 212_992
"""Size of a socket's buffer in Linux, where a container does not show the setting."""
_verified: dict[tuple[Isolation, Interpreter], str | None] = {}
_verifying = threading.Lock()


class Sandbox:
    r"""Python code with no network, no files but its own, and bounded means.

    The code sees an interpreter with the standard library and a private folder, its ``TMPDIR``;
    nothing of this process's environment, files, network or other processes. Isolation is
    bubblewrap (namespaces) where it works, with a system call filter, resource limits and a
    supervisor that bounds memory in sum; else Landlock, which containers allow, with a stricter
    filter: a program is one process there, without ``fork`` and other programs. Whether it works
    is tried at construction, once per process; ``sandbox.isolation`` says which it is.

    A sandbox holds nothing between runs, may be used by many threads at once, and needs no
    ``close``.

    Args:
        limits: what a run may use.
        packages: directories that programs may import from, ``site-packages`` for example; all in
            them is readable inside.
        isolation: ``"bubblewrap"`` or ``"landlock"``; the first of them that works when not given.
            ``"none"`` runs code with the rights of this process, and needs ``allow_unsandboxed``.
        allow_unsandboxed: run code with the rights of this process where nothing isolates it. There
            is a warning, and each result says ``isolation="none"``.

    Raises:
        SandboxUnavailableError: nothing isolates code here, and ``allow_unsandboxed`` is not set;
            the message says what is missing and how to get it.
        ValueError: a setting is wrong.

    Example:
        >>> Sandbox().run("print(6 * 7)").stdout
        '42\n'
    """

    def __init__(
        self,
        *,
        limits: SandboxLimits | None = None,
        packages: Sequence[str | Path] = (),
        isolation: Isolation | None = None,
        allow_unsandboxed: bool = False,
    ) -> None:
        if isolation not in (None, "none", *WAYS):
            choices = "must be one of 'bubblewrap', 'landlock', 'none' and None"
            raise ValueError(f"Sandbox: isolation {choices}, got {isolation!r}.")
        if isolation == "none" and not allow_unsandboxed:
            raise ValueError(
                "Sandbox: isolation='none' runs untrusted code with the rights of this process. "
                "Pass allow_unsandboxed=True as well if that is meant."
            )
        self.limits = SandboxLimits() if limits is None else limits
        self.interpreter = Interpreter.current(packages)
        ways = WAYS if isolation is None else () if isolation == "none" else (isolation,)
        reasons = []
        self.isolation: Isolation = "none"
        for way in ways:
            reason = reason_against_way(way, self.interpreter)
            if reason is None:
                self.isolation = way
                return
            reasons.append(f"{way}: {reason}")
        missing = "; ".join(reasons) or "isolation='none' was asked for"
        if not allow_unsandboxed:
            raise SandboxUnavailableError(
                f"Nothing isolates untrusted code on this machine. {missing}. Containers need "
                f"{' or '.join(_IN_CONTAINERS[way] for way in ways)}. "
                "`python -m torchrl_envs.sandbox` shows what works. To run code with the rights of "
                "this process all the same, pass allow_unsandboxed=True; results then say so."
            )
        warnings.warn(
            f"Untrusted code runs with the rights of this process ({missing}).",
            UnsandboxedCodeWarning,
            stacklevel=2,
        )

    def run(self, code: str, *, timeout_s: float | None = None) -> SandboxResult:
        """Run a program in a fresh sandbox and wait for its end.

        Args:
            code: a Python program; its standard input is empty.
            timeout_s: deadline, in seconds; that of the limits by default.

        Returns:
            Its output and how it ended; a program that fails, floods or hangs raises nothing here.

        Raises:
            ValueError: the program is longer than the limits allow.
            SandboxStartError: the sandbox did not start.
        """
        timeout_s = self.limits.timeout_s if timeout_s is None else timeout_s
        request = self.request(code, timeout_s)
        started = time.monotonic()
        process = self.start(persistent=False, timeout_s=timeout_s)
        try:
            process.send(request)
            process.await_start()
            report = process.next_report(timeout_s=timeout_s)
        finally:
            process.kill()
        return self.result(process, report, started=started)

    # For sessions -------------------------------------------------------------------------------

    def request(self, code: str, timeout_s: float) -> dict[str, Any]:
        """A program as the supervisor takes it.

        Raises:
            ValueError: it is too long.
        """
        code = code.encode("utf-8", errors="replace").decode("utf-8")  # no lone surrogates
        if len(code) > self.limits.max_code_bytes:
            raise ValueError(
                f"The program has {len(code)} characters, above {self.limits.max_code_bytes}."
            )
        return {"code": code, "timeout_s": timeout_s}

    def start(self, *, persistent: bool, timeout_s: float | None = None) -> SandboxProcess:
        """Start an interpreter that waits for a program.

        Raises:
            SandboxStartError: its command can't be run.
        """
        under_landlock = self.isolation == "landlock"
        command, folder = self.interpreter.command(), ""
        if self.isolation == "bubblewrap":
            command = [*bubblewrap_command(self.interpreter), *command]
        config = self._config(persistent, timeout_s)
        user = user_under_landlock(self.interpreter) if under_landlock else starts_as()
        try:
            if under_landlock:
                config |= landlock_config(user)
                folder = config["folder"] = private_folder(user)
            return SandboxProcess(
                command,
                config,
                max_output_bytes=self.limits.max_output_bytes,
                # A session outlives the thread that starts it; under Landlock all runs do.
                needs_keeper=self.isolation == "none"
                or (persistent and self.isolation == "bubblewrap"),
                user=user,
                folder=folder,
            )
        except OSError as error:
            user = os.geteuid() if user is None else user
            raise SandboxStartError(f"it can't be started as user {user}: {error}") from error

    def _config(self, persistent: bool, timeout_s: float | None) -> dict[str, Any]:
        """Settings for a supervisor, of all isolations."""
        limits = self.limits
        resources = {
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_NPROC": limits.num_processes + 1,  # the supervisor counts
            "RLIMIT_NOFILE": limits.num_open_files,
            "RLIMIT_FSIZE": limits.disk_bytes,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_SIGPENDING": 64,
        }
        if timeout_s is not None:
            resources["RLIMIT_CPU"] = int(timeout_s) + 1
        if self.isolation != "bubblewrap":
            del resources["RLIMIT_NPROC"]  # would count all processes of this user
        return {
            "isolation": self.isolation,
            "persistent": persistent,
            "change_user_to": UNPRIVILEGED_USER if changes_user() else None,
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
            "num_files": limits.num_files,
            "num_processes": limits.num_processes,
            "resource_limits": list(resources.items()),
            "syscall_filter": syscall_filter() if self.isolation == "bubblewrap" else b"",
            "packages": list(self.interpreter.packages),
            "readable": list(self.interpreter.readable),
            "socket_bytes": _socket_bytes(),
        }

    def result(
        self, process: SandboxProcess, report: str, *, started: float, state_lost: bool = False
    ) -> SandboxResult:
        """Return what a process gave, and how its supervisor said that it ended."""
        kind, _, value = report.partition(" ")
        errors = process.stderr.text()
        if kind == "error":
            errors += f"The sandbox broke: {value}\n"
        return SandboxResult(
            stdout=process.stdout.text(),
            stderr=errors,
            exit_status=int(value) if kind in ("exit", "done") else None,
            timed_out=kind == "timeout",
            out_of_memory=kind == "memory",
            out_of_disk=kind == "disk",
            truncated=process.stdout.truncated or process.stderr.truncated,
            state_lost=state_lost,
            wall_s=time.monotonic() - started,
            isolation=self.isolation,
        )

    @staticmethod
    def reasons_against() -> dict[Isolation, str | None]:
        """For each way to isolate code why it does not work here, or ``None`` where it does."""
        return {way: reason_against_way(way, Interpreter.current()) for way in WAYS}


def reason_against_way(way: Isolation, interpreter: Interpreter) -> str | None:
    """Return why code can't be isolated so here, or ``None``; tried once per process."""
    with _verifying:
        if (way, interpreter) not in _verified:
            missing = _without_bubblewrap() if way == "bubblewrap" else reason_against_landlock()
            _verified[way, interpreter] = missing or _tried(way, interpreter)
        return _verified[way, interpreter]


def _without_bubblewrap() -> str | None:
    if sys.platform != "linux":
        return f"works on Linux only, this is {sys.platform}"
    if shutil.which("bwrap") is None:
        return (
            "bubblewrap (the command `bwrap`) is not installed: on Debian and Ubuntu "
            "`apt-get install bubblewrap`, on Fedora `dnf install bubblewrap`; see "
            f"{page('docs/sandbox.md')}"
        )
    return None


def _tried(way: Isolation, interpreter: Interpreter) -> str | None:
    trial = Sandbox.__new__(Sandbox)
    trial.isolation, trial.interpreter, trial.limits = way, interpreter, TRIAL_LIMITS
    try:
        failed = failing_checks(way, trial.run)
    except (SandboxStartError, SandboxUnavailableError) as error:
        return str(error)
    return f"these do not hold here: {', '.join(failed)}" if failed else None


def _socket_bytes() -> int:
    """Return what a socket's full buffer takes at most."""
    try:
        with open("/proc/sys/net/core/wmem_default") as file:
            return 2 * int(file.read())
    except FileNotFoundError:
        return 2 * _SOCKET_BUFFER_BYTES

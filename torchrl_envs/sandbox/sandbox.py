"""Runs untrusted Python code."""

import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from .bubblewrap import bubblewrap_command, bubblewrap_missing
from .errors import SandboxStartError, SandboxUnavailableError, UnsandboxedCodeWarning
from .interpreter import Interpreter
from .limits import SandboxLimits
from .process import SandboxProcess
from .result import Isolation, SandboxResult
from .self_check import TRIAL_LIMITS, failing_checks
from .syscall_filter import syscall_filter
from .users import UNPRIVILEGED_USER, changes_user, user_name

_CHOICES: Final[tuple[Isolation, ...]] = ("bubblewrap",)
_START_S: Final = 20.0
_verified: dict[tuple[Isolation, Interpreter], str | None] = {}
_verifying = threading.Lock()


class Sandbox:
    r"""Python code with no network, no files but its own, and bounded means.

    The code sees an interpreter with the standard library and a private ``/tmp``; nothing of this
    process's environment, files, network or other processes. Isolation is bubblewrap with a system
    call filter, resource limits and a supervisor that bounds memory in sum. Whether it works is
    tried at construction, once per process.

    A sandbox holds nothing between runs, may be used by many threads at once, and needs no
    ``close``.

    Args:
        limits: what a run may use.
        packages: directories that programs may import from, ``site-packages`` for example; all in
            them is readable inside.
        isolation: ``"bubblewrap"``, which is the default. ``"none"`` runs code with the rights of
            this process, and needs ``allow_unsandboxed``.
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
        if isolation not in (None, "none", *_CHOICES):
            raise ValueError(
                f"Sandbox: isolation must be one of {_CHOICES}, 'none' or None, got {isolation!r}."
            )
        if isolation == "none" and not allow_unsandboxed:
            raise ValueError(
                "Sandbox: isolation='none' runs untrusted code with the rights of this process. "
                "Pass allow_unsandboxed=True as well if that is meant."
            )
        self.limits = SandboxLimits() if limits is None else limits
        self.interpreter = Interpreter.current(packages)
        self.isolation: Isolation = self._choose(isolation, allow_unsandboxed)

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
            await_start(process)
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
                f"The program has {len(code)} characters; at most {self.limits.max_code_bytes} "
                "are run."
            )
        return {"code": code, "timeout_s": timeout_s}

    def start(self, *, persistent: bool, timeout_s: float | None = None) -> SandboxProcess:
        """Start an interpreter that waits for a program.

        Raises:
            SandboxStartError: its command can't be run.
        """
        command = self.interpreter.command()
        if self.isolation == "bubblewrap":
            command = [*bubblewrap_command(self.interpreter), *command]
        # A session outlives the thread that starts it.
        needs_keeper = persistent or self.isolation == "none"
        config = self._config(persistent, timeout_s)
        try:
            return SandboxProcess(
                command,
                config,
                max_output_bytes=self.limits.max_output_bytes,
                needs_keeper=needs_keeper,
            )
        except OSError as error:
            raise SandboxStartError(f"it can't be started as {user_name()}: {error}") from error

    def result(
        self,
        process: SandboxProcess,
        report: str,
        *,
        started: float,
        state_lost: bool = False,
    ) -> SandboxResult:
        """What a process gave, and how its supervisor said that it ended."""
        kind, _, value = report.partition(" ")
        return SandboxResult(
            stdout=process.stdout.text(),
            stderr=process.stderr.text(),
            exit_status=int(value) if kind in ("exit", "done") else None,
            timed_out=kind == "timeout",
            out_of_memory=kind == "memory",
            truncated=process.stdout.truncated or process.stderr.truncated,
            state_lost=state_lost,
            wall_s=time.monotonic() - started,
            isolation=self.isolation,
        )

    @staticmethod
    def reasons_against() -> dict[Isolation, str | None]:
        """For each way to isolate code why it does not work here, or ``None`` where it does."""
        interpreter = Interpreter.current()
        return {choice: _reason_against(choice, interpreter) for choice in _CHOICES}

    # Construction -------------------------------------------------------------------------------

    def _choose(self, isolation: Isolation | None, allow_unsandboxed: bool) -> Isolation:
        reasons = ["isolation='none' was asked for"] if isolation == "none" else []
        for choice in _CHOICES:
            if isolation not in (None, choice):
                continue
            reason = _reason_against(choice, self.interpreter)
            if reason is None:
                return choice
            reasons.append(f"{choice}: {reason}")
        missing = "; ".join(reasons)
        if allow_unsandboxed:
            warnings.warn(
                f"Untrusted code runs with the rights of this process ({missing}).",
                UnsandboxedCodeWarning,
                stacklevel=3,
            )
            return "none"
        raise SandboxUnavailableError(
            f"Nothing isolates untrusted code on this machine. {missing}. Containers need user "
            "namespaces (a seccomp profile that allows unshare and mount). "
            "`python -m torchrl_envs.sandbox` shows what works. To run code with the rights of "
            "this process all the same, pass allow_unsandboxed=True; results then say so."
        )

    def _config(self, persistent: bool, timeout_s: float | None) -> dict[str, Any]:
        limits = self.limits
        resources = {
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_NPROC": limits.num_processes + 1,  # the supervisor counts
            "RLIMIT_NOFILE": limits.num_open_files,
            "RLIMIT_FSIZE": limits.disk_bytes,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        }
        if timeout_s is not None:
            resources["RLIMIT_CPU"] = int(timeout_s) + 1
        if self.isolation == "none":
            del resources["RLIMIT_NPROC"]  # would count all processes of this user
        return {
            "isolation": self.isolation,
            "persistent": persistent,
            "change_user_to": UNPRIVILEGED_USER if changes_user() else None,
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
            "num_files": limits.num_files,
            "resource_limits": list(resources.items()),
            "syscall_filter": b"" if self.isolation == "none" else syscall_filter(),
            "packages": list(self.interpreter.packages),
            "readable": list(self.interpreter.readable),
            "socket_bytes": _socket_bytes(),
        }


def await_start(process: SandboxProcess) -> None:
    """Wait until the supervisor has started a worker."""
    report = process.next_report(timeout_s=_START_S)
    if report != "ready":
        output = process.stderr.text().strip()
        raise SandboxStartError(f"it does not start ({report}). {output}".rstrip())


def _reason_against(choice: Isolation, interpreter: Interpreter) -> str | None:
    """Why a way to isolate code does not work here, or ``None``; tried once per process."""
    key = (choice, interpreter)
    with _verifying:
        if key not in _verified:
            _verified[key] = _try(choice, interpreter)
        return _verified[key]


def _try(choice: Isolation, interpreter: Interpreter) -> str | None:
    if sys.platform != "linux":
        return f"works on Linux only, this is {sys.platform}"
    missing = bubblewrap_missing()
    if missing is not None:
        return missing
    trial = Sandbox.__new__(Sandbox)
    trial.isolation, trial.interpreter, trial.limits = choice, interpreter, TRIAL_LIMITS
    try:
        failed = failing_checks(trial.run)
    except (SandboxStartError, SandboxUnavailableError) as error:
        return str(error)
    return f"these do not hold here: {', '.join(failed)}" if failed else None


def _socket_bytes() -> int:
    """What a socket's full buffer takes of the kernel's memory, measured at most."""
    with open("/proc/sys/net/core/wmem_default") as file:
        return 2 * int(file.read())

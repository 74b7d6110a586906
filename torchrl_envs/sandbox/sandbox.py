"""Untrusted Python code runs once or in a session, and its process and output are bounded."""

import contextlib
import os
import selectors
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torchrl_data import page
from torchrl_envs.processes import kept_command
from torchrl_envs.sandbox.confinement import (
    TRIAL_LIMITS,
    UNPRIVILEGED_USER,
    Interpreter,
    SandboxStartError,
    SandboxUnavailableError,
    UnsandboxedCodeWarning,
    bubblewrap_command,
    changes_user,
    failing_checks,
    program,
    starts_as,
    syscall_filter,
)

from .confinement import Isolation, SandboxLimits, SandboxResult
from .inside.frames import pack

# Keeps the start and the end of a stream, however long it is.


class CappedOutput:
    """The first and last bytes of a stream."""

    def __init__(self, max_bytes: int) -> None:
        self._head_size = max_bytes // 2
        self._tail_size = max_bytes - self._head_size
        self._head = bytearray()
        self._tail = bytearray()
        self._num_bytes = 0

    def add(self, data: bytes) -> None:
        """Take what comes next."""
        self._num_bytes += len(data)
        room = self._head_size - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._tail_size:
            del self._tail[: -self._tail_size]

    @property
    def truncated(self) -> bool:
        """Whether anything was dropped."""
        return self._num_bytes > self._head_size + self._tail_size

    def text(self) -> str:
        """What was kept, decoded as UTF-8 with replacement characters, with a mark at the cut."""
        if not self.truncated:
            return (self._head + self._tail).decode("utf-8", errors="replace")
        dropped = self._num_bytes - self._head_size - self._tail_size
        head = self._head.decode("utf-8", errors="replace")
        tail = self._tail[-self._tail_size :].decode("utf-8", errors="replace")
        return f"{head}\n[... {dropped} bytes were cut ...]\n{tail}"


# One running sandbox, as its parent sees it: requests go in, capped output comes out.

_READ_BYTES: Final = 1 << 16
_GRACE_S: Final = 2.0
"""How much later than the supervisor inside the parent looks at the clock."""
_MAX_LINE_BYTES: Final = 4096
_START_S: Final = 20.0
ENVIRONMENT: Final = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class SandboxProcess:
    """Starts a sandbox and talks to its supervisor."""

    def __init__(
        self,
        command: Sequence[str],
        config: dict[str, Any],
        *,
        max_output_bytes: int,
        needs_keeper: bool,
    ) -> None:
        self._max_output_bytes = max_output_bytes
        self._selector = selectors.DefaultSelector()
        self._outgoing = bytearray()
        self._line = b""
        self._reports: list[str] = []
        self._status, inside = os.pipe()
        try:
            user = starts_as()
            if needs_keeper:
                command, user = kept_command(command, user=user), None
            as_user: Any = {} if user is None else {"user": user, "group": user, "extra_groups": []}
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=ENVIRONMENT,
                pass_fds=(inside,),
                start_new_session=True,
                cwd="/",
                **as_user,
            )
        except BaseException:
            os.close(self._status)
            self._selector.close()
            raise
        finally:
            os.close(inside)
        process: Any = self._process  # none of the three is None
        stdout, stderr = self._outputs = process.stdout, process.stderr
        self._stdin = process.stdin
        self.clear_output()
        for stream, take in (
            (stdout.fileno(), lambda data: self.stdout.add(data)),
            (stderr.fileno(), lambda data: self.stderr.add(data)),
            (self._status, self._take_status),
        ):
            os.set_blocking(stream, False)
            self._selector.register(stream, selectors.EVENT_READ, take)
        os.set_blocking(self._stdin.fileno(), False)
        self.send(program())
        self.send({**config, "status_fd": inside})

    def clear_output(self) -> None:
        """Forget what was written until now."""
        self.stdout = CappedOutput(self._max_output_bytes)
        self.stderr = CappedOutput(self._max_output_bytes)

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message; it is written while a report is awaited."""
        if not self._outgoing:
            self._selector.register(self._stdin.fileno(), selectors.EVENT_WRITE, None)
        self._outgoing += pack(message)

    def next_report(self, *, timeout_s: float) -> str:
        """The supervisor's next line; output is read meanwhile."""
        # Gives the line; `"timeout"` if it had to be given up, and `"exit -9"` if it went without
        # one, because something outside killed it.
        deadline = time.monotonic() + timeout_s + _GRACE_S
        while not self._reports and self._status in self._selector.get_map():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return "timeout"
            for key, _ in self._selector.select(remaining):
                if key.data is None:
                    self._write()
                else:
                    self._read(key.fd, key.data)
        # What was written before the report; a program that goes on writing waits.
        for key in list(self._selector.get_map().values()):
            if key.data is not None and key.fd != self._status:
                num_reads = 0
                while num_reads < 64 and self._read(key.fd, key.data):
                    num_reads += 1
        return self._reports.pop(0) if self._reports else "exit -9"

    def await_start(self) -> None:
        """Wait until the supervisor has started a worker.

        Raises:
            SandboxStartError: it does not.
        """
        report = self.next_report(timeout_s=_START_S)
        if report != "ready":
            output = self.stderr.text().strip()
            raise SandboxStartError(f"it does not start ({report}). {output}".rstrip())

    def kill(self) -> None:
        """End it with all of its processes, and give everything back."""
        if self._process.poll() is None and not self._outgoing:
            # The supervisor goes when its input ends, and the rest with it.
            self._close_stdin()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_GRACE_S)
        self._process.terminate()  # where it still runs
        try:
            self._process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._selector.close()
        self._close_stdin()
        for stream in self._outputs:
            stream.close()
        os.close(self._status)

    def _close_stdin(self) -> None:
        if not self._stdin.closed:
            if self._selector.get_map() and self._stdin.fileno() in self._selector.get_map():
                self._selector.unregister(self._stdin.fileno())
            self._stdin.close()

    def _write(self) -> None:
        try:
            written = os.write(self._stdin.fileno(), self._outgoing[:_READ_BYTES])
        except BrokenPipeError:
            written = len(self._outgoing)  # it has ended; its status says how
        del self._outgoing[:written]
        if not self._outgoing:
            self._selector.unregister(self._stdin.fileno())

    def _read(self, fd: int, take: Callable[[bytes], None]) -> bool:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            take(data)
        else:
            self._selector.unregister(fd)
        return bool(data)

    def _take_status(self, data: bytes) -> None:
        *lines, self._line = (self._line + data)[-_MAX_LINE_BYTES:].split(b"\n")
        self._reports += [line.decode("ascii", errors="replace") for line in lines]


# Runs untrusted Python code.

_verified: dict[Interpreter, str | None] = {}
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
        if isolation not in (None, "none", "bubblewrap"):
            choices = "must be one of 'bubblewrap', 'none' and None"
            raise ValueError(f"Sandbox: isolation {choices}, got {isolation!r}.")
        if isolation == "none" and not allow_unsandboxed:
            raise ValueError(
                "Sandbox: isolation='none' runs untrusted code with the rights of this process. "
                "Pass allow_unsandboxed=True as well if that is meant."
            )
        self.limits = SandboxLimits() if limits is None else limits
        self.interpreter = Interpreter.current(packages)
        missing = "isolation='none' was asked for"
        if isolation != "none":
            reason = _reason_against(self.interpreter)
            missing = "" if reason is None else f"bubblewrap: {reason}"
        self.isolation: Isolation = "none" if missing else "bubblewrap"
        if missing and not allow_unsandboxed:
            raise SandboxUnavailableError(
                f"Nothing isolates untrusted code on this machine. {missing}. Containers need user "
                "namespaces (a seccomp profile that allows unshare and mount). "
                "`python -m torchrl_envs.sandbox` shows what works. To run code with the rights of "
                "this process all the same, pass allow_unsandboxed=True; results then say so."
            )
        if missing:
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
        command = self.interpreter.command()
        if self.isolation == "bubblewrap":
            command = [*bubblewrap_command(self.interpreter), *command]
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
        with open("/proc/sys/net/core/wmem_default") as file:
            socket_bytes = 2 * int(file.read())  # at most, of a socket's full buffer
        config = {
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
            "socket_bytes": socket_bytes,
        }
        try:
            return SandboxProcess(
                command,
                config,
                max_output_bytes=limits.max_output_bytes,
                # A session outlives the thread that starts it.
                needs_keeper=persistent or self.isolation == "none",
            )
        except OSError as error:
            user = os.geteuid() if starts_as() is None else starts_as()
            raise SandboxStartError(f"it can't be started as user {user}: {error}") from error

    def result(
        self, process: SandboxProcess, report: str, *, started: float, state_lost: bool = False
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
        return {"bubblewrap": _reason_against(Interpreter.current())}


def _reason_against(interpreter: Interpreter) -> str | None:
    """Why bubblewrap does not isolate code here, or ``None``; tried once per process."""
    with _verifying:
        if interpreter in _verified:
            return _verified[interpreter]
        if sys.platform != "linux":
            reason = f"works on Linux only, this is {sys.platform}"
        elif shutil.which("bwrap") is None:
            reason = (
                "bubblewrap (the command `bwrap`) is not installed: on Debian and Ubuntu "
                "`apt-get install bubblewrap`, on Fedora `dnf install bubblewrap`; see "
                f"{page('docs/sandbox.md')}"
            )
        else:
            trial = Sandbox.__new__(Sandbox)
            trial.isolation, trial.interpreter = "bubblewrap", interpreter
            trial.limits = TRIAL_LIMITS
            try:
                failed = failing_checks(trial.run)
                reason = f"these do not hold here: {', '.join(failed)}" if failed else None
            except (SandboxStartError, SandboxUnavailableError) as error:
                reason = str(error)
        _verified[interpreter] = reason
        return reason


# An interpreter whose variables live on between runs.


class SandboxSession:
    """Runs programs one after the other in one interpreter, isolated as a sandbox's runs are.

    A run that hits its deadline or the memory limit ends the interpreter, with all its processes;
    so does a program that kills it. Then ``state_lost`` is set, and the next run starts afresh.
    ``sys.exit`` ends the run alone. Memory and disk are those of the whole session.

    The interpreter itself says when a run is over. A program that looks for it can say so early,
    for its own session; what grades programs uses :meth:`Sandbox.run`, where the kernel says it.

    Args:
        sandbox: how the session is isolated and limited.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self._process: SandboxProcess | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["SandboxSession"], tuple[Sandbox]]:
        """A copy starts afresh."""
        return type(self), (self.sandbox,)

    def run(self, code: str, *, timeout_s: float | None = None) -> SandboxResult:
        """Run a program where the last one stopped.

        Args:
            code: a Python program.
            timeout_s: deadline, in seconds; that of the sandbox's limits by default.

        Returns:
            Its output; ``exit_status`` is 1 after an exception.

        Raises:
            ValueError: the program is longer than the limits allow.
            SandboxStartError: the sandbox did not start.
        """
        timeout_s = self.sandbox.limits.timeout_s if timeout_s is None else timeout_s
        request = self.sandbox.request(code, timeout_s)
        with self._lock:
            started = time.monotonic()
            process = self._process
            if process is None:
                process = self._process = self.sandbox.start(persistent=True)
                try:
                    process.await_start()
                except BaseException:
                    self._end()
                    raise
            process.clear_output()
            process.send(request)
            report = process.next_report(timeout_s=timeout_s)
            lost = not report.startswith("done ")
            if lost:
                self._end()
            return self.sandbox.result(process, report, started=started, state_lost=lost)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the interpreter; a later run starts a new one."""
        with self._lock:
            self._end()

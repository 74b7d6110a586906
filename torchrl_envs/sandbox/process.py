"""A running sandbox, as its parent sees it: requests go in, capped output comes out."""

import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torchrl_envs.processes import kept_command
from torchrl_envs.processes.capped_output import CappedOutput

from .errors import SandboxStartError
from .inside.frames import framed_bytes
from .interpreter import inside_program
from .landlock import remove_folder

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
        user: int | None = None,
        folder: str = "",
    ) -> None:
        self._max_output_bytes = max_output_bytes
        self._selector = selectors.DefaultSelector()
        self._outgoing = bytearray()
        self._line = b""
        self._reports: list[str] = []
        self._folder = folder  # removed with it
        self._status, inside = os.pipe()
        try:
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
            self._remove_folder()
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
        self.send(inside_program())
        self.send({**config, "status_fd": inside})

    def clear_output(self) -> None:
        """Forget what was written until now."""
        self.stdout = CappedOutput(self._max_output_bytes)
        self.stderr = CappedOutput(self._max_output_bytes)

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message; it is written while a report is awaited."""
        if not self._outgoing:
            self._selector.register(self._stdin.fileno(), selectors.EVENT_WRITE, None)
        self._outgoing += framed_bytes(message)

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
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder:
            remove_folder(self._folder)

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

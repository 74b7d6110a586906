"""One worker process, as its parent sees it, and the guardian of all."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from torchrl_envs.concurrency.calls import CallTimeoutError

from .frames import Frames, pack

_LOOK_S: Final = 0.25
"""How often one looks whether a worker is alive whose socket a child of its own keeps open."""
_END_S: Final = 5.0
_GUARDIAN: Final = Path(__file__).with_name("guardian.py")
_PROGRAM: Final = (
    "import json, sys; descriptor, path = sys.argv[1:]; sys.path[:] = json.loads(path); "
    "from .worker import serve; serve(int(descriptor))"
)


class ToolProcessError(RuntimeError):
    """The process of a call ended before it answered."""


class Guardian:
    """A process that kills the workers if this one ends without doing so."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARDIAN)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )

    def tell(self, sign: str, pid: int) -> None:
        """Say that a worker is there (``+``), or is about to be no more (``-``)."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):  # somebody killed it, which ends its service
            self._process.stdin.write(f"{sign}{pid}\n".encode())

    def close(self) -> None:
        """End the guardian, and the workers that it still knows."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class WorkerProcess:
    """A process and the only socket to it; used by one thread at a time, but for :meth:`kill`.

    Args:
        setup: what the worker needs to begin.
        guardian: is told of it.
    """

    def __init__(self, setup: dict[str, Any], guardian: Guardian) -> None:
        self._guardian = guardian
        self._link, theirs = socket.socketpair()
        self._frames = Frames(self._link)
        try:
            path = json.dumps([str(entry) or os.getcwd() for entry in sys.path])
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), path],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Ctrl-C is the program's; and what a tool starts is killed with the worker.
                start_new_session=True,
            )
        except BaseException:
            self._link.close()
            raise
        finally:
            theirs.close()
        guardian.tell("+", self._process.pid)
        self._request = pack(setup)

    def start(self, timeout_s: float) -> str:
        """Wait until it has begun; what keeps it from running the functions, or nothing."""
        return self._ask(self._request, timeout_s)

    def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> tuple[str, str]:
        """Call a function; its answer is ``"value"``, ``"error"`` or ``"lost"``, and text."""
        kind, text = self._ask(pack((name, arguments)), timeout_s)
        return kind, text

    def _ask(self, request: bytes, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        try:
            self._link.settimeout(timeout_s)
            self._link.sendall(request)
            while (remaining := deadline - time.monotonic()) > 0:
                is_dead = self.ending() is not None  # asked first: it may have answered before
                with contextlib.suppress(TimeoutError):
                    return self._frames.receive(0.0 if is_dead else min(remaining, _LOOK_S))
                if is_dead:
                    raise self._death()
        except TimeoutError:
            pass
        except (EOFError, OSError) as error:
            raise self._death() from error
        raise CallTimeoutError(f"no answer within {timeout_s:g} s")

    def ending(self) -> str | None:
        """How the process ended, if it has; it stays a zombie, so that its number is not reused."""
        try:
            status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # this program's SIGCHLD is ignored, or somebody else waited
            return "ended"
        if status is None:
            return None
        if status.si_code == os.CLD_EXITED:
            return f"ended with exit code {status.si_status}"
        return f"was ended by a signal: {signal.strsignal(status.si_status)}"

    def _death(self) -> ToolProcessError:
        deadline = time.monotonic() + _END_S  # the socket closes a little before the process ends
        while (ending := self.ending()) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return ToolProcessError(f"its process {ending or 'closed its socket'}")

    def kill(self) -> None:
        """Kill the process and what it started; from any thread, before :meth:`end`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it, and give back what this process holds of it."""
        self.kill()
        self._guardian.tell("-", self._process.pid)
        self._process.wait()
        self._link.close()

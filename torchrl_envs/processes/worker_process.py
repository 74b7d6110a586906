"""Worker process, as its parent sees it."""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torchrl_envs.concurrency.calls import CallTimeoutError

from .frames import Frames, framed

_LOOK_S: Final = 0.25
"""How often one looks whether a worker is alive whose socket somebody keeps open."""
_END_S: Final = 5.0
_KEEPER: Final = Path(__file__).with_name("keeper.py")
_AFTERWARDS: Final = _KEEPER.with_name("afterwards.py")
RELAY: Final = _KEEPER.with_name("relay.py")
_PROGRAM: Final = (
    "import json, sys; descriptor, path = sys.argv[1:]; sys.path[:] = json.loads(path); "
    "from torchrl_envs.processes.worker import serve_requests; serve_requests(int(descriptor))"
)


def kept_command(command: Sequence[str], *, user: int | None = None, folder: str = "") -> list[str]:
    """A command that ends with this process, and kills what it has started when it ends.

    Args:
        command: the program and its arguments.
        user: who runs it; who runs this process when not given.
        folder: is removed after it.
    """
    who = "" if user is None else str(user)
    return [sys.executable, "-I", "-S", str(_KEEPER), str(os.getpid()), who, folder, *command]


def relayed_command(door: object, place: object, command: Sequence[str]) -> list[str]:
    """A command beside a door to another place; each a ``host:port`` or a path: ``relay.py``."""
    return [sys.executable, "-I", "-S", str(RELAY), str(door), str(place), *command]


def run_afterwards(
    command: Sequence[str], *, folder: str = "", variables: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """A process that runs a command when its standard input is closed, or this process is gone.

    Args:
        command: what cleans up.
        folder: that is removed after it.
        variables: its environment; this process's own when not given.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_AFTERWARDS), folder, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=variables,
        start_new_session=True,
    )


class ToolProcessError(RuntimeError):
    """The process of a call ended before it answered."""


class WorkerProcess:
    """A process and the only socket to it; used by one thread at a time, but for :meth:`kill`."""

    def __init__(self, setup: dict[str, Any], handler: bytes) -> None:
        self._link, theirs = socket.socketpair()
        self._frames = Frames(self._link)
        try:
            path = json.dumps([str(entry) or os.getcwd() for entry in sys.path])
            self._process = subprocess.Popen(
                kept_command([sys.executable, "-c", _PROGRAM, str(theirs.fileno()), path]),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is the program's
            )
        except BaseException:
            self._link.close()
            raise
        finally:
            theirs.close()
        self.setup = framed(pickle.dumps(setup)) + framed(handler)
        """What it is sent first; it answers with what keeps it from running the handler."""

    def ask(self, message: bytes, timeout_s: float) -> bytes:
        """Send a packed message, and wait for the answer."""
        deadline = time.monotonic() + timeout_s
        try:
            self._link.settimeout(timeout_s)
            self._link.sendall(message)
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
        """Status of a process that ended; it stays a zombie, so that its number is not reused."""
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
            os.kill(self._process.pid, signal.SIGTERM)  # the keeper kills the others first

    def end(self) -> None:
        """Kill it, and give back what this process holds of it."""
        self.kill()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:  # somebody stopped the keeper
            self._process.kill()
            self._process.wait()
        self._link.close()

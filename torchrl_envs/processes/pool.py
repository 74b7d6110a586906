"""Functions in worker processes, which may die, are killed when late, and leave nothing behind."""

import contextlib
import functools
import json
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from torchrl_data.checks import check_counts
from torchrl_envs.concurrency.calls import CallTimeoutError, run_call
from torchrl_envs.concurrency.outcome import EpisodeLostError
from torchrl_envs.tool_results import error_line, value_text

# Messages over a socket between two processes: a length, and bytes.

_LENGTH: Final = struct.Struct("!Q")
_READ_BYTES: Final = 1 << 16


def pack(data: bytes) -> bytes:
    """A message as it is sent."""
    return _LENGTH.pack(len(data)) + data


class Frames:
    """What arrives at a socket, message by message."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._buffer = bytearray()

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message."""
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size, timeout_s))
        data = self._read(_LENGTH.size + size, timeout_s)[_LENGTH.size :]
        self._buffer.clear()
        return data

    def _read(self, size: int, timeout_s: float | None) -> bytes:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (missing := size - len(self._buffer)) > 0:
            if deadline is not None:
                self._link.settimeout(max(1e-3, deadline - time.monotonic()))
            data = self._link.recv(min(missing, _READ_BYTES))
            if not data:
                raise EOFError("the other side closed the socket")
            self._buffer += data
        return bytes(self._buffer[:size])


# One worker process, as its parent sees it.

_LOOK_S: Final = 0.25
"""How often one looks whether a worker is alive whose socket somebody keeps open."""
_END_S: Final = 5.0
_KEEPER: Final = Path(__file__).with_name("keeper.py")
RELAY: Final = _KEEPER.with_name("relay.py")
_PROGRAM: Final = (
    "import json, sys; descriptor, path = sys.argv[1:]; sys.path[:] = json.loads(path); "
    f"from {__name__} import serve; serve(int(descriptor))"
)


def kept_command(command: Sequence[str], *, user: int | None = None) -> list[str]:
    """A command that ends with this process, and kills what it has started when it ends."""
    who = "" if user is None else str(user)
    return [sys.executable, "-I", "-S", str(_KEEPER), str(os.getpid()), who, *command]


def relayed_command(door: object, place: object, command: Sequence[str]) -> list[str]:
    """A command beside a door to another place; each a ``host:port`` or a path: ``relay.py``."""
    return [sys.executable, "-I", "-S", str(RELAY), str(door), str(place), *command]


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
        self.setup = pack(pickle.dumps(setup)) + pack(handler)
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


# Worker processes that answer requests, and are killed when they take too long.

_START_S: Final = 120.0
_STOP_S: Final = 5.0


class WorkerStartError(ToolProcessError):
    """A worker could not begin; the message says why."""


class WorkerPool:
    """Asks a handler that runs in worker processes, each request with a deadline."""

    # Workers are fresh interpreters, which do not run the program again, and start when they are
    # needed. A worker handles one request at a time. One that misses the deadline is killed with
    # what it started, one that dies is replaced, and the other requests go on. Workers end with
    # `close`, with the object, and with this process, however that ends.
    # max_memory_mb: what a worker may allocate beside what it starts with, in MiB; beyond it there
    # is a `MemoryError`. No limit when not given.

    def __init__(
        self,
        handler: bytes,
        *,
        num_processes: int,
        timeout_s: float,
        max_memory_mb: int | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        self._handler = handler
        self._setup = {"max_memory_mb": max_memory_mb, "preload": list(preload)}
        self._deadline_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._free = threading.Semaphore(num_processes)
        self._changed = threading.Condition()
        self._idle: list[WorkerProcess] = []
        self._used: set[WorkerProcess] = set()
        """Each of them by a thread."""
        self._generation = 0
        """How often they were closed."""
        weakref.finalize(self, _end_workers, self._changed, self._idle, self._used)

    def start(self) -> None:
        """Start the first worker."""
        self._put_back(self._start(self._generation))

    def ask(self, request: bytes) -> bytes:
        """Handle a request as soon as a worker is free; from any thread."""
        generation = self._generation
        with self._free:
            worker = self._take() or self._start(generation)
            try:
                answer = worker.ask(pack(request), self._deadline_s)
            except BaseException:
                self._end(worker)
                raise
            self._put_back(worker)
        return answer

    def _take(self) -> WorkerProcess | None:
        """An idle worker; those that died meanwhile are given up."""
        with self._changed:
            while self._idle:
                worker = self._idle.pop()
                if worker.ending() is None:
                    self._used.add(worker)
                    return worker
                worker.end()
        return None

    def _start(self, generation: int) -> WorkerProcess:
        with self._changed:
            if generation != self._generation:
                raise ToolProcessError("the tools were closed")
            worker = WorkerProcess(self._setup, self._handler)
            self._used.add(worker)
        try:
            problem = worker.ask(worker.setup, _START_S).decode()
        except BaseException as error:
            self._end(worker)
            if isinstance(error, Exception) and generation == self._generation:
                raise WorkerStartError(f"a worker process did not start: {error}") from error
            raise
        if problem:
            self._end(worker)
            raise WorkerStartError(problem)
        return worker

    def _put_back(self, worker: WorkerProcess) -> None:
        with self._changed:
            self._used.remove(worker)
            self._idle.append(worker)
            self._changed.notify_all()

    def _end(self, worker: WorkerProcess) -> None:
        with self._changed:
            self._used.remove(worker)
            worker.end()
            self._changed.notify_all()

    def close(self) -> None:
        """Kill the workers, and with them the requests that run; a later one starts new workers."""
        with self._changed:
            self._generation += 1
            _end_workers(self._changed, self._idle, self._used)


def _end_workers(
    changed: threading.Condition, idle: list[WorkerProcess], used: set[WorkerProcess]
) -> None:
    """Apart from the pool, so that it goes when nobody holds it any more."""
    with changed:
        for worker in used:
            worker.kill()
        # The thread that uses one sees that, and ends it.
        changed.wait_for(lambda: not used, timeout=_STOP_S)
        for worker in idle:
            worker.end()
        idle.clear()


# Inside a worker: finds the handler, then answers requests until the socket closes.


def serve(descriptor: int) -> None:
    """A worker's life."""
    link = socket.socket(fileno=descriptor)
    link.settimeout(None)
    frames = Frames(link)
    setup = pickle.loads(frames.receive())
    try:
        handler = pickle.loads(frames.receive())
        for module in setup["preload"]:
            import_module(module)
        if setup["max_memory_mb"] is not None:
            with open("/proc/self/statm") as statm:
                in_use = int(statm.read().split()[5]) * resource.getpagesize()
            limit = in_use + setup["max_memory_mb"] * 2**20
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    except BaseException as error:
        link.sendall(pack(error_line(error).encode()))
        return
    link.sendall(pack(b""))
    while True:
        try:
            request = frames.receive()
        except EOFError:
            return
        link.sendall(pack(handler(request)))


# Functions that are called in worker processes and answer with text.


class ToolProcesses:
    """Calls functions in worker processes, each call with a deadline; see :class:`WorkerPool`."""

    # The first worker starts with the object, to show that it finds the functions.
    # functions: by name, sync or `async` (each call has an event loop of its own); found by their
    # names in modules that can be imported.
    # max_memory_mb: what a worker may allocate beside what it starts with, in MiB; beyond it a call
    # fails with `MemoryError`. No limit when not given.

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        *,
        num_processes: int,
        timeout_s: float,
        max_result_bytes: int,
        max_memory_mb: int | None = None,
        preload: Sequence[str] = (),
        start: bool = True,
    ) -> None:
        check_counts(num_processes=num_processes, max_memory_mb=max_memory_mb)
        self.functions = dict(functions)
        self.timeout_s = timeout_s
        self._settings: Any = {"num_processes": num_processes, "timeout_s": timeout_s}
        self._settings |= {"max_memory_mb": max_memory_mb, "preload": preload}
        self._max_result_bytes = max_result_bytes
        for name, function in functions.items():
            try:
                if getattr(function, "__module__", None) == "__main__":
                    raise ValueError("it is defined in the program itself")
                pickle.dumps(function)
            except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
                raise ValueError(
                    f"The function {name} can't run in another process: {error}. Define it at the "
                    "top of a module that can be imported, or leave num_processes out."
                ) from error
        handler = pickle.dumps(functools.partial(_handle, self.functions, max_result_bytes))
        self._pool = WorkerPool(handler, **self._settings)
        if start:
            self._ask(self._pool.start)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has workers of its own."""
        settings = {**self._settings, "max_result_bytes": self._max_result_bytes}
        return functools.partial(type(self), **settings), (self.functions,)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a function as soon as a worker is free; from any thread."""
        request = json.dumps((name, dict(arguments))).encode()
        kind, text = json.loads(self._ask(functools.partial(self._pool.ask, request)))
        if kind == "value":
            return text
        name, _, message = text.partition(": ")
        error: Any = type(name, (EpisodeLostError if kind == "lost" else RuntimeError,), {})
        raise error(message)

    @staticmethod
    def _ask(ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except WorkerStartError as error:
            if error.__cause__ is not None:
                raise
            raise ToolProcessError(
                f"the functions can't run in another process: {error}. Define them at the top of a "
                "module that can be imported, or leave num_processes out."
            ) from error

    def close(self) -> None:
        """Kill the workers, and with them the calls that run; a later call starts new ones."""
        self._pool.close()


def _handle(functions: Mapping[str, Callable[..., Any]], max_bytes: int, request: bytes) -> bytes:
    """In a worker: text alone goes back, as objects of this side may not exist on the other."""
    name, arguments = json.loads(request)
    outcome = run_call(functools.partial(functions[name], **arguments))
    if outcome.error is None:
        outcome = run_call(functools.partial(value_text, outcome.value, max_bytes=max_bytes))
    answer = "value", outcome.value
    if outcome.error is not None:
        is_lost = isinstance(outcome.error, EpisodeLostError)
        answer = "lost" if is_lost else "error", error_line(outcome.error)
    return json.dumps(answer).encode()

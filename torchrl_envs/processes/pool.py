"""Worker processes that call functions.

Over processes of our own and not over :class:`~torchrl_envs.processes.killable_pool.KillablePool`:
pebble's workers share one pipe, so that one that dies as it takes a call up can break the pool, and
one that leaves with ``os._exit(0)`` is not missed before the deadline.
"""

import functools
import pickle
import threading
import weakref
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any, Final

from torchrl_envs.errors import EpisodeLostError

from .process import Guardian, ToolProcessError, WorkerProcess

_START_S: Final = 120.0
_STOP_S: Final = 5.0


class ToolProcesses:
    """Calls functions in worker processes, each call with a deadline.

    Workers are fresh interpreters, started when they are needed; the first one starts with the
    object, to show that it finds the functions. A worker runs one call at a time. One that misses
    the deadline is killed with what it started, one that dies is replaced, and the other calls go
    on. Workers end with :meth:`close`, with the object, and with this process, however that ends.

    Args:
        functions: by name, sync or ``async`` (each call has an event loop of its own); found by
            their names in modules that can be imported.
        num_processes: calls that run at once.
        timeout_s: deadline of one call, in seconds from when a worker takes it up.
        max_result_bytes: longer results are cut, with a mark; bytes of UTF-8.
        max_memory_mb: what a worker may allocate beside what it starts with, in MiB; beyond it a
            call fails with ``MemoryError``. No limit when not given.

    Raises:
        ValueError: a setting is not positive, or no other process can find a function.
        ToolProcessError: a worker can't be started, or does not find the functions.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        *,
        num_processes: int,
        timeout_s: float,
        max_result_bytes: int,
        max_memory_mb: int | None = None,
    ) -> None:
        if num_processes < 1 or (max_memory_mb is not None and max_memory_mb < 1):
            raise ValueError(
                "num_processes and max_memory_mb must be at least 1, got "
                f"{num_processes} and {max_memory_mb}."
            )
        self.functions = dict(functions)
        self.num_processes = num_processes
        self.timeout_s = timeout_s
        self.max_result_bytes = max_result_bytes
        self.max_memory_mb = max_memory_mb
        self._deadline_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._setup = {
            "functions": {name: _reference(name, f) for name, f in functions.items()},
            "max_bytes": max_result_bytes,
            "max_memory_mb": max_memory_mb,
        }
        self._free = threading.Semaphore(num_processes)
        self._held = _Held()
        weakref.finalize(self, self._held.close)
        self._held.put_back(self._start(self._held.generation))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has workers of its own."""
        settings = {
            "num_processes": self.num_processes,
            "timeout_s": self.timeout_s,
            "max_result_bytes": self.max_result_bytes,
            "max_memory_mb": self.max_memory_mb,
        }
        return functools.partial(type(self), **settings), (self.functions,)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a function as soon as a worker is free; from any thread.

        Args:
            name: of the function.
            arguments: JSON, as a model's are.

        Returns:
            What it returned, as text.

        Raises:
            TypeError: the arguments are not JSON.
            CallTimeoutError: it missed its deadline, and its worker was killed.
            ToolProcessError: its worker died, or :meth:`close` was called.
            RuntimeError: it raised; the error's type has the name of the one that was raised, and
                is an ``EpisodeLostError`` if that was one.
        """
        generation = self._held.generation
        with self._free:
            worker = self._held.take() or self._start(generation)
            try:
                kind, text = worker.call(name, dict(arguments), self._deadline_s)
            except TypeError:  # before anything was sent
                self._held.put_back(worker)
                raise
            except BaseException:
                self._held.end(worker)
                raise
            self._held.put_back(worker)
        if kind == "value":
            return text
        name, _, message = text.partition(": ")
        error: Any = type(name, (EpisodeLostError if kind == "lost" else RuntimeError,), {})
        raise error(message)

    def _start(self, generation: int) -> WorkerProcess:
        worker = self._held.make(self._setup, generation)
        try:
            problem = worker.start(_START_S)
            if problem:
                raise ToolProcessError(
                    f"the functions can't run in another process: {problem}. Define them at the "
                    "top of a module that can be imported, or leave num_processes out."
                )
        except BaseException:
            self._held.end(worker)
            raise
        return worker

    def close(self) -> None:
        """Kill the workers, and with them the calls that run; a later call starts new ones."""
        self._held.close()


def _reference(name: str, function: Callable[..., Any]) -> str:
    """How a worker finds a function."""
    try:
        if getattr(function, "__module__", None) == "__main__":
            raise ValueError("it is defined in the program itself")
        return b64encode(pickle.dumps(function)).decode()
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"The function {name} can't run in another process: {error}. Define it at the top of a "
            "module that can be imported, or leave num_processes out."
        ) from error


class _Held:
    """The workers that there are: those that wait here, and those that a thread uses."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._guardian: Guardian | None = None
        self._idle: list[WorkerProcess] = []
        self._used: set[WorkerProcess] = set()
        self.generation = 0
        """How often they were closed."""

    def make(self, setup: dict[str, Any], generation: int) -> WorkerProcess:
        with self._changed:
            if generation != self.generation:
                raise ToolProcessError("the tools were closed")
            self._guardian = self._guardian or Guardian()
            worker = WorkerProcess(setup, self._guardian)
            self._used.add(worker)
            return worker

    def take(self) -> WorkerProcess | None:
        """An idle worker; those that died meanwhile are given up."""
        with self._changed:
            while self._idle:
                worker = self._idle.pop()
                if worker.ending() is None:
                    self._used.add(worker)
                    return worker
                worker.end()
        return None

    def put_back(self, worker: WorkerProcess) -> None:
        with self._changed:
            self._used.remove(worker)
            self._idle.append(worker)
            self._changed.notify_all()

    def end(self, worker: WorkerProcess) -> None:
        with self._changed:
            self._used.remove(worker)
            worker.end()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self.generation += 1
            for worker in self._used:
                worker.kill()
            # The thread that uses one sees that, and ends it.
            self._changed.wait_for(lambda: not self._used, timeout=_STOP_S)
            for worker in self._idle:
                worker.end()
            self._idle.clear()
            guardian, self._guardian = self._guardian, None
            if guardian is not None:
                guardian.close()

"""Functions that are called in worker processes and answer with text."""

import functools
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl_data.checks import check_counts
from torchrl_envs.concurrency.calls import run_call
from torchrl_envs.concurrency.outcome import EpisodeLostError
from torchrl_envs.tool_results import Content, error_line, value_content

from .worker_pool import WorkerPool, WorkerStartError
from .worker_process import ToolProcessError


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

    def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """Call a function as soon as a worker is free; from any thread."""
        request = json.dumps((name, dict(arguments))).encode()
        kind, content = json.loads(self._ask(functools.partial(self._pool.ask, request)))
        if kind == "value":
            return content
        name, _, message = content.partition(": ")
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
    """In a worker: text and images go back, as other objects may not exist on the other side."""
    name, arguments = json.loads(request)
    outcome = run_call(functools.partial(functions[name], **arguments))
    if outcome.error is None:
        outcome = run_call(functools.partial(value_content, outcome.value, max_bytes=max_bytes))
    answer = "value", outcome.value
    if outcome.error is not None:
        is_lost = isinstance(outcome.error, EpisodeLostError)
        answer = "lost" if is_lost else "error", error_line(outcome.error)
    return json.dumps(answer).encode()

"""Programs that own their loop: how one is called, and the thread that it runs on."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from torchrl_envs.concurrency.calls import accepted_arguments

from .agent_command import AgentEndpoint
from .session import AgentSession

Program = Callable[..., Any]


def first_argument(program: Program) -> str:
    """Return what a program calls its endpoint; nothing where it does not mind.

    Args:
        program: a function, or an :class:`AgentCommand`.

    Raises:
        TypeError: it takes no positional argument.
    """
    first = next(iter(inspect.signature(program).parameters.values()), None)
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise TypeError(f"AgentProgram: {program!r:.80} has to take the endpoint first.")
    return "" if first.kind is first.POSITIONAL_ONLY else first.name


def required_columns(program: Program) -> list[str]:
    """The columns of the data without which a program can't be called.

    Args:
        program: a function, or an :class:`AgentCommand`.
    """
    _, *others = inspect.signature(program).parameters.values()
    named = [p for p in others if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return [p.name for p in named if p.default is p.empty and p.name != "seed"]


class RunningProgram:
    """The program of one episode, on a thread of its own.

    Args:
        program: a function, sync or ``async``.
        endpoint: its first argument.
        columns: of the data; it gets those that it names.
        session: is told of its end.
    """

    # An event loop of its own, too: an agent that blocks its loop holds up no other one.

    def __init__(
        self,
        program: Program,
        endpoint: AgentEndpoint,
        columns: Mapping[str, Any],
        session: AgentSession,
    ) -> None:
        self.session = session
        first = first_argument(program)
        others = {name: value for name, value in columns.items() if name != first}
        call = functools.partial(program, endpoint, **accepted_arguments(program, others))
        self._lock = threading.Lock()
        self._is_stopped = False
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        threading.Thread(target=self._run, args=(call,), name="agent", daemon=True).start()

    def _run(self, call: Callable[[], Any]) -> None:
        # SystemExit and KeyboardInterrupt that a program raises are its own errors.
        try:
            value = call()
            if inspect.isawaitable(value):
                asyncio.run(self._await(value))
            else:
                self.session.end(value)
        except BaseException as error:
            self.session.end(error=error)

    async def _await(self, value: Awaitable[Any]) -> None:
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            self._running = asyncio.get_running_loop(), task
            if self._is_stopped:
                task.cancel()
        # Told at once: a loop that ends waits for the threads that were begun on it.
        try:
            self.session.end(await value)
        except BaseException as error:
            self.session.end(error=error)
            raise
        finally:
            with self._lock:
                self._running = None

    def stop(self) -> None:
        """Cancel it where it is ``async``; a function that is not ends when it asks again."""
        with self._lock:
            running = None if self._is_stopped else self._running  # it may clean up in peace
            self._is_stopped = True
            if running is not None:
                loop, task = running
                loop.call_soon_threadsafe(task.cancel)

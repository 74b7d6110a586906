"""The programs: functions, and commands that run as processes."""

import asyncio
import contextlib
import functools
import inspect
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from torchrl_envs.concurrency.calls import accepted_arguments, is_async, run_call
from torchrl_envs.concurrency.event_loop import LoopThread

from .session import AgentSession

_TAIL_BYTES: Final = 4096
Program = Callable[..., Any]


class AgentEndpoint(NamedTuple):
    """Where a program finds the policy: ``OpenAI(base_url=..., api_key=...)``."""

    base_url: str
    """Of OpenAI's clients; Anthropic's take it without the ``/v1`` at its end."""
    api_key: str
    """Of this episode alone."""
    model: str


class AgentProgramError(RuntimeError):
    """A program that runs as a process failed."""


class AgentCommand:
    """A command as a program: it runs as it is, as a process for each episode.

    It finds the policy in ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL`` (and in
    ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY`` and ``ANTHROPIC_MODEL``), and the row of the
    data, with the group's ``seed``, as one line of JSON on its standard input. Its reward is the
    last line that it prints: a number, or an object with a ``"reward"``. It runs with the rights
    of this process, and is killed with all that it started when its episode is over.

    Args:
        command: the program and its arguments.
        environment: further environment variables.
        folder: where it runs; here when not given.
        prints_reward: whether it prints its reward; when not, other parts score the episode.

    Raises:
        ValueError: the command is empty.
        TypeError: it is one string, or holds something else than strings.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        prints_reward: bool = True,
    ) -> None:
        if isinstance(command, str) or not all(isinstance(part, str) for part in command):
            raise TypeError(
                f'AgentCommand takes a list of strings, such as ["python", "agent.py"], got '
                f"{command!r:.80}."
            )
        if not command:
            raise ValueError("AgentCommand: the command is empty.")
        self.command = list(command)
        self.environment = dict(environment or {})
        self.folder = folder
        self.prints_reward = prints_reward
        self.__name__ = Path(self.command[0]).name

    async def __call__(self, endpoint: AgentEndpoint, **row: Any) -> Any:
        """Run it for one episode.

        Raises:
            AgentProgramError: it ended with an error, or printed no reward.
        """
        found = {
            "OPENAI_BASE_URL": endpoint.base_url,
            "ANTHROPIC_BASE_URL": endpoint.base_url.removesuffix("/v1"),
        }
        for company in ("OPENAI", "ANTHROPIC"):
            found |= {f"{company}_API_KEY": endpoint.api_key, f"{company}_MODEL": endpoint.model}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=out,
                stderr=err,
                env={**os.environ, **found, **self.environment},
                cwd=self.folder,
                start_new_session=True,
            )
            try:
                await process.communicate(json.dumps(row).encode() + b"\n")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            if process.returncode:
                last = _tail(err).rpartition("\n")[2]  # of a traceback, what was raised
                raise AgentProgramError(
                    f"{self.__name__} ended with status {process.returncode}: {last[-500:]}"
                )
            return _printed_reward(_tail(out), self.__name__) if self.prints_reward else None


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL_BYTES))
    return file.read().decode(errors="replace").strip()


def _printed_reward(text: str, who: str) -> float:
    last = text.rpartition("\n")[2]
    try:
        value = json.loads(last)
        return float(value["reward"] if isinstance(value, Mapping) else value)
    except (ValueError, TypeError, KeyError):
        raise AgentProgramError(
            f"{who} printed no reward: its last line is {last!r:.80}, and not a number or "
            '{"reward": number}. AgentCommand(prints_reward=False) leaves the reward to others'
        ) from None


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

    def __init__(
        self,
        program: Program,
        endpoint: AgentEndpoint,
        columns: Mapping[str, Any],
        session: AgentSession,
    ) -> None:
        self.session = session
        call = functools.partial(program, endpoint, **accepted_arguments(program, columns))
        self._loop = LoopThread()
        self._task: Future[Any] | None = None
        if is_async(program):
            # A loop of its own: an agent that blocks it holds up no other one.
            self._task = self._loop.submit_apart(call())
            self._task.add_done_callback(self._end_task)
        else:
            thread = threading.Thread(target=self._run, args=(call,), name="agent", daemon=True)
            thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        outcome = run_call(call)
        self.session.end(outcome.value, outcome.error)

    def _end_task(self, task: Future[Any]) -> None:
        if task.cancelled():
            self.session.end(error=asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.session.end(error=error)
        else:
            self.session.end(task.result())

    def stop(self) -> None:
        """Cancel it where it is ``async``; a function that is not ends when it asks again."""
        if self._task is not None:
            self._task.cancel()

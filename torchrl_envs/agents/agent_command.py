"""Commands as programs: a process for each episode, which finds the policy in its environment."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import psutil

from torchrl_envs.processes import kept_command
from torchrl_envs.sandbox import Isolation, ProgramLimits

from .agent_sandbox import AgentSandbox, PlacedProgram

_TAIL_BYTES: Final = 1 << 20
_KILL_S: Final = 5.0


class AgentEndpoint(NamedTuple):
    """Endpoint at which a program finds the policy: ``OpenAI(base_url=..., api_key=...)``."""

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
    ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY`` and ``ANTHROPIC_MODEL``), which no proxy is asked
    for, and the row of the data, with the group's ``seed``, as one line of JSON on its standard
    input. Its reward is the last line that it prints: a number, or an object with a ``"reward"``.
    It is killed with all that it started when its episode is over, or this process; if it kills who
    watches over it, with all that has the episode's key in its environment. Of what it prints the
    last MiB is kept.

    Without ``sandbox`` it runs with the rights of this process. In one it reaches the policy and no
    other address; it reads the system's programs, this Python with its packages, and its folder,
    and writes to a folder of its own (``TMPDIR`` and ``HOME``; in bubblewrap ``/tmp``), which goes
    with the episode; it sees no other process, and ``PATH`` alone of the environment variables. It
    ends where it takes more than ``limits`` allows; nothing bounds its CPU time but the end of the
    episode. Bubblewrap confines it where that works; elsewhere, as in most containers, Landlock
    does, with a warning, because that enforces less. ``isolation`` says which it is.

    Args:
        command: the program and its arguments.
        environment: further environment variables.
        folder: where it runs; here when not given.
        prints_reward: whether it prints its reward; when not, other parts score the episode.
        sandbox: whether it runs in one; or which folders it can read there besides. ``"/proc"``
            shows it all processes, under Landlock, which some programs need to start.
        isolation: of the sandbox: ``"bubblewrap"`` or ``"landlock"``; the first that works when not
            given.
        limits: of the sandbox: memory, disk and processes.

    Raises:
        ValueError: the command is empty, a sandbox won't show a folder, such as a home, or a
            setting of the sandbox is given without one.
        TypeError: it is one string, or holds something else than strings.
        SandboxUnavailableError: nothing confines programs here.

    Example:
        >>> import sys
        >>> command = AgentCommand([sys.executable, "agent.py"])  # prints its reward, a number
        >>> part = AgentProgram(command)  # a part of an environment, of which it is the reward
        >>> part.reward_names
        ['agent']
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        prints_reward: bool = True,
        sandbox: bool | Sequence[str | os.PathLike[str]] = False,
        isolation: Isolation | None = None,
        limits: ProgramLimits | None = None,
    ) -> None:
        if isinstance(command, str) or not all(isinstance(part, str) for part in command):
            raise TypeError(
                f'AgentCommand takes a list of strings, as ["python", "a.py"], got {command!r:.80}.'
            )
        if not command:
            raise ValueError("AgentCommand: the command is empty.")
        if isinstance(sandbox, str | os.PathLike):
            raise TypeError(
                f"AgentCommand: sandbox={sandbox} must be a list of folders, [{sandbox}]."
            )
        self.command = list(command)
        self.environment = dict(environment or {})
        self.folder = folder
        self.prints_reward = prints_reward
        self._sandbox: AgentSandbox | None = None
        if sandbox is not False:
            shown = [os.fspath(path) for path in (() if sandbox is True else sandbox)]
            self._sandbox = AgentSandbox(
                os.fspath(folder or "."), shown, isolation=isolation, limits=limits
            )
        elif isolation is not None or limits is not None:
            raise ValueError(
                "AgentCommand: isolation and limits are of a sandbox, and sandbox=False. Pass "
                "sandbox=True as well, or neither."
            )
        self.isolation: Isolation = "none" if self._sandbox is None else self._sandbox.isolation
        self.__name__ = Path(self.command[0]).name

    async def __call__(self, endpoint: AgentEndpoint, /, **row: Any) -> Any:
        """Run it for one episode.

        Raises:
            AgentProgramError: it ended with an error, printed no reward, or a column of the row is
                no JSON.
        """
        for name, value in row.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise AgentProgramError(
                    f"{self.__name__} gets its row as JSON; the column {name!r} is not: {error}"
                ) from error
        line = json.dumps(row).encode() + b"\n"
        policy = urlsplit(endpoint.base_url)
        if self._sandbox is None:
            own = PlacedProgram(
                command=kept_command(self.command), near=policy.netloc, variables=dict(os.environ)
            )
            status, out, err = await self._run(own, endpoint, line)
        else:
            with self._sandbox.place(self.command, policy) as placed:
                near = policy._replace(netloc=placed.near).geturl()
                status, out, err = await self._run(placed, endpoint._replace(base_url=near), line)
        if status:
            last = err.rpartition("\n")[2]  # of a traceback, what was raised
            raise AgentProgramError(f"{self.__name__} ended with status {status}: {last[-500:]}")
        return _printed_reward(out, self.__name__) if self.prints_reward else None

    async def _run(
        self, placed: PlacedProgram, endpoint: AgentEndpoint, line: bytes
    ) -> tuple[int | None, str, str]:
        """Run it to its end; its exit status, and the last of what it printed."""
        pipes, tails = (os.pipe(), os.pipe()), (bytearray(), bytearray())
        readers = [
            asyncio.create_task(_keep_tail(read, tail))
            for (read, _), tail in zip(pipes, tails, strict=True)
        ]
        try:
            process = await asyncio.create_subprocess_exec(
                *placed.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                env=self._variables(placed, endpoint),
                cwd=self.folder,
                start_new_session=True,
            )
        finally:
            for _, write in pipes:
                os.close(write)
        try:
            await process.communicate(placed.begin + line)
        finally:
            await _end(process, endpoint.api_key)
            await asyncio.wait(readers, timeout=_KILL_S)
            for reader in readers:
                reader.cancel()
        out, err = (tail.decode(errors="replace").strip() for tail in tails)
        return process.returncode, out, err

    def _variables(self, placed: PlacedProgram, endpoint: AgentEndpoint) -> dict[str, str]:
        found = dict(placed.variables)
        url = {"OPENAI": endpoint.base_url, "ANTHROPIC": endpoint.base_url.removesuffix("/v1")}
        for company, base_url in url.items():
            found |= {f"{company}_BASE_URL": base_url, f"{company}_API_BASE": base_url}
            found |= {f"{company}_API_KEY": endpoint.api_key, f"{company}_MODEL": endpoint.model}
        for name in ("NO_PROXY", "no_proxy"):
            hosts = [os.environ.get(name, ""), urlsplit(endpoint.base_url).hostname or ""]
            found[name] = ",".join(filter(None, hosts))
        return found | self.environment


async def _end(process: asyncio.subprocess.Process, key: str) -> None:
    """Kill it, and what it has started; that, too, which knows the key of its episode."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()  # the keeper kills the others first
    try:
        async with asyncio.timeout(_KILL_S):
            await process.wait()
    except TimeoutError:  # somebody stopped the keeper
        process.kill()
        await process.wait()
    if process.returncode == -signal.SIGKILL:  # somebody may have killed it before it had
        while left := [each for each in psutil.process_iter() if _knows(each, key)]:
            for each in left:
                with contextlib.suppress(psutil.Error):
                    each.kill()
            await asyncio.sleep(0)


def _knows(process: psutil.Process, key: str) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        return key in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE
    return False


async def _keep_tail(pipe: int, tail: bytearray) -> None:
    """Read a pipe to its end, and keep the last of it."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", buffering=0)
    )
    with contextlib.closing(transport):
        while piece := await reader.read(_TAIL_BYTES):
            tail += piece
            del tail[:-_TAIL_BYTES]


def _printed_reward(text: str, who: str) -> float:
    last = text.rpartition("\n")[2].rpartition("\r")[2]  # of a bar of progress, too
    try:
        value = json.loads(last)
        return float(value["reward"] if isinstance(value, Mapping) else value)
    except (ValueError, TypeError, KeyError):
        raise AgentProgramError(
            f"{who} printed no reward: its last line is {last!r:.80}, and not a number or "
            '{"reward": number}. AgentCommand(prints_reward=False) leaves the reward to others'
        ) from None

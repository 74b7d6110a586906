"""Tools that are functions, and a tool that runs the Python code of a message."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs.code_blocks import PYTHON, code_blocks
from torchrl_envs.concurrency.outcome import Outcome
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.tool_source import Answer, Job, ToolSource, tool_message
from torchrl_envs.processes import ToolProcesses
from torchrl_envs.sandbox import Sandbox, SandboxLimits, SandboxResult, SandboxSession
from torchrl_envs.tool_results import MAX_RESULT_BYTES, clean_text, result_text
from torchrl_envs.tool_schemas import Tool, function_tool

# Plain functions as tools.


class FunctionTools(ToolSource):
    """Offers functions to every rollout.

    A function, sync or ``async``, has type hints and a Google docstring, from which its schema is
    made; calls whose arguments do not fit the schema are answered with what is wrong. All calls,
    those of one turn too, run at the same time: functions share no state that belongs to a rollout.

    A function runs in this process: one that never returns keeps a thread, one that ends its
    process ends the program. With ``num_processes``, calls run in
    :class:`~torchrl_envs.processes.ToolProcesses`: one that misses its deadline is killed, and
    one whose process dies is answered with an error. Then a function has to be found by its name in
    a module that can be imported, and what it remembers between calls is its process's own.

    Args:
        functions: the functions, or ``{name: function}`` to call them something else.
        num_processes: run the calls in so many worker processes; as many run at once.
        max_memory_mb: with ``num_processes``: what a worker may allocate, in MiB; beyond it a call
            fails with ``MemoryError``.
        timeout_s: deadline of one call, in seconds from when it starts.
        max_result_bytes: longer results are cut, with a mark; bytes of UTF-8.
        show_schemas: whether the chat template shows the tools to the model.

    Raises:
        ValueError: there is no function, two have the same name, or one lacks a docstring, a type
            hint or the description of an argument; no other process can find a function;
            ``max_memory_mb`` without ``num_processes``.
        TypeError: something is not a function.
        ToolProcessError: a worker process can't be started, or does not find the functions.

    Example:
        >>> from torchrl.envs.transforms import Compose
        >>> def clock() -> str:
        ...     '''Tell the time.'''
        ...     return "12:30"
        >>> data = DataLoadingPrimer([{"prompt": "What time is it?"}])
        >>> env = ChatEnv(batch_size=(2,)).append_transform(Compose(data, FunctionTools([clock])))
        >>> call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
        >>> batch = env.reset().set("text_response", [call, "Late."])
        >>> out = env.step(batch)["next"]
        >>> out["history"].prompt.to_chats()[0][-1]
        {'role': 'tool', 'content': '12:30', 'name': 'clock'}
        >>> out["done"].flatten()
        tensor([False,  True])
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any]],
        *,
        num_processes: int | None = None,
        max_memory_mb: int | None = None,
        timeout_s: float = 30.0,
        max_result_bytes: int = MAX_RESULT_BYTES,
        show_schemas: bool = True,
    ) -> None:
        super().__init__(
            timeout_s=timeout_s, max_result_bytes=max_result_bytes, show_schemas=show_schemas
        )
        if callable(functions):
            raise TypeError(f"FunctionTools takes a list of functions: [{functions!r:.80}].")
        if not functions:
            raise ValueError("FunctionTools needs at least one function.")
        is_named = isinstance(functions, Mapping)
        named = functions.items() if is_named else [(None, f) for f in functions]
        self.functions: dict[str, Callable[..., Any]] = {}
        self.tools: dict[str, Tool] = {}
        self._offered = self.tools
        for name, function in named:
            tool = function_tool(function, name=name)
            if tool.name in self.tools:
                two = f"two functions named {tool.name!r}"
                raise ValueError(f"FunctionTools has {two}. Give them names: {{name: function}}.")
            self.tools[tool.name] = tool
            self.functions[tool.name] = function
        self._processes: ToolProcesses | None = None
        if num_processes is not None:
            self._processes = ToolProcesses(
                self.functions,
                num_processes=num_processes,
                timeout_s=timeout_s,
                max_result_bytes=max_result_bytes,
                max_memory_mb=max_memory_mb,
            )
        elif max_memory_mb is not None:
            raise ValueError(
                "FunctionTools: max_memory_mb limits worker processes; give num_processes too."
            )

    def bind(self, episode: Episode, call: ToolCall) -> Job:
        """A call of a function."""
        del episode
        if self._processes is None:
            return self.job(call, functools.partial(self.functions[call.name], **call.arguments))
        run = functools.partial(self._processes.call, call.name, call.arguments)
        # The processes make text of the result, and keep the deadline from when one takes it up.
        return self.job(call, run)._replace(call=run, timeout_s=math.inf)

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.close()


# Runs the Python code that the policy writes, in a sandbox.
#
# Shape legend: B rows.

_START_S: Final = 30.0
"""How long a sandbox may take beside the code's own time."""


def python(code: str) -> str:  # type: ignore[empty-body]
    """Run a Python program and get what it prints.

    Args:
        code: The program.
    """


class PythonInterpreter(ToolSource):
    """Runs Python code of the policy's turn and answers with its output.

    Code is taken from fenced blocks marked ``python``; each is answered with a message of its own,
    ``Code block 1 executed successfully:`` or ``Code block 1 failed:`` and what it printed, the
    traceback included. With ``offer_tool`` the policy may also call the tool ``python(code)``.

    Everything runs in a :class:`~torchrl_envs.sandbox.Sandbox`. The code of different rows runs at
    the same time; of one row too, unless it is ``persistent``.

    Args:
        persistent: variables live on between the blocks and turns of an episode, in an interpreter
            of its own. At its deadline or memory limit it ends, the model is told, and the next
            block starts with a new one.
        timeout_s: deadline of one block, in seconds.
        tool_role: role of the answers to blocks.
        read_code_blocks: take code from fenced blocks.
        offer_tool: offer the tool ``python``.
        sandbox: where code runs; may be shared by several environments. One with default limits is
            made if none is given.
        max_result_bytes: longer output is cut, with a mark; bytes of UTF-8.
        show_schemas: whether the chat template shows the tool to the model, if it is offered.

    Raises:
        SandboxUnavailableError: nothing isolates code on this machine.
        ValueError: neither blocks are read nor the tool is offered, or a number is not positive.

    Example:
        >>> env = ChatEnv(batch_size=(8,)).append_transform(PythonInterpreter(persistent=True))
    """

    def __init__(
        self,
        *,
        persistent: bool = False,
        timeout_s: float = 10.0,
        tool_role: str = "tool",
        read_code_blocks: bool = True,
        offer_tool: bool = False,
        sandbox: Sandbox | None = None,
        max_result_bytes: int = MAX_RESULT_BYTES,
        show_schemas: bool = True,
    ) -> None:
        super().__init__(
            timeout_s=timeout_s, max_result_bytes=max_result_bytes, show_schemas=show_schemas
        )
        if not (read_code_blocks or offer_tool):
            raise ValueError(
                "PythonInterpreter: no code would ever run. Set read_code_blocks=True, "
                "offer_tool=True or both."
            )
        self.persistent = persistent
        self.tool_role = tool_role
        self.read_code_blocks = read_code_blocks
        self.sandbox = Sandbox(limits=SandboxLimits()) if sandbox is None else sandbox
        self._offered = {"python": function_tool(python)} if offer_tool else {}

    # Lifecycle ----------------------------------------------------------------------------------

    def begin(self, episode: Episode) -> None:
        """Give an episode an interpreter of its own, which starts when it is first needed."""
        if self.persistent:
            session = SandboxSession(self.sandbox)
            episode.resources.add(self, session, close=session.close)

    # What is run --------------------------------------------------------------------------------

    def bind(self, episode: Episode, call: ToolCall) -> Job:
        """A call of ``python``."""
        code = call.arguments["code"]
        return self._job(episode, code, lambda text, _: tool_message(call, text))

    def read_turn(self, episode: Episode, text: str) -> list[Job | Answer]:
        """The blocks of Python code in a turn."""
        items: list[Job | Answer] = []
        blocks = code_blocks(text) if self.read_code_blocks else ()
        for number, block in enumerate((b for b in blocks if b.language in PYTHON), 1):
            say = functools.partial(self._message, number)
            if block.is_closed:
                items.append(self._job(episode, block.code, say, block.position))
            else:
                message = say("It is not closed with ```, so it was not run.", True)
                items.append(Answer(message, is_error=True, position=block.position))
        return items

    def _message(self, number: int, text: str, failed: bool) -> Any:
        """What a block of code is answered with."""
        ended = "failed" if failed else "executed successfully"
        return {"role": self.tool_role, "content": f"Code block {number} {ended}:\n{text}"}

    def _job(
        self, episode: Episode, code: str, say: Callable[[str, bool], Any], position: int = 0
    ) -> Job:
        """Run code; what it gave is said in a message, with whether it failed."""

        def phrase(outcome: Outcome) -> Answer:
            if outcome.error is not None:
                return Answer(say(result_text(outcome), True), is_error=True, position=position)
            result: SandboxResult = outcome.value
            text = clean_text(output_text(result, timeout_s=self.timeout_s), self.max_result_bytes)
            failed = not result.succeeded
            return Answer(say(text, failed), is_error=failed, position=position)

        runner = episode.resources.get(self, self.sandbox)
        run = functools.partial(runner.run, code, timeout_s=self.timeout_s)
        lane = episode.id if self.persistent else None
        return Job(run, phrase, self.timeout_s + _START_S, lane, position)


def output_text(result: SandboxResult, *, timeout_s: float) -> str:
    """What a program printed, and why it ended where it did not end by itself."""
    written = [output for output in (result.stdout, result.stderr) if output]
    text = "".join(output if output.endswith("\n") else f"{output}\n" for output in written)
    status = result.exit_status
    if result.timed_out:
        text += f"Stopped: it did not end within {timeout_s:g} s.\n"
    elif result.out_of_memory:
        text += "Stopped: it used too much memory.\n"
    elif status is not None and status < 0:
        text += f"Killed by signal {-status}.\n"
    elif status and not result.stderr:
        text += f"Exit code {status}.\n"
    if result.state_lost:
        text += "The interpreter was restarted: all variables are gone.\n"
    return text

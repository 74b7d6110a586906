"""Python interpreter as a tool: code that the policy writes runs in a sandbox.

Shape legend: B rows.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs.code_blocks import PYTHON, code_blocks
from torchrl_envs.concurrency.outcome import Outcome
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.tool_source import Answer, Job, ToolSource, tool_message
from torchrl_envs.sandbox import Sandbox, SandboxLimits, SandboxResult, SandboxSession
from torchrl_envs.tool_results import MAX_RESULT_BYTES, clean_text, result_text
from torchrl_envs.tool_schemas import function_tool

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
        episode.note("isolation", self.sandbox.isolation)
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
        """Return what a block of code is answered with."""
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
    """Return what a program printed, and why it ended where it did not end by itself."""
    written = [output for output in (result.stdout, result.stderr) if output]
    text = "".join(output if output.endswith("\n") else f"{output}\n" for output in written)
    status = result.exit_status
    if result.timed_out:
        text += f"Stopped: it did not end within {timeout_s:g} s.\n"
    elif result.out_of_memory:
        text += "Stopped: it used too much memory.\n"
    elif result.out_of_disk:
        text += "Stopped: it wrote too much, or too many files.\n"
    elif status is not None and status < 0:
        text += f"Killed by signal {-status}.\n"
    elif status and not result.stderr:
        text += f"Exit code {status}.\n"
    if result.state_lost:
        text += "The interpreter was restarted: all variables are gone.\n"
    return text

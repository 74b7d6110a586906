"""Runs the Python code that the policy writes, in a sandbox.

Shape legend: B rows.
"""

from collections.abc import Callable, Mapping
from typing import Final

from torchrl_data.tool_calls.parse import ToolCall
from torchrl_envs.concurrency.calls import Outcome
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.tool_source import Answer, Job, ToolSource, tool_message
from torchrl_envs.sandbox import Sandbox, SandboxLimits, SandboxResult, SandboxSession
from torchrl_envs.tool_calls.code_blocks import PYTHON, CodeBlock, code_blocks
from torchrl_envs.tool_calls.results import MAX_RESULT_BYTES, clean_text, result_text
from torchrl_envs.tool_calls.schemas import Tool, function_tool

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
        self._tools = {"python": function_tool(python)} if offer_tool else {}

    # Lifecycle ----------------------------------------------------------------------------------

    def begin(self, episode: Episode) -> None:
        """Give an episode an interpreter of its own, which starts when it is first needed."""
        if self.persistent:
            session = SandboxSession(self.sandbox)
            episode.resources.add(self, session, close=session.close)

    # Called as a tool ---------------------------------------------------------------------------

    def tool_names(self) -> dict[str, str]:
        """``python``, if it is offered."""
        return dict.fromkeys(self._tools, "PythonInterpreter")

    def tools_of(self, episode: Episode) -> Mapping[str, Tool]:
        """``python``, for every episode, if it is offered."""
        del episode
        return self._tools

    def bind(self, episode: Episode, call: ToolCall) -> Job:
        """A call of ``python``."""

        def phrase(outcome: Outcome) -> Answer:
            text, failed = self._put(outcome)
            return Answer(tool_message(call, text), is_error=failed)

        return self._job(episode, call.arguments["code"], phrase)

    # Code blocks --------------------------------------------------------------------------------

    def read_turn(self, episode: Episode, text: str) -> list[Job | Answer]:
        """The blocks of Python code in a turn."""
        if not self.read_code_blocks:
            return []
        blocks = [block for block in code_blocks(text) if block.language in PYTHON]
        return [self._run_block(episode, number, block) for number, block in enumerate(blocks, 1)]

    def _run_block(self, episode: Episode, number: int, block: CodeBlock) -> Job | Answer:
        def answer(text: str, failed: bool) -> Answer:
            ended = "failed" if failed else "executed successfully"
            content = f"Code block {number} {ended}:\n{text}"
            message = {"role": self.tool_role, "content": content}
            return Answer(message, is_error=failed, position=block.position)

        if not block.is_closed:
            return answer("It is not closed with ```, so it was not run.", True)
        job = self._job(episode, block.code, lambda outcome: answer(*self._put(outcome)))
        return job._replace(position=block.position)

    # Running ------------------------------------------------------------------------------------

    def _job(self, episode: Episode, code: str, phrase: Callable[[Outcome], Answer]) -> Job:
        runner = episode.resources.get(self, self.sandbox)

        def run() -> SandboxResult:
            return runner.run(code, timeout_s=self.timeout_s)

        lane = episode.id if self.persistent else None
        return Job(run, phrase, self.timeout_s + _START_S, lane=lane)

    def _put(self, outcome: Outcome) -> tuple[str, bool]:
        """What the model reads about a run, and whether it failed."""
        if outcome.error is not None:
            return result_text(outcome), True
        result: SandboxResult = outcome.value
        text = output_text(result, timeout_s=self.timeout_s)
        return clean_text(text, self.max_result_bytes), not result.succeeded


def output_text(result: SandboxResult, *, timeout_s: float) -> str:
    """What a program printed, and why it ended where it did not end by itself."""
    text = _lines(result.stdout) + _lines(result.stderr)
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


def _lines(text: str) -> str:
    """Text that ends its last line."""
    return text if not text or text.endswith("\n") else f"{text}\n"

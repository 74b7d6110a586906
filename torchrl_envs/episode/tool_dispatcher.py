"""Reads each turn of the policy once, runs what it asks for, and appends the answers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchrl_data.conversation.messages import Message
from torchrl_data.tool_calls.parse import MalformedCall, ToolCall, TurnParser, parse_tool_calls
from torchrl_envs.tool_calls.results import error_text

from .driving import PendingCall, PendingCalls
from .episode import Episode, ToolCallRecord
from .tool_source import Answer, Job, ToolSource, tool_message

if TYPE_CHECKING:
    from torchrl_envs.tool_calls.schemas import Tool


class ToolDispatcher:
    """Answers the turns of episodes with what all sources of tools say.

    Args:
        parse: finds the calls of a turn, in the model's format.
    """

    def __init__(self, parse: TurnParser = parse_tool_calls) -> None:
        self.parse = parse
        self.sources: Sequence[ToolSource] = ()
        """All sources of the environment, in order; the environment keeps it up to date."""

    def show_tools(self, episode: Episode) -> None:
        """Give an episode the schemas that its prompt shows, of all sources in order.

        Args:
            episode: that begins.
        """
        schemas = [
            tool.schema
            for source in self.sources
            if source.show_schemas and source.concerned([episode])
            for tool in source.tools_of(episode).values()
        ]
        if schemas:
            episode.tools = schemas

    def after_turn(self, episode: Episode) -> Any:
        """Answer a turn.

        Args:
            episode: that has just taken one; nothing happens where the policy did not speak last.

        Returns:
            A coroutine that waits for the jobs, or ``None`` if there is nothing to run.
        """
        message = episode.last_message
        if message["role"] != "assistant":
            return None
        items = self._read(episode, message["content"])
        if not items:
            return None
        if any(isinstance(item, Job) for item in items):
            return self._run(episode, items)
        return _append(episode, [item for item in items if isinstance(item, Answer)])

    def _read(self, episode: Episode, text: str) -> list[Job | Answer]:
        """What a turn asks for, of all sources, in the order of the text."""
        items: list[Job | Answer] = []
        takes_part = [bool(source.concerned([episode])) for source in self.sources]
        tools = [
            source.tools_of(episode) if is_concerned else {}
            for source, is_concerned in zip(self.sources, takes_part, strict=True)
        ]
        if any(tools):
            parsed = self.parse(text)
            for call, position in zip(parsed.calls, parsed.positions, strict=True):
                items.append(self._bind(tools, episode, call, position))
        for number, source in enumerate(self.sources):
            for item in source.read_turn(episode, text) if takes_part[number] else ():
                # Lanes belong to their source.
                if isinstance(item, Job) and item.lane is not None:
                    item = item._replace(lane=(number, item.lane))
                items.append(item._replace(tool=item.tool or type(source).__name__))
        items.sort(key=lambda item: item.position)
        return items

    def _bind(
        self,
        tools: Sequence[Mapping[str, "Tool"]],
        episode: Episode,
        call: ToolCall | MalformedCall,
        position: int,
    ) -> Job | Answer:
        """A call that is ready to run, or what is wrong with it; ``tools`` of each source."""
        if isinstance(call, MalformedCall):
            return _refusal(None, f"malformed tool call: {call.error}", position)
        for number, own in enumerate(tools):
            tool = own.get(call.name)
            if tool is not None:
                if call.is_text:
                    call = call._replace(arguments=tool.typed(call.arguments), is_text=False)
                error = tool.argument_error(call.arguments)
                if error is not None:
                    return _refusal(call, f"{call.name}: {error}", position)
                job = self.sources[number].bind(episode, call)
                lane = None if job.lane is None else (number, job.lane)
                return Job(job.call, job.phrase, job.timeout_s, lane, position, call.name)
        names = [name for own in tools for name in own]
        return _refusal(call, f"unknown tool {call.name!r:.80}; the tools are {names}", position)

    async def _run(self, episode: Episode, items: Sequence[Job | Answer]) -> None:
        jobs = [item for item in items if isinstance(item, Job)]
        outcomes = iter(
            await PendingCalls([PendingCall(job.call, job.timeout_s, job.lane) for job in jobs])
        )
        answers, seconds = [], []
        for item in items:
            outcome = None
            if isinstance(item, Job):
                outcome = next(outcomes)
                item = item.phrase(outcome)._replace(tool=item.tool)
            answers.append(item)
            seconds.append(None if outcome is None else outcome.seconds)
        _append(episode, answers, seconds)


def _append(
    episode: Episode, answers: Sequence[Answer], seconds: Sequence[float | None] | None = None
) -> None:
    """Say, count and end what answers say, in order; the first that ends it says why."""
    messages: list[Message] = []
    end: Answer | None = None
    for answer, took in zip(answers, seconds or [None] * len(answers), strict=True):
        episode.num_tool_calls += 1
        episode.num_tool_errors += answer.is_error
        called = ToolCallRecord(answer.tool, episode.num_turns, took, answer.is_error)
        episode.tool_calls = (*episode.tool_calls, called)
        if answer.message is not None:
            messages.append(answer.message)
        if answer.stop_reason and end is None:
            end = answer
    if messages:
        episode.say(*messages)
    if end is not None:
        (episode.truncate if end.is_truncation else episode.terminate)(end.stop_reason)


def _refusal(call: ToolCall | None, error: str, position: int) -> Answer:
    tool = "" if call is None else call.name
    message = tool_message(call, error_text(error))
    return Answer(message, is_error=True, position=position, tool=tool)

"""Reads each turn of the policy once, runs what it asks for, and appends the answers.

Shape legend: B rows.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded

from torchrl_data.conversation.object_entries import read_objects, write_objects
from torchrl_data.keys import (
    DONE,
    NUM_TOOL_CALLS,
    NUM_TOOL_ERRORS,
    PROMPT,
    STOP_REASON,
    TERMINATED,
    TOOLS,
    TRUNCATED,
)
from torchrl_data.layout.conversation_io import active_rows, read_conversations, write_conversations
from torchrl_data.tool_calls.parse import MalformedCall, ToolCall, TurnParser, parse_tool_calls
from torchrl_envs.concurrency.calls import Call
from torchrl_envs.tool_calls.results import error_text

from .episode_transform import EpisodeTransform
from .tool_source import Answer, Job, ToolSource, tool_message

_COUNTS: Final = (NUM_TOOL_CALLS, NUM_TOOL_ERRORS)


class ToolDispatcher(EpisodeTransform):
    """The first transform of an :class:`~torchrl_envs.EpisodeEnv`.

    Writes ``num_tool_calls`` and ``num_tool_errors``, int64 ``[B, 1]``, over the episode, where the
    environment has a :class:`ToolSource`.

    Args:
        parse: finds the calls of a turn, in the model's format.
    """

    def __init__(self, parse: TurnParser = parse_tool_calls) -> None:
        super().__init__()
        self.parse = parse
        self.sources: Sequence[ToolSource] = ()
        """All sources of the environment, in order; the environment keeps it up to date."""

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:  # type: ignore[override]
        """Declares the two counts."""
        if self.sources:
            shape = torch.Size((*observation_spec.shape, 1))
            for key in _COUNTS:
                observation_spec[key] = Unbounded(shape=shape, dtype=torch.int64)
        return observation_spec

    # Reset --------------------------------------------------------------------------------------

    def show_tools(self, batch: TensorDictBase, rows: Sequence[int]) -> None:
        """Write the schemas that the prompts of some rows show, of all sources in order."""
        sources = [source for source in self.sources if source.show_schemas]
        if not any(source.tools_of(row) for source in sources for row in rows):
            return
        schemas = read_objects(batch, TOOLS)
        for row in rows:
            schemas[row] = [t.schema for source in sources for t in source.tools_of(row).values()]
        write_objects(batch, TOOLS, schemas)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        if not self.sources:
            return tensordict_reset
        mask = tensordict.get("_reset", None)
        for key in _COUNTS:
            held = tensordict.get(key, None)
            if held is None or mask is None:
                count = torch.zeros((*tensordict.batch_size, 1), dtype=torch.int64)
            else:
                count = torch.where(mask.view_as(held), 0, held)
            tensordict_reset.set(key, count)
        return tensordict_reset

    # Step ---------------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if not self.sources:
            return next_tensordict
        prompt = read_conversations(next_tensordict, PROMPT, who=type(self).__name__)
        running = active_rows(tensordict) & ~next_tensordict.get(DONE).view(-1)
        turns: dict[int, list[Job | Answer]] = {}
        for row in running.nonzero().squeeze(-1).tolist():
            message = prompt.last_message(row)
            if message["role"] == "assistant":
                items = self._read(row, message["content"])
                if items:
                    turns[row] = items
        answers = self._run(turns) if turns else {}
        _count(tensordict, next_tensordict, answers)
        if answers:
            messages = [
                [a.message for a in answers.get(row, ()) if a.message is not None]
                for row in range(len(prompt))
            ]
            write_conversations(next_tensordict, PROMPT, prompt.append_messages(messages))
            _end(next_tensordict, answers)
        return next_tensordict

    def _read(self, row: int, text: str) -> list[Job | Answer]:
        """What a turn asks for, of all sources, in the order of the text."""
        items: list[Job | Answer] = []
        sources = self.sources
        if any(source.tools_of(row) for source in sources):
            parsed = self.parse(text)
            for call, position in zip(parsed.calls, parsed.positions, strict=True):
                items.append(_bind(sources, row, call, position))
        for number, source in enumerate(sources):
            for item in source.read_turn(row, text):
                # Lanes belong to their source.
                if isinstance(item, Job) and item.lane is not None:
                    item = item._replace(lane=("lane", number, item.lane))
                items.append(item)
        items.sort(key=lambda item: item.position)
        return items

    def _run(self, turns: Mapping[int, Sequence[Job | Answer]]) -> dict[int, list[Answer]]:
        """Run the jobs of all rows at once; the answers of a row are in the order of the turn."""
        lanes: dict[object, list[Job]] = {}
        slots: dict[tuple[int, int], tuple[object, int]] = {}
        for row, items in turns.items():
            for number, item in enumerate(items):
                if isinstance(item, Job):
                    key = (row, number) if item.lane is None else item.lane
                    lane = lanes.setdefault(key, [])
                    slots[row, number] = (key, len(lane))
                    lane.append(item)
        chains: list[list[Call]] = [[job.call for job in lane] for lane in lanes.values()]
        timeouts = [[job.timeout_s for job in lane] for lane in lanes.values()]
        outcomes = dict(zip(lanes, self.calls.run(chains, timeouts), strict=True))

        def answer(row: int, number: int, item: Job | Answer) -> Answer:
            if isinstance(item, Answer):
                return item
            key, place = slots[row, number]
            return item.phrase(outcomes[key][place])

        return {
            row: [answer(row, number, item) for number, item in enumerate(items)]
            for row, items in turns.items()
        }


def _bind(
    sources: Sequence[ToolSource], row: int, call: ToolCall | MalformedCall, position: int
) -> Job | Answer:
    """A call that is ready to run, or what is wrong with it."""
    if isinstance(call, MalformedCall):
        return _refusal(None, f"malformed tool call: {call.error}", position)
    for number, source in enumerate(sources):
        tool = source.tools_of(row).get(call.name)
        if tool is not None:
            if call.is_text:
                call = call._replace(arguments=tool.typed(call.arguments), is_text=False)
            error = tool.argument_error(call.arguments)
            if error is not None:
                return _refusal(call, f"{call.name}: {error}", position)
            job = source.bind(row, call)
            lane = None if job.lane is None else ("lane", number, job.lane)
            return job._replace(lane=lane, position=position)
    names = [name for source in sources for name in source.tools_of(row)]
    return _refusal(call, f"unknown tool {call.name!r:.80}; the tools are {names}", position)


def _refusal(call: ToolCall | None, error: str, position: int) -> Answer:
    return Answer(tool_message(call, error_text(error)), is_error=True, position=position)


def _count(
    batch: TensorDictBase, next_batch: TensorDictBase, answers: Mapping[int, Sequence[Answer]]
) -> None:
    """Add the calls and the errors of a step to the counts."""
    size = batch.numel()
    calls, errors = [0] * size, [0] * size
    for row, given in answers.items():
        calls[row] = len(given)
        errors[row] = sum(answer.is_error for answer in given)
    for key, new in zip(_COUNTS, (calls, errors), strict=True):
        count = torch.tensor(new).view(*batch.batch_size, 1)
        held = batch.get(key, None)
        next_batch.set(key, count if held is None else held + count)


def _end(batch: TensorDictBase, answers: Mapping[int, Sequence[Answer]]) -> None:
    """End the episodes that an answer says are over; its first such answer says why."""
    ends: dict[int, Answer] = {}
    for row, given in answers.items():
        for answer in given:
            if answer.stop_reason:
                ends.setdefault(row, answer)
    if not ends:
        return
    reasons = read_objects(batch, STOP_REASON, "")
    for row, answer in ends.items():
        reasons[row] = answer.stop_reason
    write_objects(batch, STOP_REASON, reasons)
    for key, is_truncation in ((TERMINATED, False), (TRUNCATED, True)):
        over = torch.zeros(batch.numel(), dtype=torch.bool)
        for row, answer in ends.items():
            over[row] = answer.is_truncation is is_truncation
        over = over.view(*batch.batch_size, 1)
        batch.set(key, batch.get(key) | over)
        batch.set(DONE, batch.get(DONE) | over)

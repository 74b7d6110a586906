"""Messages of a recorded rollout as training data have them: calls and reasoning by themselves.

A turn of the policy is recorded as the text that it sampled. Chat templates take the calls of tools
and the reasoning in entries of their own, and write the tokens for them; the text of such a token
in a content stays text when it is encoded.
"""

from collections.abc import Sequence

from torchrl_data.message_edits import split_reasoning
from torchrl_data.messages import Message
from torchrl_data.tool_calls.call_messages import message_with_calls
from torchrl_data.tool_calls.formats import FORMATS
from torchrl_data.tool_calls.parser import parse_tool_calls
from torchrl_data.tool_calls.records import ParsedTurn, ToolCall
from torchrl_envs.tool_schemas import typed_arguments

from .samples import RolloutSample

_THOUGHT, _THOUGHT_END = "<think>", "</think>"


def sampled_messages(sample: RolloutSample) -> list[int]:
    """Numbers of the messages that the policy wrote, in order.

    Args:
        sample: whose spans are read. Where they name no message, all that the assistant says count.
    """
    spans = sample.tokens.spans
    found = {s.message for s in spans if s.writer == "model" and s.message is not None}
    said = [n for n, message in enumerate(sample.messages) if message.get("role") == "assistant"]
    return sorted(found) or said


def messages_to_train(sample: RolloutSample) -> list[Message]:
    """The conversation up to the last turn of the policy.

    Reasoning is moved to ``reasoning_content`` where the tokenizer has a token that ends it. Calls
    are moved to ``tool_calls`` where a format of :data:`FORMATS` reads the very calls that the
    record has of the turn, and nothing is said after them; a call that is broken stays text.

    Args:
        sample: a recorded rollout.
    """
    turns = sampled_messages(sample)
    messages = [dict(message) for message in sample.messages[: turns[-1] + 1 if turns else None]]
    if _has_thought_token(sample):
        for number in turns:
            messages[number] = _with_reasoning(messages[number])
    texts = [messages[number].get("content") for number in turns]
    parsed = _read_calls(sample, [text if isinstance(text, str) else "" for text in texts])
    for number, text, turn in zip(turns, texts, parsed, strict=True):
        calls = [_typed(call, sample) for call in turn.calls if isinstance(call, ToolCall)]
        before = str(text)[: turn.positions[0]] if calls else ""
        if calls and len(calls) == len(turn.calls) and turn.content == before.strip():
            messages[number] = message_with_calls(messages[number], before, calls)
    return messages


def _has_thought_token(sample: RolloutSample) -> bool:
    start = 0
    for span in sample.tokens.spans:
        end = start + span.length
        if span.writer == "model" and _THOUGHT_END in sample.tokens.texts[start:end]:
            return True
        start = end
    return False


def _with_reasoning(message: Message) -> Message:
    """Split a turn's reasoning off, which the chat template may have begun in the prompt."""
    text = message.get("content")
    if not isinstance(text, str) or _THOUGHT_END not in text:
        return message
    opened = text if text.lstrip().startswith(_THOUGHT) else _THOUGHT + text
    return split_reasoning({**message, "content": opened})


def _read_calls(sample: RolloutSample, texts: Sequence[str]) -> list[ParsedTurn]:
    """The turns in the format that reads most of the recorded calls, and no others."""
    recorded = [
        sorted(call.tool for call in sample.tool_calls if call.turn == turn)
        for turn in range(1, len(texts) + 1)
    ]
    most, best = 0, [ParsedTurn(text, []) for text in texts]
    for format in FORMATS if any(recorded) else ():
        turns = [parse_tool_calls(text, format) for text in texts]
        names = [
            sorted(call.name if isinstance(call, ToolCall) else "" for call in turn.calls)
            for turn in turns
        ]
        agree = all(own in ([], known) for own, known in zip(names, recorded, strict=True))
        if agree and sum(map(len, names)) > most:
            most, best = sum(map(len, names)), turns
    return best


def _typed(call: ToolCall, sample: RolloutSample) -> ToolCall:
    """The call with the values that its text stands for, as far as the tool's schema says."""
    if not call.is_text:
        return call
    functions = [tool.get("function") or {} for tool in sample.tools or ()]
    schema = next((f for f in functions if f.get("name") == call.name), {})
    return call._replace(arguments=typed_arguments(call.arguments, schema.get("parameters")))

"""Requests of a program and the answers to them, whatever the protocol."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torchrl_data.messages import Message
from torchrl_data.tool_calls.parser import TurnParser
from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs.datasets.row_checks import is_text
from torchrl_envs.tool_schemas import typed_arguments

LENGTH: Final = "length"
TOOL_CALLS: Final = "tool_calls"
KEPT: Final = ("role", "name", "tool_call_id", "reasoning_content")
"""What a message says beside its content and its calls."""
MOST_TOKENS: Final = 1 << 30
"""No turn is longer; whoever asks for more asks for no bound."""


class RequestError(ValueError):
    """A request that can't be answered as it is; the program is told so."""

    code = "invalid_request_error"
    status = 400


class RequestTooLargeError(RequestError):
    """A request that is longer than the server reads."""

    code = "request_too_large"
    status = 413

    def __init__(self, num_bytes: int, limit: int) -> None:
        super().__init__(
            f"the request has {num_bytes} bytes, and at most {limit} are read: shorten it, or "
            "raise AgentProgram(max_request_bytes=...)"
        )


class PromptTooLongError(RequestError):
    """A prompt that leaves the model no room for a turn: the program may shorten it."""

    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, limit: int) -> None:
        # Clients and frameworks look for these words of the two companies.
        super().__init__(
            f"This model's maximum context length is {limit} tokens with room for an answer, and "
            f"the messages have at least {num_tokens} (prompt is too long: {num_tokens} tokens > "
            f"{limit} maximum)"
        )


class TurnRequest(NamedTuple):
    """Request of a program for a turn of the policy."""

    messages: list[Message]
    """The whole conversation, as a chat template takes it."""
    tools: list[dict[str, Any]] | None
    """Their schemas, as OpenAI's chat completions have them."""
    max_new_tokens: int | None
    """Most tokens of the turn."""
    streams: bool = False
    with_usage: bool = False
    """A stream of chat completions ends with the numbers of tokens."""
    stops: tuple[str, ...] = ()
    """Texts that end the turn and that the program does not want to see."""
    failed: tuple[Any, ...] = ()
    """The ids of calls whose results are said to be errors; Anthropic's protocol alone says so."""
    agent: str = ""
    """The author that a header names; empty where none does."""


class TurnReply(NamedTuple):
    """A turn of the policy, as the program is told of it."""

    message: Message
    """With ``content``, ``tool_calls`` or both, as OpenAI's chat completions have them."""
    finish_reason: str
    """``"stop"``, ``"length"`` or ``"tool_calls"``."""
    num_prompt_tokens: int
    num_tokens: int
    stop: str | None = None
    """The text at which it ended; not in its content."""


class Accepted(NamedTuple):
    """Options that requests may give of how tokens are drawn."""

    values: Mapping[str, Any]
    """What happens anyway, by parameter."""
    ignored: Sequence[str]
    """Parameters that may say anything."""


def reply_to(
    request: TurnRequest,
    text: str,
    *,
    finish_reason: str,
    parse: TurnParser,
    num_prompt_tokens: int,
    num_tokens: int,
    used_ids: Collection[str] = (),
) -> TurnReply:
    """A turn of the policy, with its tool calls.

    Tool calls are read where the request has tools; a turn in which one of them can't be read is
    text, all of it.

    Args:
        request: what it answers.
        text: what the policy wrote.
        finish_reason: ``"stop"`` or ``"length"``.
        parse: finds the calls of a turn.
        num_prompt_tokens: what the policy read.
        num_tokens: what it wrote.
        used_ids: of earlier calls.
    """
    ends = [(at, stop) for stop in request.stops if (at := text.find(stop)) >= 0]
    end, stop = min(ends, default=(len(text), None))
    text = text[:end]
    message: Message = {"role": "assistant", "content": text}
    tools = request.tools or ()
    parsed = parse(text) if tools else None
    if parsed is not None and parsed.calls:
        calls = [call for call in parsed.calls if isinstance(call, ToolCall)]
        # JSON may spell half a character, which can't be sent.
        if len(calls) == len(parsed.calls) and is_text([call[:2] for call in calls]):
            message["content"] = parsed.content or None
            # Each call has the id that the model gives it. One without, or with a used one, gets a
            # name that some templates ask for: nine letters and digits, and the same in each
            # rollout, because they are in the prompts that follow.
            ids, written = set(used_ids), []
            for call in calls:
                own, number = call.id, len(ids)
                while not own or own in ids:
                    own, number = f"call{number:05}", number + 1
                ids.add(own)
                arguments = call.arguments
                schema = next((t for t in tools if t["function"]["name"] == call.name), None)
                if call.is_text and schema is not None:
                    arguments = typed_arguments(arguments, schema["function"].get("parameters"))
                function = {"name": call.name, "arguments": json.dumps(arguments)}
                written.append({"id": own, "type": "function", "function": function})
            message["tool_calls"] = written
            finish_reason = finish_reason if finish_reason == LENGTH else TOOL_CALLS
    return TurnReply(message, finish_reason, num_prompt_tokens, num_tokens, stop)


def comparable(message: Message) -> tuple[Any, ...]:
    """Return what is the same in two spellings of one message.

    Args:
        message: of a request, or of a reply.
    """
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        calls.append(
            (call.get("id"), call["function"]["name"], json.dumps(arguments, sort_keys=True))
        )
    others = [message.get(name) or None for name in KEPT]
    if message["role"] == "assistant":
        others[KEPT.index("name")] = None  # whose agent it is, which the policy did not write
    return (*others, message.get("content") or "", tuple(calls))

"""What a program asks for and what it is told, whatever the protocol."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torchrl_data.messages import PLACEHOLDER_ROLE, Message, check_messages
from torchrl_data.tool_calls import ToolCall, TurnParser
from torchrl_envs.tool_schemas import typed_arguments

LENGTH: Final = "length"
TOOL_CALLS: Final = "tool_calls"
KEPT: Final = ("role", "name", "tool_call_id", "reasoning_content")
"""What a message says beside its content and its calls."""
_OF_TOOLS: Final = ("tool_choice", "parallel_tool_calls")
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
    """What a program asks for: a turn of the policy."""

    messages: list[Message]
    """The whole conversation, as a chat template takes it."""
    tools: list[dict[str, Any]] | None
    """Their schemas, as OpenAI's chat completions have them."""
    max_new_tokens: int | None
    """Most tokens of the turn."""
    streams: bool = False
    with_usage: bool = False
    """A stream of chat completions ends with the numbers of tokens."""


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
    """What requests may say about how tokens are drawn."""

    values: Mapping[str, Any]
    """What happens anyway, by parameter."""
    ignored: Sequence[str]
    """Parameters that may say anything."""


# What is asked ------------------------------------------------------------------------------------


def check_parameters(
    body: Any, accepted: Accepted, *, known: frozenset[str], usual: Mapping[str, Sequence[Any]]
) -> None:
    """Nothing is asked for that would not happen.

    Args:
        body: of a request.
        accepted: by the policy and whoever runs the program.
        known: parameters that are read, or say nothing about how tokens are drawn.
        usual: values of others that ask for what happens anyway.

    Raises:
        RequestError: it is no object, or asks for what can't take effect.
    """
    if not isinstance(body, Mapping):
        raise RequestError(f"the body is a JSON object, got {type(body).__name__}")
    passed = {*known, *accepted.ignored, *(() if body.get("tools") else _OF_TOOLS)}
    for name, value in body.items():
        if name in passed or value is None:
            continue
        fine = [*usual.get(name, ()), *([accepted.values[name]] if name in accepted.values else [])]
        given = [value] if name == "stop" and isinstance(value, str) else value
        if given not in fine:
            raise RequestError(
                f"{name}={value!r:.80} can't take effect: turns are drawn as the policy that is "
                "trained draws them, as plain text, so that their log-probs are known. Leave it "
                f"out, or let AgentProgram(ignored_parameters=[{name!r}]) ignore it"
            )


def turn_request(
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    limits: Sequence[Any],
    *,
    streams: Any = False,
) -> TurnRequest:
    """What is asked for, checked.

    Args:
        messages: the conversation.
        tools: schemas.
        limits: most tokens of the turn; ``None`` where none is given.
        streams: whether the answer is to be streamed, as the request says it.

    Raises:
        RequestError: there is nothing to answer, or no such role, limit or way to stream.
    """
    if not isinstance(streams, bool | None):
        raise RequestError(f"stream is true or false, got {streams!r:.80}")
    if not messages:
        raise RequestError("there is no message")
    if any(message.get("role") == PLACEHOLDER_ROLE for message in messages):
        raise RequestError(f"no message has the role {PLACEHOLDER_ROLE!r}")
    try:
        check_messages(messages)
        json.dumps([messages, tools], ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise RequestError(f"messages or tools: {error}") from error
    if messages[-1]["role"] == "assistant":
        raise RequestError("the last message is the assistant's: nothing is left to be answered")
    given = []
    for limit in limits:
        whole = int(limit) if isinstance(limit, float) and limit.is_integer() else limit
        if whole is not None and (type(whole) is not int or whole < 1):
            raise RequestError(f"the most tokens are a whole number from 1 on, got {limit!r:.80}")
        given += [] if whole is None else [whole]
    bound = min(given, default=None)
    bound = None if bound is None else min(bound, MOST_TOKENS)
    return TurnRequest(messages, tools or None, bound, bool(streams))


def text_of(where: str, content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a content, which is a string or parts.

    Args:
        where: it stands, for the error.
        content: of a message.
        kinds: of parts that are text.

    Raises:
        RequestError: a part of it is none.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type") not in kinds:
            raise RequestError(f"{where}: text alone is taken, got {part!r:.80}")
        texts.append(text)
    return "".join(texts)


def read_call(where: str, call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A call of an earlier turn, as a chat template takes it.

    Args:
        where: it stands, for the error.
        call_id: its name.
        name: of the tool.
        arguments: an object, or the JSON of one.

    Raises:
        RequestError: that can't be read.
    """
    try:
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        arguments = dict(arguments or {})
    except (TypeError, ValueError) as error:
        raise RequestError(f"{where}: the call's arguments can't be read: {error}") from error
    function = {"name": str(name), "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def tool_schema(tool: Any, name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool, as OpenAI's chat completions have it.

    Args:
        tool: as it was given, for the error.
        name: of the tool.
        description: of what it does.
        parameters: JSON schema of its arguments.

    Raises:
        RequestError: it is no function with a name and parameters.
    """
    parameters = {"type": "object", "properties": {}} if parameters is None else parameters
    if not (isinstance(name, str) and name and isinstance(parameters, Mapping)):
        raise RequestError(f"a tool is a function with a name and parameters, got {tool!r:.80}")
    function = {"name": name, "description": str(description or ""), "parameters": parameters}
    return {"type": "function", "function": function}


# What is answered ---------------------------------------------------------------------------------


def reply_to(
    request: TurnRequest,
    text: str,
    *,
    finish_reason: str,
    parse: TurnParser,
    num_prompt_tokens: int,
    num_tokens: int,
    stops: Sequence[str] = (),
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
        stops: texts that end its turns; the program is not shown them, as usual.
        used_ids: of earlier calls.
    """
    ends = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    end, stop = min(ends, default=(len(text), None))
    text = text[:end]
    message: Message = {"role": "assistant", "content": text}
    parsed = parse(text) if request.tools else None
    if parsed is not None and parsed.calls:
        calls = [c for c in parsed.calls if isinstance(c, ToolCall) and _is_text(c)]
        if len(calls) == len(parsed.calls):
            ids = _ids_of(calls, used_ids)
            message["content"] = parsed.content or None
            message["tool_calls"] = [
                _written_call(call, own_id, request.tools or [])
                for call, own_id in zip(calls, ids, strict=True)
            ]
            finish_reason = finish_reason if finish_reason == LENGTH else TOOL_CALLS
    return TurnReply(message, finish_reason, num_prompt_tokens, num_tokens, stop)


def _is_text(call: ToolCall) -> bool:
    """Whether a call can be sent: JSON may spell half a character."""
    try:
        json.dumps([call.name, call.arguments], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _ids_of(calls: Sequence[ToolCall], used: Collection[str]) -> list[str]:
    """What the model calls its calls, where it does; else names that some templates ask for.

    Nine letters and digits, and the same in each rollout: they are in the prompts that follow.
    """
    ids: list[str] = []
    for call in calls:
        own, number = call.id, len(used) + len(ids)
        while not own or own in used or own in ids:
            own, number = f"call{number:05}", number + 1
        ids.append(own)
    return ids


def _written_call(call: ToolCall, own_id: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    arguments = call.arguments
    schema = next((t for t in tools if t["function"]["name"] == call.name), None)
    if call.is_text and schema is not None:
        arguments = typed_arguments(arguments, schema["function"].get("parameters"))
    function = {"name": call.name, "arguments": json.dumps(arguments)}
    return {"id": own_id, "type": "function", "function": function}


def comparable(message: Message) -> tuple[Any, ...]:
    """What is the same in two spellings of one message.

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

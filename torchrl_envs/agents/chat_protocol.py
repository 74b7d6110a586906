"""OpenAI's chat completions: what a request asks of an episode, and what it is answered.

The protocol: ``POST /v1/chat/completions`` of OpenAI's API reference, 2026.
"""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torchrl_data.conversation.record import Message, check_messages
from torchrl_data.tool_calls.parse import TurnParser
from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs.tool_calls.schemas import schema_tool

LENGTH: Final = "length"
_ABOUT_THE_CALLER: Final = frozenset(
    {
        *("model", "messages", "tools", "max_tokens", "max_completion_tokens", "stream"),
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "stream_options"),
    }
)
"""What is read, or says nothing about how tokens are drawn."""
_USUAL: Final[Mapping[str, Sequence[Any]]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "stop": ([],),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Values that ask for what happens anyway; of ``temperature`` and ``top_p`` the policy has them."""
_KEPT: Final = ("role", "name", "tool_call_id", "reasoning_content")


class RequestError(ValueError):
    """A request that can't be answered as it is; the program is told so."""


class TurnRequest(NamedTuple):
    """What a program asks for: a turn of the policy."""

    messages: list[Message]
    """The whole conversation, as a chat template takes it."""
    tools: list[dict[str, Any]] | None
    max_new_tokens: int | None
    """Most tokens of the turn."""
    streams: bool = False
    with_usage: bool = False
    """A stream ends with the numbers of tokens."""


class TurnReply(NamedTuple):
    """A turn of the policy, as the program is told of it."""

    message: Message
    """``content``, ``tool_calls`` or both, as OpenAI's clients know them."""
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int


# What is asked ------------------------------------------------------------------------------------


def read_request(
    body: Any, *, allowed: Mapping[str, Any], ignored: Sequence[str] = ()
) -> TurnRequest:
    """A request's body as what it asks for.

    Args:
        body: parsed JSON.
        allowed: further values that ask for what happens anyway, by parameter.
        ignored: parameters that may say anything.

    Raises:
        RequestError: it is malformed, or asks for tokens that are drawn in another way.
    """
    if not isinstance(body, Mapping):
        raise RequestError(f"the body is a JSON object, got {type(body).__name__}")
    _check_parameters(body, allowed, ignored)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message")
    read = [_read_message(number, message) for number, message in enumerate(messages)]
    try:
        check_messages(read)
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from error
    if read[-1]["role"] == "assistant":
        raise RequestError("the last message is the assistant's: nothing is left to be answered")
    options = body.get("stream_options") or {}
    return TurnRequest(
        read,
        _read_tools(body.get("tools")),
        _read_limit(body),
        bool(body.get("stream")),
        isinstance(options, Mapping) and bool(options.get("include_usage")),
    )


def _check_parameters(
    body: Mapping[str, Any], allowed: Mapping[str, Any], ignored: Sequence[str]
) -> None:
    for name, value in body.items():
        if name in _ABOUT_THE_CALLER or name in ignored or value is None:
            continue
        usual = [*_USUAL.get(name, ()), *([allowed[name]] if name in allowed else [])]
        if value not in usual:
            raise RequestError(
                f"{name}={value!r:.80}: tokens are drawn as the policy that is trained draws them, "
                f"so that their log-probs are known. Leave it out, or let "
                f"AgentProgram(ignored_parameters=[{name!r}]) ignore it"
            )


def _read_limit(body: Mapping[str, Any]) -> int | None:
    given = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
    limits = [limit for limit in given if limit is not None]
    if any(type(limit) is not int or limit < 1 for limit in limits):
        raise RequestError(f"max_tokens must be a whole number of at least 1, got {limits!r:.80}")
    return min(limits, default=None)


def _read_tools(given: Any) -> list[dict[str, Any]] | None:
    if not given:
        return None
    for tool in given if isinstance(given, list) else [given]:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                'tools is a list of {"type": "function", "function": {"name": ..., "parameters": '
                f"...}}}}, got {tool!r:.80}"
            )
    return [dict(tool) for tool in given]


def _read_message(number: int, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"message {number} is no object: {message!r:.80}")
    read: Message = {name: message[name] for name in _KEPT if message.get(name) is not None}
    if read.get("role") == "developer":
        read["role"] = "system"
    read["content"] = _read_content(number, message.get("content"))
    calls = message.get("tool_calls")
    if calls:
        read["tool_calls"] = [_read_call(number, call) for call in calls]
    return read


def _read_content(number: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type") != "text":
            raise RequestError(f"message {number}: text alone is taken, got {part!r:.80}")
        texts.append(text)
    return "".join(texts)


def _read_call(number: int, call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        arguments = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        read = {"name": str(function["name"]), "arguments": arguments}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RequestError(f"message {number} has a call that can't be read: {error!r}") from error
    return {"id": call.get("id"), "type": "function", "function": read}


# What is answered ---------------------------------------------------------------------------------


def reply_to(
    request: TurnRequest,
    text: str,
    *,
    finish_reason: str,
    parse: TurnParser,
    num_prompt_tokens: int,
    num_tokens: int,
) -> TurnReply:
    """A turn of the policy as a message of OpenAI's protocol.

    Tool calls are read where the request has tools; a turn in which one of them can't be read is
    text, all of it.

    Args:
        request: what it answers.
        text: what the policy wrote.
        finish_reason: ``"stop"`` or ``"length"``.
        parse: finds the calls of a turn.
        num_prompt_tokens: what the policy read.
        num_tokens: what it wrote.
    """
    message: Message = {"role": "assistant", "content": text}
    parsed = parse(text) if request.tools else None
    if parsed is not None and parsed.calls:
        calls = [call for call in parsed.calls if isinstance(call, ToolCall)]
        if len(calls) == len(parsed.calls):
            message["content"] = parsed.content or None
            message["tool_calls"] = [_written_call(call, request.tools or []) for call in calls]
            finish_reason = finish_reason if finish_reason == LENGTH else "tool_calls"
    return TurnReply(message, finish_reason, num_prompt_tokens, num_tokens)


def _written_call(call: ToolCall, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    arguments = call.arguments
    schema = next((t for t in tools if t["function"]["name"] == call.name), None)
    if call.is_text and schema is not None:
        arguments = schema_tool(schema).typed(arguments)
    function = {"name": call.name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def completion(reply: TurnReply, model: str) -> dict[str, Any]:
    """The body of an answer.

    Args:
        reply: the turn.
        model: its name.
    """
    choice = {"index": 0, "message": reply.message, "finish_reason": reply.finish_reason}
    return {**_head("chat.completion", model), "choices": [choice], "usage": _usage(reply)}


def events(reply: TurnReply, request: TurnRequest, model: str) -> Iterator[str]:
    """The same as server-sent events, for a request that streams: the whole turn is one delta.

    Args:
        reply: the turn.
        request: what it answers.
        model: its name.
    """
    head = _head("chat.completion.chunk", model)
    calls = reply.message.get("tool_calls", ())
    delta = dict(reply.message)
    if calls:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    last = {"index": 0, "delta": {}, "finish_reason": reply.finish_reason}
    yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield _event({**head, "choices": [last]})
    if request.with_usage:
        yield _event({**head, "choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def _event(chunk: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def _head(kind: str, model: str) -> dict[str, Any]:
    own_id = f"chatcmpl-{uuid.uuid4().hex}"
    return {"id": own_id, "object": kind, "created": int(time.time()), "model": model}


def _usage(reply: TurnReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
    }


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
    others = [message.get(name) for name in _KEPT]
    return (*others, message.get("content") or "", tuple(calls))

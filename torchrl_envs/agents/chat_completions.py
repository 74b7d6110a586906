"""OpenAI's chat completions: ``POST /v1/chat/completions`` of its API reference, 2026."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from torchrl_data.messages import Message

from .turns import (
    KEPT,
    Accepted,
    RequestError,
    TurnReply,
    TurnRequest,
    check_parameters,
    read_call,
    text_of,
    tool_schema,
    turn_request,
)

_KNOWN: Final = frozenset(
    {
        *("model", "messages", "tools", "max_tokens", "max_completion_tokens", "stream"),
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "stream_options"),
    }
)
_USUAL: Final[Mapping[str, Sequence[Any]]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "stop": ([],),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "top_k": (-1, 0),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


def read_request(body: Any, accepted: Accepted) -> TurnRequest:
    """What a request's body asks for.

    Args:
        body: parsed JSON.
        accepted: see :func:`check_parameters`.

    Raises:
        RequestError: it is malformed, or asks for what can't take effect.
    """
    check_parameters(body, accepted, known=_KNOWN, usual=_USUAL)
    messages, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(messages, list) or not isinstance(tools, list):
        raise RequestError("messages and tools are lists")
    request = turn_request(
        [_read_message(number, message) for number, message in enumerate(messages)],
        [_read_tool(tool) for tool in tools],
        [body.get("max_completion_tokens"), body.get("max_tokens")],
        streams=body.get("stream"),
    )
    options = body.get("stream_options")
    is_asked = isinstance(options, Mapping) and bool(options.get("include_usage"))
    return request._replace(with_usage=is_asked)


def _read_tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    given = function if isinstance(function, Mapping) else {}
    schema = tool_schema(tool, *(given.get(k) for k in ("name", "description", "parameters")))
    others = {name: value for name, value in given.items() if name != "strict"}  # of the API alone
    return schema | {"function": {**others, **schema["function"]}}


def _read_message(number: int, message: Any) -> Message:
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is no object: {message!r:.80}")
    read: Message = {name: message[name] for name in KEPT if message.get(name) is not None}
    if read.get("role") == "developer":
        read["role"] = "system"
    read["content"] = text_of(where, message.get("content"))
    if message.get("function_call"):
        raise RequestError(f"{where} has a function_call, which tool_calls have replaced")
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise RequestError(f"{where}: tool_calls are a list, got {calls!r:.80}")
        read["tool_calls"] = [_read_call(where, call) for call in calls]
    return read


def _read_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} has a call that can't be read: {call!r:.80}")
    return read_call(where, call.get("id"), function.get("name"), function.get("arguments"))


def write_reply(reply: TurnReply, request: TurnRequest, model: str) -> dict[str, Any]:
    """The body of an answer.

    Args:
        reply: the turn.
        request: what it answers.
        model: its name.
    """
    del request
    choice = {"index": 0, "message": reply.message, "finish_reason": reply.finish_reason}
    return {**_head("chat.completion", model), "choices": [choice], "usage": _usage(reply)}


def stream_reply(
    reply: TurnReply, request: TurnRequest, model: str
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """The same as events of a stream: the whole turn is one delta.

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
    yield "", {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield "", {**head, "choices": [last]}
    if request.with_usage:
        yield "", {**head, "choices": [], "usage": _usage(reply)}
    yield "", "[DONE]"


def _head(kind: str, model: str) -> dict[str, Any]:
    own_id = f"chatcmpl-{uuid.uuid4().hex}"
    return {"id": own_id, "object": kind, "created": int(time.time()), "model": model}


def _usage(reply: TurnReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
    }

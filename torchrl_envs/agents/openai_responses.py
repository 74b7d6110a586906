"""OpenAI's responses: ``POST /v1/responses`` of its API reference, 2026."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from torchrl_data.messages import Message

from .turns import (
    LENGTH,
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
        *("model", "input", "instructions", "tools", "max_output_tokens", "user", "metadata"),
        *("store", "service_tier", "safety_identifier", "prompt_cache_key", "include", "stream"),
        *("prompt_cache_retention", "previous_response_id", "conversation", "stream_options"),
    }
)
_USUAL: Final[Mapping[str, Sequence[Any]]] = {
    "background": (False,),
    "top_logprobs": (0,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "text": (
        {},
        {"format": {"type": "text"}},
        {"verbosity": "medium"},
        {"format": {"type": "text"}, "verbosity": "medium"},
    ),
    "reasoning": ({}, {"effort": "none"}, {"effort": None, "summary": None}),
    "truncation": ("disabled",),
}
_TEXTS: Final = ("input_text", "output_text", "text")


def read_request(body: Any, accepted: Accepted) -> TurnRequest:
    """What a request's body asks for.

    Args:
        body: parsed JSON.
        accepted: see :func:`check_parameters`.

    Raises:
        RequestError: it is malformed, or asks for what can't take effect.
    """
    check_parameters(body, accepted, known=_KNOWN, usual=_USUAL)
    if any("logprobs" in str(wanted) for wanted in body.get("include") or ()):
        raise RequestError(f"include={body['include']!r:.80}: log-probs are not told")
    if not isinstance(body.get("instructions") or "", str):
        raise RequestError(f"instructions are a string, got {body['instructions']!r:.80}")
    if body.get("previous_response_id") or body.get("conversation"):
        raise RequestError(
            "nothing is stored between requests: the input is the whole conversation"
        )
    given, tools = body.get("input"), body.get("tools") or []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not isinstance(tools, list):
        raise RequestError("input is a string or a list, and tools are a list")
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    for number, item in enumerate(items):
        _read_item(f"input {number}", item, messages)
    schemas = [_read_tool(tool) for tool in tools]
    return turn_request(
        messages, schemas, [body.get("max_output_tokens")], streams=body.get("stream")
    )


def _read_tool(tool: Any) -> dict[str, Any]:
    given = tool if isinstance(tool, Mapping) and tool.get("type") == "function" else {}
    return tool_schema(tool, *(given.get(key) for key in ("name", "description", "parameters")))


def _read_item(where: str, item: Any, messages: list[Message]) -> None:
    """Add an item; calls belong to what the assistant says before them."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        content = text_of(where, item.get("content"), _TEXTS)
        messages.append({"role": role, "content": content})
    elif kind == "function_call":
        call = read_call(where, item.get("call_id"), item.get("name"), item.get("arguments"))
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = text_of(where, item.get("output"), _TEXTS)
        called = item.get("call_id")
        messages.append({"role": "tool", "tool_call_id": called, "content": content})
    else:
        raise RequestError(
            f"{where}: messages, function calls and their outputs are taken, got {item!r:.80}"
        )


def write_reply(reply: TurnReply, request: TurnRequest, model: str) -> dict[str, Any]:
    """The body of an answer.

    Args:
        reply: the turn.
        request: what it answers.
        model: its name.
    """
    output: list[dict[str, Any]] = []
    if reply.message["content"] or not reply.message.get("tool_calls"):
        text = {"type": "output_text", "text": reply.message["content"], "annotations": []}
        output.append(_item("message", "msg", role="assistant", content=[text]))
    output += [
        _item("function_call", "fc", call_id=call["id"], **call["function"])
        for call in reply.message.get("tool_calls", ())
    ]
    is_cut = reply.finish_reason == LENGTH
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{"type": "function", **tool["function"]} for tool in request.tools or ()],
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": reply.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
        },
    }


def stream_reply(
    reply: TurnReply, request: TurnRequest, model: str
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """The same as events of a stream: each item is one delta.

    Args:
        reply: the turn.
        request: what it answers.
        model: its name.
    """
    whole = write_reply(reply, request, model)
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": []}
    begun["usage"] = None
    events: list[tuple[str, dict[str, Any]]] = [
        ("created", {"response": begun}),
        ("in_progress", {"response": begun}),
    ]
    for index, item in enumerate(whole["output"]):
        events += _events_of(item, {"output_index": index, "item_id": item["id"]})
    events.append((whole["status"], {"response": whole}))
    for number, (name, values) in enumerate(events):
        kind = f"response.{name}"
        yield kind, {"type": kind, "sequence_number": number, **values}


def _events_of(item: dict[str, Any], where: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    index = {"output_index": where["output_index"]}
    if item["type"] == "message":
        (part,) = item["content"]
        at = {**where, "content_index": 0}
        empty: dict[str, Any] = {"content": []}
        inside = [
            ("content_part.added", {**at, "part": {**part, "text": ""}}),
            ("output_text.delta", {**at, "delta": part["text"], "logprobs": []}),
            ("output_text.done", {**at, "text": part["text"], "logprobs": []}),
            ("content_part.done", {**at, "part": part}),
        ]
    else:
        empty = {"arguments": ""}
        arguments = {"arguments": item["arguments"], "name": item["name"]}
        inside = [
            ("function_call_arguments.delta", {**where, "delta": item["arguments"]}),
            ("function_call_arguments.done", {**where, **arguments}),
        ]
    added = {**index, "item": {**item, "status": "in_progress", **empty}}
    return [("output_item.added", added), *inside, ("output_item.done", {**index, "item": item})]


def _item(kind: str, prefix: str, **values: Any) -> dict[str, Any]:
    return {"type": kind, "id": f"{prefix}_{uuid.uuid4().hex}", "status": "completed", **values}

"""Anthropic's messages: ``POST /v1/messages`` of its API reference, version 2023-06-01."""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from torchrl_data.messages import Message

from .turns import (
    LENGTH,
    TOOL_CALLS,
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
        *("model", "messages", "system", "tools", "max_tokens", "stream", "metadata"),
        *("service_tier", "container", "cache_control"),
    }
)
_USUAL: Final[Mapping[str, Sequence[Any]]] = {
    "stop_sequences": ([],),
    "tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}),
    "thinking": ({"type": "disabled"},),
}
_STOP_REASONS: Final = {LENGTH: "max_tokens", TOOL_CALLS: "tool_use"}


def read_request(body: Any, accepted: Accepted) -> TurnRequest:
    """What a request's body asks for.

    Args:
        body: parsed JSON.
        accepted: see :func:`check_parameters`.

    Raises:
        RequestError: it is malformed, or asks for what can't take effect.
    """
    check_parameters(body, accepted, known=_KNOWN, usual=_USUAL)
    given, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(given, list) or not isinstance(tools, list):
        raise RequestError("messages and tools are lists")
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": text_of("system", body["system"])})
    for number, message in enumerate(given):
        messages += _read_message(f"message {number}", message)
    schemas = [_read_tool(tool) for tool in tools]
    return turn_request(messages, schemas, [body.get("max_tokens")], streams=body.get("stream"))


def _read_tool(tool: Any) -> dict[str, Any]:
    given = tool if isinstance(tool, Mapping) and tool.get("type", "custom") == "custom" else {}
    return tool_schema(tool, *(given.get(key) for key in ("name", "description", "input_schema")))


def _read_message(where: str, message: Any) -> list[Message]:
    """One of the protocol is several where it gives results of tools."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant"):
        raise RequestError(f"{where} is of no user and no assistant: {message!r:.80}")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise RequestError(f"{where} has no content: {content!r:.80}")
    texts = [block for block in blocks if block.get("type") not in ("tool_use", "tool_result")]
    said: Message = {"role": role, "content": text_of(where, texts)}
    if role == "assistant":
        calls = [block for block in blocks if block.get("type") == "tool_use"]
        if calls:
            said["tool_calls"] = [
                read_call(where, call.get("id"), call.get("name"), call.get("input"))
                for call in calls
            ]
        return [said]
    results: list[Message] = [
        {
            "role": "tool",
            "tool_call_id": block.get("tool_use_id"),
            "content": _result_text(where, block),
        }
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    return [*results, said] if texts or not results else results


def _result_text(where: str, block: Mapping[str, Any]) -> str:
    """What a tool answered; templates have no other place to say that it failed."""
    text = text_of(where, block.get("content"))
    is_said = not block.get("is_error") or text.lower().startswith("error")
    return text if is_said else f"Error: {text}"


def write_reply(reply: TurnReply, request: TurnRequest, model: str) -> dict[str, Any]:
    """The body of an answer.

    Args:
        reply: the turn.
        request: what it answers.
        model: its name.
    """
    del request
    content: list[dict[str, Any]] = []
    if reply.message["content"]:
        content.append({"type": "text", "text": reply.message["content"]})
    for call in reply.message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        block = {"id": call["id"], "name": function["name"], "input": arguments}
        content.append({"type": "tool_use", **block})
    usual = "end_turn" if reply.stop is None else "stop_sequence"
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": _STOP_REASONS.get(reply.finish_reason, usual),
        "stop_sequence": reply.stop,
        "usage": {"input_tokens": reply.num_prompt_tokens, "output_tokens": reply.num_tokens},
    }


def stream_reply(
    reply: TurnReply, request: TurnRequest, model: str
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """The same as events of a stream: each block is one delta.

    Args:
        reply: the turn.
        request: what it answers.
        model: its name.
    """
    whole = write_reply(reply, request, model)
    start = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    events.append({"type": "message_delta", "delta": end, "usage": whole["usage"]})
    events.append({"type": "message_stop"})
    for event in events:
        yield event["type"], event

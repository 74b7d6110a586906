"""The protocols by which programs ask for a turn: one frame, and what is special of each."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

from torchrl_data.messages import PLACEHOLDER_ROLE, Message, check_messages

from .turns import (
    KEPT,
    LENGTH,
    MOST_TOKENS,
    TOOL_CALLS,
    Accepted,
    RequestError,
    TurnReply,
    TurnRequest,
)

_OF_TOOLS: Final = ("tool_choice", "parallel_tool_calls")
Event = tuple[str, dict[str, Any] | str]
"""An event of a stream: its name, if it has one, and its data."""


class Protocol:
    """Reads requests and writes answers; a subclass says what is special of it."""

    known: ClassVar[tuple[str, ...]]
    """Parameters that are read, or say nothing about how tokens are drawn."""
    usual: ClassVar[Mapping[str, Sequence[Any]]]
    """Values of others that ask for what happens anyway."""
    conversation: ClassVar[str] = "messages"
    """The parameter that holds the conversation."""
    limits: ClassVar[tuple[str, ...]] = ("max_tokens",)
    """The parameters that bound the tokens of a turn."""

    def read_request(self, body: Any, accepted: Accepted) -> TurnRequest:
        """Return what a request's body asks for.

        Args:
            body: parsed JSON.
            accepted: by the policy and whoever runs the program.

        Raises:
            RequestError: it is malformed, or asks for what can't take effect.
        """
        self._check_parameters(body, accepted)
        messages = self.read_opening(body)
        given, tools = body.get(self.conversation), body.get("tools") or []
        if isinstance(given, str) and self.conversation == "input":
            given = [{"role": "user", "content": given}]
        if not isinstance(given, list) or not isinstance(tools, list):
            raise RequestError(f"{self.conversation} and tools are lists")
        for number, item in enumerate(given):
            where = f"{self.conversation.removesuffix('s')} {number}"
            messages += self.read_item(where, item, messages)
        schemas = [self.read_tool(tool) for tool in tools] or None
        streams, options = body.get("stream"), body.get("stream_options")
        if not isinstance(streams, bool | None):
            raise RequestError(f"stream is true or false, got {streams!r:.80}")
        failed = tuple(m.get("tool_call_id") for m in messages if m.pop("is_error", False))
        # There is something to answer, and a chat template can be asked to show it.
        if not messages:
            raise RequestError("there is no message")
        if any(message.get("role") == PLACEHOLDER_ROLE for message in messages):
            raise RequestError(f"no message has the role {PLACEHOLDER_ROLE!r}")
        try:
            check_messages(messages)
            json.dumps([messages, schemas], ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise RequestError(f"messages or tools: {error}") from error
        if messages[-1]["role"] == "assistant":
            raise RequestError(
                "the last message is the assistant's: nothing is left to be answered"
            )
        limits = [_read_limit(body[name]) for name in self.limits if body.get(name) is not None]
        with_usage = isinstance(options, Mapping) and bool(options.get("include_usage"))
        bound = min([*limits, MOST_TOKENS]) if limits else None
        stops = body.get("stop") or body.get("stop_sequences") or []
        stops = [stops] if isinstance(stops, str) else stops
        ends = stops if stops == accepted.values.get("stop") else ()  # else they are ignored
        return TurnRequest(messages, schemas, bound, bool(streams), with_usage, tuple(ends), failed)

    def _check_parameters(self, body: Any, accepted: Accepted) -> None:
        """Nothing is asked for that would not happen."""
        if not isinstance(body, Mapping):
            raise RequestError(f"the body is a JSON object, got {type(body).__name__}")
        passed = {*self.known, *accepted.ignored, *(() if body.get("tools") else _OF_TOOLS)}
        own = {name: [value] for name, value in accepted.values.items()}
        for name, value in body.items():
            given = [value] if name == "stop" and isinstance(value, str) else value
            fine = name in passed or value is None
            if not fine and given not in [*self.usual.get(name, ()), *own.get(name, ())]:
                raise RequestError(
                    f"{name}={value!r:.80} can't take effect: turns are drawn as the policy draws "
                    "them, as plain text. Leave it out, or let it be ignored: AgentProgram"
                    f"(ignored_parameters=[{name!r}]), task.ignored_parameters=[{name}]"
                )

    def read_opening(self, body: Mapping[str, Any]) -> list[Message]:
        """Return what stands before the conversation: a system prompt, or nothing."""
        del body
        return []

    def read_item(self, where: str, item: Any, before: list[Message]) -> list[Message]:
        """The messages of one item of the conversation; a call may join the message before it."""
        raise NotImplementedError

    def read_tool(self, tool: Any) -> dict[str, Any]:
        """A tool, as OpenAI's chat completions have it."""
        raise NotImplementedError

    def write_reply(self, reply: TurnReply, request: TurnRequest, model: str) -> dict[str, Any]:
        """The body of an answer.

        Args:
            reply: the turn.
            request: what it answers.
            model: its name.
        """
        raise NotImplementedError

    def stream_reply(self, reply: TurnReply, request: TurnRequest, model: str) -> Iterator[Event]:
        """The same as events of a stream: each part of the turn is one delta.

        Args:
            reply: the turn.
            request: what it answers.
            model: its name.
        """
        raise NotImplementedError


def _read_limit(limit: Any) -> int:
    whole = int(limit) if isinstance(limit, float) and limit.is_integer() else limit
    if type(whole) is not int or whole < 1:
        raise RequestError(f"the most tokens are a whole number from 1 on, got {limit!r:.80}")
    return whole


def text_of(where: str, content: Any, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a content, which is a string or parts.

    Args:
        where: it stands, for the error.
        content: of a message.
        kinds: of parts that are text.

    Raises:
        RequestError: a part of it is none.
    """
    if content is None or isinstance(content, str):
        return content or ""
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


def tool_schema(
    tool: Any, given: Mapping[str, Any], parameters: str = "parameters"
) -> dict[str, Any]:
    """A tool, as OpenAI's chat completions have it.

    Args:
        tool: as it was given, for the error.
        given: holds its name, description and the JSON schema of its arguments.
        parameters: the name of that schema.

    Raises:
        RequestError: it is no function with a name and parameters.
    """
    name, schema = given.get("name"), given.get(parameters)
    schema = {"type": "object", "properties": {}} if schema is None else schema
    if not (isinstance(name, str) and name and isinstance(schema, Mapping)):
        raise RequestError(f"a tool is a function with a name and parameters, got {tool!r:.80}")
    description = str(given.get("description") or "")
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


class ChatCompletionsProtocol(Protocol):
    """OpenAI's chat completions: ``POST /v1/chat/completions`` of its API reference, 2026."""

    known = (
        *("model", "messages", "tools", "max_tokens", "max_completion_tokens", "stream"),
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "stream_options"),
    )
    usual: ClassVar[Mapping[str, Sequence[Any]]] = {
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
    limits = ("max_completion_tokens", "max_tokens")

    def read_tool(self, tool: Any) -> dict[str, Any]:
        """The function of it."""
        function = tool.get("function") if isinstance(tool, Mapping) else None
        given = function if isinstance(function, Mapping) else {}
        schema = tool_schema(tool, given)
        others = {name: value for name, value in given.items() if name != "strict"}
        return schema | {"function": {**others, **schema["function"]}}

    def read_item(self, where: str, item: Any, before: list[Message]) -> list[Message]:
        """A message is one."""
        del before
        if not isinstance(item, Mapping):
            raise RequestError(f"{where} is no object: {item!r:.80}")
        read: Message = {name: item[name] for name in KEPT if item.get(name) is not None}
        if read.get("role") == "developer":
            read["role"] = "system"
        read["content"] = text_of(where, item.get("content"))
        if item.get("function_call"):
            raise RequestError(f"{where} has a function_call, which tool_calls have replaced")
        calls = item.get("tool_calls") or []
        if not isinstance(calls, list):
            raise RequestError(f"{where}: tool_calls are a list, got {calls!r:.80}")
        for call in calls:
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping):
                raise RequestError(f"{where} has a call that can't be read: {call!r:.80}")
            made = read_call(where, call.get("id"), function.get("name"), function.get("arguments"))
            read.setdefault("tool_calls", []).append(made)
        return [read]

    def write_reply(self, reply: TurnReply, request: TurnRequest, model: str) -> dict[str, Any]:
        """A choice."""
        del request
        choice = {"index": 0, "message": reply.message, "finish_reason": reply.finish_reason}
        return self._head("chat.completion", model) | {"choices": [choice], "usage": _usage(reply)}

    def stream_reply(self, reply: TurnReply, request: TurnRequest, model: str) -> Iterator[Event]:
        """The whole turn is one delta."""
        head = self._head("chat.completion.chunk", model)
        delta = dict(reply.message)
        if delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **c} for i, c in enumerate(delta["tool_calls"])]
        last = {"index": 0, "delta": {}, "finish_reason": reply.finish_reason}
        yield "", {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        yield "", {**head, "choices": [last]}
        if request.with_usage:
            yield "", {**head, "choices": [], "usage": _usage(reply)}
        yield "", "[DONE]"

    def _head(self, kind: str, model: str) -> dict[str, Any]:
        own_id = f"chatcmpl-{uuid.uuid4().hex}"
        return {"id": own_id, "object": kind, "created": int(time.time()), "model": model}


def _usage(reply: TurnReply) -> dict[str, int]:
    read, wrote = reply.num_prompt_tokens, reply.num_tokens
    return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}


_TEXTS: Final = ("input_text", "output_text", "text")


class OpenAIResponsesProtocol(Protocol):
    """OpenAI's responses: ``POST /v1/responses`` of its API reference, 2026."""

    known = (
        *("model", "input", "instructions", "tools", "max_output_tokens", "user", "metadata"),
        *("store", "service_tier", "safety_identifier", "prompt_cache_key", "include", "stream"),
        *("prompt_cache_retention", "previous_response_id", "conversation", "stream_options"),
    )
    usual: ClassVar[Mapping[str, Sequence[Any]]] = {
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
    conversation = "input"
    limits = ("max_output_tokens",)

    def read_opening(self, body: Mapping[str, Any]) -> list[Message]:
        """The instructions."""
        if any("logprobs" in str(wanted) for wanted in body.get("include") or ()):
            raise RequestError(f"include={body['include']!r:.80}: log-probs are not told")
        instructions = body.get("instructions") or ""
        if not isinstance(instructions, str):
            raise RequestError(f"instructions are a string, got {instructions!r:.80}")
        if body.get("previous_response_id") or body.get("conversation"):
            message = "nothing is stored between requests: the input is the whole conversation"
            raise RequestError(message)
        if not isinstance(body.get("input"), list | str):
            raise RequestError("input is a string or a list, and tools are a list")
        return [{"role": "system", "content": instructions}] if instructions else []

    def read_tool(self, tool: Any) -> dict[str, Any]:
        """The function that it is."""
        is_function = isinstance(tool, Mapping) and tool.get("type") == "function"
        return tool_schema(tool, tool if is_function else {})

    def read_item(self, where: str, item: Any, before: list[Message]) -> list[Message]:
        """Calls belong to what the assistant says before them."""
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            return [{"role": role, "content": text_of(where, item.get("content"), _TEXTS)}]
        if kind == "function_call_output":
            content = text_of(where, item.get("output"), _TEXTS)
            return [{"role": "tool", "tool_call_id": item.get("call_id"), "content": content}]
        if kind != "function_call":
            raise RequestError(
                f"{where}: messages, function calls and their outputs are taken, got {item!r:.80}"
            )
        call = read_call(where, item.get("call_id"), item.get("name"), item.get("arguments"))
        if not before or before[-1]["role"] != "assistant":
            return [{"role": "assistant", "content": "", "tool_calls": [call]}]
        before[-1].setdefault("tool_calls", []).append(call)
        return []

    def write_reply(self, reply: TurnReply, request: TurnRequest, model: str) -> dict[str, Any]:
        """Its output is the text, then the calls."""
        calls = reply.message.get("tool_calls", ())
        items: list[dict[str, Any]] = []
        if reply.message["content"] or not calls:
            text = {"type": "output_text", "text": reply.message["content"], "annotations": []}
            items.append({"type": "message", "role": "assistant", "content": [text]})
        items += [{"type": "function_call", "call_id": c["id"], **c["function"]} for c in calls]
        prefixes = {"message": "msg", "function_call": "fc"}
        output = [
            {"id": f"{prefixes[i['type']]}_{uuid.uuid4().hex}", "status": "completed", **i}
            for i in items
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

    def stream_reply(self, reply: TurnReply, request: TurnRequest, model: str) -> Iterator[Event]:
        """Each item is one delta."""
        whole = self.write_reply(reply, request, model)
        begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": []}
        opening = {"response": {**begun, "usage": None}}
        events = [("created", opening), ("in_progress", opening)]
        for index, item in enumerate(whole["output"]):
            where = {"output_index": index, "item_id": item["id"]}
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
            added = {"output_index": index, "item": {**item, "status": "in_progress", **empty}}
            done = {"output_index": index, "item": item}
            events += [("output_item.added", added), *inside, ("output_item.done", done)]
        events.append((whole["status"], {"response": whole}))
        for number, (name, values) in enumerate(events):
            kind = f"response.{name}"
            yield kind, {"type": kind, "sequence_number": number, **values}


class AnthropicMessagesProtocol(Protocol):
    """Anthropic's messages: ``POST /v1/messages`` of its API reference, version 2023-06-01."""

    known = (
        *("model", "messages", "system", "tools", "max_tokens", "stream", "metadata"),
        *("service_tier", "container", "cache_control"),
    )
    usual: ClassVar[Mapping[str, Sequence[Any]]] = {
        "stop_sequences": ([],),
        "tool_choice": ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}),
        "thinking": ({"type": "disabled"},),
    }

    def read_opening(self, body: Mapping[str, Any]) -> list[Message]:
        """The system prompt."""
        system = body.get("system")
        return [{"role": "system", "content": text_of("system", system)}] if system else []

    def read_tool(self, tool: Any) -> dict[str, Any]:
        """One that the program runs itself."""
        is_custom = isinstance(tool, Mapping) and tool.get("type", "custom") == "custom"
        return tool_schema(tool, tool if is_custom else {}, parameters="input_schema")

    def read_item(self, where: str, item: Any, before: list[Message]) -> list[Message]:
        """A message is several where it gives results of tools."""
        del before
        role = item.get("role") if isinstance(item, Mapping) else None
        if role not in ("user", "assistant", "system"):
            wrong = f"{where} is of no user, no assistant and no system: {item!r:.80}"
            raise RequestError(wrong)
        content = item.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(b, Mapping) for b in blocks):
            raise RequestError(f"{where} has no content: {content!r:.80}")
        texts = [b for b in blocks if b.get("type") not in ("tool_use", "tool_result")]
        said: Message = {"role": role, "content": text_of(where, texts)}
        if role == "assistant":
            calls = [block for block in blocks if block.get("type") == "tool_use"]
            made = [read_call(where, *map(each.get, ("id", "name", "input"))) for each in calls]
            return [{**said, "tool_calls": made} if made else said]
        results: list[Message] = []
        for block in blocks:
            if block.get("type") == "tool_result":
                text = text_of(where, block.get("content"))
                is_error = bool(block.get("is_error"))
                if is_error and not text.lower().startswith("error"):
                    text = f"Error: {text}"  # templates have no other place to say that it failed
                told = {"tool_call_id": block.get("tool_use_id"), "is_error": is_error}
                results.append({"role": "tool", "content": text, **told})
        return [*results, said] if texts or not results else results

    def write_reply(self, reply: TurnReply, request: TurnRequest, model: str) -> dict[str, Any]:
        """Its content is the text, then the calls."""
        del request
        content: list[dict[str, Any]] = []
        if reply.message["content"]:
            content.append({"type": "text", "text": reply.message["content"]})
        for call in reply.message.get("tool_calls", ()):
            function = call["function"]
            arguments = json.loads(function["arguments"])
            block = {"id": call["id"], "name": function["name"], "input": arguments}
            content.append({"type": "tool_use", **block})
        reasons = {LENGTH: "max_tokens", TOOL_CALLS: "tool_use"}
        usual = "end_turn" if reply.stop is None else "stop_sequence"
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": content,
            "stop_reason": reasons.get(reply.finish_reason, usual),
            "stop_sequence": reply.stop,
            "usage": {"input_tokens": reply.num_prompt_tokens, "output_tokens": reply.num_tokens},
        }

    def stream_reply(self, reply: TurnReply, request: TurnRequest, model: str) -> Iterator[Event]:
        """Each block is one delta."""
        whole = self.write_reply(reply, request, model)
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


chat_completions: Final = ChatCompletionsProtocol()
openai_responses: Final = OpenAIResponsesProtocol()
anthropic_messages: Final = AnthropicMessagesProtocol()

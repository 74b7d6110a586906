"""Message of the assistant whose calls stand beside its content, as chat templates take them."""

from collections.abc import Mapping, Sequence

from torchrl_data.messages import Message

from .records import ToolCall
from .strict_json import read_json


def message_with_calls(
    message: Mapping[str, object], before: str, calls: Sequence[ToolCall]
) -> Message:
    """The message with ``tool_calls``, as OpenAI's chat completions have them.

    Args:
        message: of the assistant.
        before: its content before the first call; a line end before the calls is the template's.
        calls: what it calls, in order.

    Example:
        >>> message = {"role": "assistant", "content": "One moment. <tool_call>..."}
        >>> message_with_calls(message, "One moment.", [ToolCall("add", {"a": 1})])["tool_calls"]
        [{'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}]
    """
    tool_calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        | ({"id": call.id} if call.id else {})
        for call in calls
    ]
    return {**message, "content": before.removesuffix("\n"), "tool_calls": tool_calls}


def calls_of_message(message: Mapping[str, object]) -> list[tuple[ToolCall, str]]:
    """The calls of a message of the assistant, each with what is wrong with its arguments, if any.

    Args:
        message: its ``tool_calls`` are as OpenAI's chat completions have them; the arguments are a
            dictionary or the JSON text of one.

    Raises:
        ValueError: ``tool_calls`` have another form.

    Example:
        >>> call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
        >>> calls_of_message({"role": "assistant", "tool_calls": [call]})
        [(ToolCall(name='add', arguments={'a': 1}, id='1', is_text=False), '')]
    """
    found = []
    given: object = message.get("tool_calls") or []
    for entry in given if isinstance(given, Sequence) else [given]:
        function = entry.get("function") if isinstance(entry, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not (isinstance(entry, Mapping) and isinstance(function, Mapping) and name):
            raise ValueError(
                "each of tool_calls is {'id': ..., 'function': {'name': ..., 'arguments': {...}}}, "
                f"got {entry!r:.80}."
            )
        arguments, error = function.get("arguments") or {}, ""
        try:
            read = read_json(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(read, Mapping):
                raise ValueError(f"the arguments are no object: {arguments!r:.80}")
        except ValueError as wrong:
            read, error = {}, str(wrong)
        found.append((ToolCall(str(name), dict(read), entry.get("id")), error))
    return found

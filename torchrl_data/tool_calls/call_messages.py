"""Message of the assistant whose calls stand beside its content, as chat templates take them."""

from collections.abc import Mapping, Sequence

from torchrl_data.messages import Message

from .records import ToolCall


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

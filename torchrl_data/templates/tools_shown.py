"""Whether a chat template tells the policy of its tools."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from torchrl_data.conversation.record import Message

_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "Tool7",
        "description": "D",
        "parameters": {"type": "object", "properties": {}},
    },
}


class ToolsNotShownError(ValueError):
    """A chat template leaves tools out of the prompt, so the policy would not know of them."""


def shows_tools(render: Callable[[Sequence[dict[str, Any]] | None], str]) -> bool:
    """Whether what a template renders depends on the tools that it is given."""
    without = render(None)
    try:
        return render([_TOOL]) != without
    except ValueError:
        return True  # it looks at them, and says what is wrong with one


def check_tools_are_named(
    tools: Sequence[dict[str, Any]], messages: Sequence[Message], template: str
) -> None:
    """Raise ``ToolsNotShownError`` unless messages name the tools that a template leaves out."""
    text = "\n".join(str(message.get("content")) for message in messages)
    names = [str((tool.get("function") or tool).get("name")) for tool in tools]
    missing = [name for name in names if name not in text]
    if missing:
        raise ToolsNotShownError(
            f"The chat template does not show tools, so the policy would not know of {missing}: "
            f"{template!r:.120}. Use a template that does (chat_template_name='chatml', say), or "
            "name the tools in a system prompt."
        )

"""Tools of a verifiers task, called in this process, as its tool servers would call them."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, get_type_hints

_CALL: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class VerifiersTools:
    """The tools that the toolsets of one task offer, each with state of its own.

    Args:
        task: of verifiers.

    Raises:
        Exception: whatever building the toolsets raises.
    """

    def __init__(self, task: Any) -> None:
        self._task = task
        self._toolsets: Sequence[Any] = list(task.toolsets(task.config))
        self._functions: dict[str, Callable[..., Any]] = {}
        self.schemas: list[dict[str, Any]] = []
        """As OpenAI's chat completions have them."""
        decorators = import_module("verifiers.v1.utils.decorators")
        for toolset in self._toolsets:
            prefix = f"{toolset.server_name}_" if toolset.server_name else ""
            for function in decorators.discover_decorated(toolset, "tool"):
                name = f"{prefix}{getattr(function, 'tool_name', None) or function.__name__}"
                self._functions[name] = function
                self.schemas.append(_schema(function, name))

    @property
    def states(self) -> list[Any]:
        """The state of each toolset."""
        return [toolset.state for toolset in self._toolsets]

    async def setup(self) -> None:
        """Set the toolsets up for the task."""
        for toolset in self._toolsets:
            await toolset.setup()
            await toolset.setup_task(self._task.data)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool; an error of it is its answer.

        Args:
            name: as the schema has it.
            arguments: by name.
        """
        function = self._functions.get(name)
        if function is None:
            return f"Error: there is no tool {name!r}"
        try:
            result = function(**arguments)
            result = await result if inspect.isawaitable(result) else result
        except Exception as error:  # the tool's own code, as the model reads it
            return f"Error: {error}"
        return result if isinstance(result, str) else json.dumps(result, default=str)


def calls_in(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a turn, by name and arguments; none where one of them can't be read.

    Args:
        text: of a scripted agent, see :func:`~torchrl_envs.audit.scripted_agents.tool_call_text`.
    """
    found = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, TypeError, KeyError):
            return []
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return []
        found.append((name, arguments))
    return found


def _schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The schema of a tool, from the type hints of its function."""
    pydantic = import_module("pydantic")
    hints = get_type_hints(inspect.unwrap(getattr(function, "__func__", function)))
    parameters = inspect.signature(function).parameters
    shapes = {each: pydantic.TypeAdapter(hints.get(each, Any)).json_schema() for each in parameters}
    required = [n for n, each in parameters.items() if each.default is inspect.Parameter.empty]
    given = {"type": "object", "properties": shapes, "required": required}
    description = (function.__doc__ or "").strip()
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": given},
    }

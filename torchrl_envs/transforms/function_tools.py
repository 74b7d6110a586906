"""Plain functions as tools."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl_data.tool_calls import ToolCall
from torchrl_envs.tool_results import MAX_RESULT_BYTES
from torchrl_envs.tool_schemas import Tool, function_tool

from .tool_source import Job, ToolSource


class FunctionTools(ToolSource):
    """Offers functions to every rollout.

    A function, sync or ``async``, has type hints and a Google docstring, from which its schema is
    made; calls whose arguments do not fit the schema are answered with what is wrong. All calls,
    those of one turn too, run at the same time: functions share no state that belongs to a rollout.

    Args:
        functions: the functions, or ``{name: function}`` to call them something else.
        timeout_s: deadline of one call, in seconds.
        max_result_bytes: longer results are cut, with a mark; bytes of UTF-8.
        show_schemas: whether the chat template shows the tools to the model.

    Raises:
        ValueError: there is no function, two have the same name, or one lacks a docstring, a type
            hint or the description of an argument.
        TypeError: something is not a function.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any]],
        *,
        timeout_s: float = 30.0,
        max_result_bytes: int = MAX_RESULT_BYTES,
        show_schemas: bool = True,
    ) -> None:
        super().__init__(
            timeout_s=timeout_s, max_result_bytes=max_result_bytes, show_schemas=show_schemas
        )
        if not functions:
            raise ValueError("FunctionTools needs at least one function.")
        named = (
            functions.items() if isinstance(functions, Mapping) else [(None, f) for f in functions]
        )
        self.functions: dict[str, Callable[..., Any]] = {}
        self.tools: dict[str, Tool] = {}
        for name, function in named:
            tool = function_tool(function, name=name)
            if tool.name in self.tools:
                raise ValueError(
                    f"FunctionTools has two functions named {tool.name!r}. Give them names with "
                    "{name: function}."
                )
            self.tools[tool.name] = tool
            self.functions[tool.name] = function

    def tool_names(self) -> dict[str, str]:
        """Every function, and that it belongs to this source."""
        return dict.fromkeys(self.tools, "FunctionTools")

    def tools_of(self, row: int) -> Mapping[str, Tool]:
        """All functions, for every row."""
        del row
        return self.tools

    def bind(self, row: int, call: ToolCall) -> Job:
        """A call of a function."""
        del row
        return self.job(call, functools.partial(self.functions[call.name], **call.arguments))

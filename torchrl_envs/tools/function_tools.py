"""Plain functions as tools."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl_data.tool_calls.parse import ToolCall
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.tool_source import Job, ToolSource
from torchrl_envs.processes import ToolProcesses
from torchrl_envs.tool_calls.results import MAX_RESULT_BYTES
from torchrl_envs.tool_calls.schemas import Tool, function_tool


class FunctionTools(ToolSource):
    """Offers functions to every rollout.

    A function, sync or ``async``, has type hints and a Google docstring, from which its schema is
    made; calls whose arguments do not fit the schema are answered with what is wrong. All calls,
    those of one turn too, run at the same time: functions share no state that belongs to a rollout.

    A function runs in this process: one that never returns keeps a thread, one that ends its
    process ends the program. With ``num_processes``, calls run in
    :class:`~torchrl_envs.processes.ToolProcesses`: one that misses its deadline is killed, and
    one whose process dies is answered with an error. Then a function has to be found by its name in
    a module that can be imported, and what it remembers between calls is its process's own.

    Args:
        functions: the functions, or ``{name: function}`` to call them something else.
        num_processes: run the calls in so many worker processes; as many run at once.
        max_memory_mb: with ``num_processes``: what a worker may allocate, in MiB; beyond it a call
            fails with ``MemoryError``.
        timeout_s: deadline of one call, in seconds from when it starts.
        max_result_bytes: longer results are cut, with a mark; bytes of UTF-8.
        show_schemas: whether the chat template shows the tools to the model.

    Raises:
        ValueError: there is no function, two have the same name, or one lacks a docstring, a type
            hint or the description of an argument; no other process can find a function;
            ``max_memory_mb`` without ``num_processes``.
        TypeError: something is not a function.
        ToolProcessError: a worker process can't be started, or does not find the functions.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any]],
        *,
        num_processes: int | None = None,
        max_memory_mb: int | None = None,
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
        self._processes: ToolProcesses | None = None
        if num_processes is not None:
            self._processes = ToolProcesses(
                self.functions,
                num_processes=num_processes,
                timeout_s=timeout_s,
                max_result_bytes=max_result_bytes,
                max_memory_mb=max_memory_mb,
            )
        elif max_memory_mb is not None:
            raise ValueError(
                "FunctionTools: max_memory_mb limits worker processes; give num_processes too."
            )

    def tool_names(self) -> dict[str, str]:
        """Every function, and that it belongs to this source."""
        return dict.fromkeys(self.tools, "FunctionTools")

    def tools_of(self, episode: Episode) -> Mapping[str, Tool]:
        """All functions, for every episode."""
        del episode
        return self.tools

    def bind(self, episode: Episode, call: ToolCall) -> Job:
        """A call of a function."""
        del episode
        if self._processes is None:
            return self.job(call, functools.partial(self.functions[call.name], **call.arguments))
        run = functools.partial(self._processes.call, call.name, call.arguments)
        # The processes make text of the result, and keep the deadline from when one takes it up.
        return self.job(call, run)._replace(call=run, timeout_s=math.inf)

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.close()

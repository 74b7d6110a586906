"""Plain functions as tools."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.tool_source import Job, ToolSource
from torchrl_envs.processes import ToolProcesses
from torchrl_envs.tool_results import MAX_RESULT_BYTES
from torchrl_envs.tool_schemas import Tool, function_tool


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

    Example:
        >>> from torchrl.envs.transforms import Compose
        >>> def clock() -> str:
        ...     '''Tell the time.'''
        ...     return "12:30"
        >>> data = DataLoadingPrimer([{"prompt": "What time is it?"}])
        >>> env = ChatEnv(batch_size=(2,)).append_transform(Compose(data, FunctionTools([clock])))
        >>> call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
        >>> batch = env.reset().set("text_response", [call, "Late."])
        >>> out = env.step(batch)["next"]
        >>> out["history"].prompt.to_chats()[0][-1]
        {'role': 'tool', 'content': '12:30', 'name': 'clock'}
        >>> out["done"].flatten()
        tensor([False,  True])
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
        if callable(functions):
            raise TypeError(f"FunctionTools takes a list of functions: [{functions!r:.80}].")
        if not functions:
            raise ValueError("FunctionTools needs at least one function.")
        is_named = isinstance(functions, Mapping)
        named = functions.items() if is_named else [(None, f) for f in functions]
        self.functions: dict[str, Callable[..., Any]] = {}
        self.tools: dict[str, Tool] = {}
        self._offered = self.tools
        for name, function in named:
            tool = function_tool(function, name=name)
            if tool.name in self.tools:
                two = f"two functions named {tool.name!r}"
                raise ValueError(f"FunctionTools has {two}. Give them names: {{name: function}}.")
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

    def bind(self, episode: Episode, call: ToolCall) -> Job:
        """A call of a function."""
        del episode
        if self._processes is None:
            return self.job(call, functools.partial(self.functions[call.name], **call.arguments))
        run = functools.partial(self._processes.call, call.name, call.arguments)
        # The processes make a content of it, and keep the deadline from when one takes it up.
        return self.job(call, run)._replace(call=run, timeout_s=math.inf)

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.close()

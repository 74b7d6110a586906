"""Audited tasksets of the package verifiers: a task is answered, and its own code scores.

The reward functions, their weights and the judges of a task are called as verifiers calls them,
on a trace with the prompt, the calls of tools with their results, and an answer. The tools of a
task's toolsets are called in this process; harnesses take no part.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import islice
from typing import Any, Final

from torchrl_data import import_package

from .audited_task import AgentView, Played, Say, play
from .rows import AuditedRow, solutions_of_rows
from .verifiers_tools import VerifiersTools, calls_in

_NUM_TASKS: Final = 64
_MOST_TURNS: Final = 8
_MOST_SHOWN: Final = 300


class VerifiersTask:
    """A taskset of verifiers.

    Args:
        taskset: the module with it, as verifiers' ``TasksetConfig(id=...)`` takes it.
        settings: further fields of its configuration.
        solution: answers that are right, where they are known.

    Raises:
        ImportError: verifiers is not installed.
        ValueError: there is no such taskset, or it has no tasks.
    """

    kind = "taskset of verifiers"
    is_own = is_forkable = True
    is_in_process = False
    reward_range: tuple[float, float] | None = None
    faults: Sequence[tuple[str, str]] = ()

    def __init__(
        self,
        taskset: str,
        settings: Mapping[str, Any],
        solution: Callable[[AgentView], str | None] | None = None,
    ) -> None:
        import_package("verifiers", who="verifiers:TASKSET", install="pip install verifiers")
        self.name, self._solution = f"verifiers:{taskset}", solution
        package = import_module("verifiers.v1")
        try:
            loaded = package.load_taskset(package.TasksetConfig(id=taskset, **settings))
            self._tasks = list(islice(iter(loaded), _NUM_TASKS))
        except Exception as error:  # verifiers' loader, and the taskset's own code
            raise ValueError(
                f"verifiers can't load the taskset {taskset!r}: {type(error).__name__}: {error}"
            ) from error
        if not self._tasks:
            raise ValueError(f"The taskset {taskset!r} has no tasks.")
        rows = [dict(task.data.model_dump()) for task in self._tasks]
        self.rows = [AuditedRow(row, row) for row in rows]
        self.num_rows = len(rows) if len(rows) > 1 else 0
        tools, why = self._offered()
        self.max_turns = _MOST_TURNS if tools else 1
        one_turn = "an answer without a call ends it" if tools else "each task is answered once"
        self.not_asked: Mapping[str, str] = {
            "tampering": "there is no machine of the agent's",
            "clock": "there are no files that have dates",
            **({} if tools else {"tools": why}),
            "seed": "a task has no seed",
            "endless": one_turn,
            "after the end": one_turn,
        }

    def _offered(self) -> tuple[Sequence[Any], str]:
        """The tools of the first task, and why there are none."""
        try:
            tools = VerifiersTools(self._tasks[0])
            asyncio.run(tools.setup())
        except Exception as error:  # toolsets that need a server or a machine
            why = f"the tools can't be called in this process: {type(error).__name__}: {error}"
            return (), why[:_MOST_SHOWN]
        return tools.schemas, "its tasks have no toolsets"

    def start(self, seed: int) -> "VerifiersEpisode":
        """Take a task."""
        place = seed % len(self._tasks)
        has_tools = "tools" not in self.not_asked
        return VerifiersEpisode(self._tasks[place], self.rows[place].mapped, has_tools=has_tools)

    def play_many(self, say: Say, seeds: Sequence[int], draw: int) -> list[Played]:
        """Play a task of each seed; draws are counted from one on."""
        return [play(self, say, seed, draw=draw + place) for place, seed in enumerate(seeds)]

    def solutions(self) -> Mapping[str, Callable[[AgentView], str | None]]:
        """The given one, and what the data says."""
        given = {} if self._solution is None else {"solution": self._solution}
        return {**given, **solutions_of_rows(self.rows)}


class VerifiersEpisode:
    """A task that is answered; before that, tools may be called."""

    choices: Sequence[str] = ()

    def __init__(self, task: Any, row: Mapping[str, Any], *, has_tools: bool = False) -> None:
        self._task, self.row = task, row
        self.opening: str = task.data.prompt_text
        self.is_over = self.has_ended = False
        self.error = ""
        self.rewards: Sequence[float] = ()
        self._reward: float | None = None
        self._runner = asyncio.Runner()  # one loop for whatever the tools hold
        self._tools = VerifiersTools(task) if has_tools else None
        self.tools: Sequence[Mapping[str, Any]] = self._tools.schemas if self._tools else ()
        self._package = import_module("verifiers.v1")
        self._messages = [self._package.UserMessage(content=self.opening)]
        if self._tools is not None:
            self._runner.run(self._tools.setup())

    def answer(self, text: str) -> str:
        """Answer, and let the task score that; or call tools, and return what they say."""
        calls = calls_in(text) if self._tools is not None else []
        number = len(self._messages)
        made = [
            self._package.ToolCall(id=f"call-{number}-{n}", name=name, arguments=json.dumps(given))
            for n, (name, given) in enumerate(calls)
        ]
        message = self._package.AssistantMessage(content=text, tool_calls=made or None)
        self._messages.append(message)
        if not made:
            self._end()
            return ""
        assert self._tools is not None
        said = []
        for call, (name, given) in zip(made, calls, strict=True):
            said.append(self._runner.run(self._tools.call(name, given)))
            result = self._package.ToolMessage(tool_call_id=call.id, content=said[-1], name=name)
            self._messages.append(result)
        return "\n".join(said)

    def _end(self) -> None:
        """Let the task score what was said."""
        self.is_over = self.has_ended = True
        package = self._package
        nodes = [
            {
                "message": message,
                "parent": place - 1 if place else None,
                "sampled": message.role == "assistant",
            }
            for place, message in enumerate(self._messages)
        ]
        trace = package.Trace(
            task=package.TraceTask(type=type(self._task).__name__, data=self._task.data),
            agent=package.AgentInfo(name="audit", config=package.AgentConfig(model="audit")),
            nodes=nodes,
        )
        for state in self._tools.states if self._tools is not None else ():
            if type(state) is not package.State:  # of a toolset that keeps one
                trace.state = state
        try:
            self._runner.run(self._task.score(trace))
        except Exception as error:  # the task's own code
            cause = error.__cause__ or error
            self.error = f"{type(cause).__name__}: {cause}"[:_MOST_SHOWN]
            return
        self._reward = float(trace.reward)

    def reward(self) -> float | None:
        """Weighted sum of the task's rewards; an agent with no more to say says nothing."""
        if not self.is_over:
            self.answer("")
        return self._reward

    def after_end(self, text: str) -> tuple[float, bool] | None:
        """Refuse: a task is answered once."""
        del text
        return None

    def close(self) -> None:
        """Close the event loop."""
        self._runner.close()

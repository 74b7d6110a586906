"""Audited tasksets of the package verifiers: a task is answered once, and its own code scores.

The reward functions, their weights and the judges of a task are called as verifiers calls them,
on a trace with the prompt and one answer. Tools and harnesses take no part.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import islice
from typing import Any, Final

from torchrl_data import import_package

from .audited_task import AgentView, Played, Say, play
from .rows import AuditedRow, solutions_of_rows

_NUM_TASKS: Final = 64


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
    max_turns = 1
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
        one_turn = "each task is answered once"
        self.not_asked: Mapping[str, str] = {
            "tampering": "there is no machine of the agent's",
            "clock": "there are no files that have dates",
            "tools": "rewards of tools are those of an agent that calls none",
            "seed": "a task has no seed",
            "endless": one_turn,
            "after the end": one_turn,
        }

    def start(self, seed: int) -> "VerifiersEpisode":
        """Take a task."""
        place = seed % len(self._tasks)
        return VerifiersEpisode(self._tasks[place], self.rows[place].mapped)

    def play_many(self, say: Say, seeds: Sequence[int], draw: int) -> list[Played]:
        """Play a task of each seed; draws are counted from one on."""
        return [play(self, say, seed, draw=draw + place) for place, seed in enumerate(seeds)]

    def solutions(self) -> Mapping[str, Callable[[AgentView], str | None]]:
        """The given one, and what the data says."""
        given = {} if self._solution is None else {"solution": self._solution}
        return {**given, **solutions_of_rows(self.rows)}


class VerifiersEpisode:
    """A task that is answered once."""

    choices: Sequence[str] = ()
    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, task: Any, row: Mapping[str, Any]) -> None:
        self._task, self.row = task, row
        self.opening: str = task.data.prompt_text
        self.is_over = self.has_ended = False
        self.error = ""
        self.rewards: Sequence[float] = ()
        self._reward: float | None = None

    def answer(self, text: str) -> str:
        """Answer, and let the task score that."""
        self.is_over = self.has_ended = True
        package = import_module("verifiers.v1")
        said = [package.UserMessage(content=self.opening), package.AssistantMessage(content=text)]
        nodes = [
            {"message": message, "parent": place - 1 if place else None, "sampled": place == 1}
            for place, message in enumerate(said)
        ]
        trace = package.Trace(
            task=package.TraceTask(type=type(self._task).__name__, data=self._task.data),
            agent=package.AgentInfo(name="audit", config=package.AgentConfig(model="audit")),
            nodes=nodes,
        )
        try:
            asyncio.run(self._task.score(trace))
        except Exception as error:  # the task's own code
            cause = error.__cause__ or error
            self.error = f"{type(cause).__name__}: {cause}"[:300]
            return ""
        self._reward = float(trace.reward)
        return ""

    def reward(self) -> float | None:
        """Weighted sum of the task's rewards."""
        return self._reward

    def after_end(self, text: str) -> tuple[float, bool] | None:
        """Refuse: a task is answered once."""
        del text
        return None

    def close(self) -> None:
        """Hold nothing."""

"""Audited environments that are stepped with text: Gymnasium's protocol and SkyRL Gym's."""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

from torchrl_envs.concurrency.own_random import OwnRandom
from torchrl_envs.entries.rewards import reward_of_steps
from torchrl_envs.tasks.task import Task
from torchrl_envs.tools.step_environments import StepEnvironments, SteppedInstance

from .audited_task import AgentView, Played, Say, play
from .rows import distinct_rows, solutions_of_rows

_MAX_STEPS: Final = 256
Solution = Callable[[AgentView], str | None]


class StepTask:
    """A task whose episodes are stepped, without the batches of a training run around them.

    Args:
        task: with rows.
        steps: what steps its episodes.
        name: of the task, as it was given.
        kind: of the task, in words.
        is_own: whether whoever audits it can mend it.
        solution: answers that are right, where they are known.
    """

    is_in_process = True
    is_forkable = True
    faults: Sequence[tuple[str, str]] = ()

    def __init__(
        self,
        task: Task,
        steps: StepEnvironments,
        *,
        name: str,
        kind: str = "environment with steps",
        is_own: bool = True,
        solution: Solution | None = None,
    ) -> None:
        self.task, self.steps, self.name, self.kind = task, steps, name, kind
        self.is_own, self._solution = is_own, solution
        self.not_asked: Mapping[str, str] = {
            "tampering": "there is no machine of the agent's",
            "clock": "there are no files that have dates",
        }
        self.rows = distinct_rows(task)
        self.num_rows = len(self.rows) if len(self.rows) > 1 else 0
        environment = steps.factory(self.rows[0].mapped)
        self.max_turns = _limit_of(environment)
        self.reward_range = _declared(environment)
        if callable(getattr(environment, "close", None)):
            environment.close()

    def start(self, seed: int) -> "StepEpisode":
        """Make an environment, and reset it."""
        return StepEpisode(self.rows[seed % len(self.rows)].mapped, seed, self.task, self.steps)

    def play_many(self, say: Say, seeds: Sequence[int], draw: int) -> list[Played]:
        """Play an episode of each seed; draws are counted from one on."""
        return [play(self, say, seed, draw=draw + place) for place, seed in enumerate(seeds)]

    def solutions(self) -> Mapping[str, Solution]:
        """The given one, and what the data says."""
        given = {} if self._solution is None else {"solution": self._solution}
        return {**given, **solutions_of_rows(self.rows)}


class StepEpisode:
    """An episode of an environment that is stepped."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(
        self, row: Mapping[str, Any], seed: int, task: Task, steps: StepEnvironments
    ) -> None:
        self.row, self._steps = row, steps
        guard = OwnRandom(seed) if steps.global_random else nullcontext
        self._instance = SteppedInstance(steps.name, functools.partial(steps.factory, row), guard)
        self.is_over = self.has_ended = False
        self.error = ""
        self.rewards: Sequence[float] = self._instance.rewards
        self._instance.make()
        try:
            query = row.get(task.prompt_column or "prompt")
            options = {column: row[column] for column in steps.reset_columns}
            said = self._instance.reset({"query": query, "seed": seed, "options": options})
        except BaseException:
            self.close()
            raise
        self.opening = _text_of(said)
        self.choices: Sequence[str] = list(getattr(self._instance.environment, "choices", ()))

    def answer(self, text: str) -> str:
        """Step with a text; what the environment raises ends the episode."""
        try:
            messages, is_terminated, is_truncated = self._instance.step(text)
        except Exception as error:  # the environment's own code
            self.is_over, self.error = True, f"{type(error).__name__}: {error}"[:300]
            return ""
        self.is_over = self.has_ended = is_terminated or is_truncated
        return _text_of(messages)

    def reward(self) -> float | None:
        """Sum of the rewards, or the last one, as the task says."""
        if self.error:
            return None
        return reward_of_steps(self.rewards or [0.0], self._steps.reward)

    def after_end(self, text: str) -> tuple[float, bool] | None:
        """Step once more."""
        try:
            _, is_terminated, is_truncated = self._instance.step(text)
        except Exception:  # which is the right thing to do
            return None
        return self.rewards[-1], is_terminated or is_truncated

    def close(self) -> None:
        """Close the environment, if it can be."""
        closing = self._instance.closing("")
        if closing is not None:
            closing()


def _text_of(said: Any) -> str:
    if isinstance(said, str):
        return said
    return "\n".join(str(message["content"]) for message in said or ())


def _limit_of(environment: Any) -> int:
    """Steps after which an episode is given up; one more than the environment's own limit."""
    spec = getattr(environment, "spec", getattr(getattr(environment, "env", None), "spec", None))
    return max(_MAX_STEPS, (getattr(spec, "max_episode_steps", None) or 0) + 1)


def _declared(environment: Any) -> tuple[float, float] | None:
    """The range of rewards that an environment declares, in ``reward_range``."""
    inner = getattr(getattr(environment, "env", environment), "unwrapped", None)
    declared = getattr(environment, "reward_range", getattr(inner, "reward_range", None))
    if not isinstance(declared, tuple | list) or len(declared) != 2:
        return None
    return float(declared[0]), float(declared[1])

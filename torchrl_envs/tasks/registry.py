"""Tasks by name."""

from collections.abc import Callable
from typing import Any, Final

from .calculator import calculator_task
from .catch import catch_task
from .echo import echo_task
from .multi_env import multi_env_task
from .number_guessing import number_guessing_task
from .reasoning_gym_questions import generator_names, question_task
from .task import Task
from .textarena_games import PREFIX, textarena_task
from .wordle import wordle_task

_OWN: Final[dict[str, Callable[..., Task]]] = {
    "calculator": calculator_task,
    "catch": catch_task,
    "echo": echo_task,
    "multi_env": multi_env_task,
    "number_guessing": number_guessing_task,
    "wordle": wordle_task,
}


def make_task(name: str, *, seed: int = 0, **settings: Any) -> Task:
    """A task by its name.

    Args:
        name: one of this package (``"calculator"``, ``"catch"``, ``"echo"``, ``"multi_env"``,
            ``"number_guessing"``, ``"wordle"``), ``"textarena/"`` and a game of TextArena for one
            player, or any generator of reasoning-gym.
        seed: of its data.
        **settings: of the task's own function.

    Raises:
        ValueError: there is no such task; the message lists those that there are.
    """
    if name in _OWN:
        return _OWN[name](seed=seed, **settings)
    if name.startswith(PREFIX):
        return textarena_task(name.removeprefix(PREFIX), seed=seed, **settings)
    if name in generator_names():
        return question_task(name, seed=seed, **settings)
    known = ", ".join([*_OWN, f"{PREFIX}<game>", *generator_names()])
    raise ValueError(f"There is no task {name!r}. There are: {known}.")

"""Tasks by name."""

from typing import Any

from .calculator import calculator_task
from .number_guessing import number_guessing_task
from .reasoning_gym_questions import generator_names, question_task
from .task import Task

_OWN = {"calculator": calculator_task, "number_guessing": number_guessing_task}


def make_task(name: str, *, seed: int = 0, **settings: Any) -> Task:
    """A task by its name.

    Args:
        name: ``"calculator"``, ``"number_guessing"``, or any generator of reasoning-gym.
        seed: of its data.
        **settings: of the task's own function.

    Raises:
        ValueError: there is no such task; the message lists those that there are.
    """
    if name in _OWN:
        return _OWN[name](seed=seed, **settings)
    if name in generator_names():
        return question_task(name, seed=seed, **settings)
    known = ", ".join([*_OWN, *generator_names()])
    raise ValueError(f"There is no task {name!r}. There are: {known}.")

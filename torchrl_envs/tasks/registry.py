"""Tasks by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from inspect import signature
from typing import Any, Final

from .calculator import calculator_task
from .catch import catch_task
from .countdown import countdown_task
from .echo import echo_task
from .external.agent import agent_task
from .external.calculator_agent import calculator_agent_task
from .external.entry_point import environment_task
from .gsm8k import gsm8k_task
from .ifeval import ifeval_task
from .math_problems import math_task
from .multi_env import combine_tasks
from .number_guessing import number_guessing_task
from .openenv import openenv_task
from .questions.reasoning_gym import generator_names, question_task
from .search.task import search_task
from .task import Task
from .textarena_games import PREFIX, textarena_games, textarena_task
from .two_player.nim import nim_task
from .wordle import wordle_task

_DEFAULT_MIX: Final = {"echo": None, "catch": None, "wordle": None}


def multi_env_task(
    *,
    tasks: Any = None,
    level: str | None = None,
    num_rows: int = 4096,
    num_held_out: int = 256,
    num_demonstrations: int = 3072,
    seed: int = 0,
) -> Task:
    """Several tasks in one run, each with a share of the prompts.

    Args:
        tasks: the share of each by its name, {calculator: 0.7, gsm8k: 0.3}, or its share and
            settings, {easy: {task: gcd, share: 1, num_rows: 100}}; Echo, Catch and Wordle in turn
            when not given.
        level: of those that are generators of reasoning-gym, easy or own; when not given easy for
            the embedded model and own for others.
        num_rows: training rows of all together, where the tasks make them.
        num_held_out: held-out rows of all together, at least, as many of each task.
        num_demonstrations: conversations of all together, as many of each task.
        seed: of everything, the order too: which prompt is of which task.

    Raises:
        ValueError: there is no such task, or its settings, shares or data don't fit.
    """
    settings = {
        name: _part_settings(name, given) for name, given in (tasks or _DEFAULT_MIX).items()
    }
    shares = [own.pop("share") for own in settings.values()]
    shared = {
        "level": level,
        "num_rows": -(-num_rows // len(settings)),
        "num_held_out": -(-num_held_out // len(settings)),
        "num_demonstrations": -(-num_demonstrations // len(settings)),
    }
    parts = []
    for name, own in settings.items():
        kind = own.pop("task")
        known = signature(task_factory(kind)).parameters
        given = {key: value for key, value in shared.items() if key in known}
        parts.append(replace(make_task(kind, seed=seed, **{**given, **own}), name=name))
    return combine_tasks("multi_env", parts, shares if tasks else None, seed=seed)


def _part_settings(name: str, given: Any) -> dict[str, Any]:
    """Task, share and settings of one of several tasks."""
    own = dict(given) if isinstance(given, Mapping) else {"share": given}
    share = own.setdefault("share", 1.0)
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float)):
        raise ValueError(f"tasks: the share of {name} must be a number, got {share!r}.")
    return {"task": name, **own}


TASKS: Final[dict[str, Callable[..., Task]]] = {
    "agent": agent_task,
    "calculator": calculator_task,
    "calculator_agent": calculator_agent_task,
    "catch": catch_task,
    "countdown": countdown_task,
    "echo": echo_task,
    "environment": environment_task,
    "gsm8k": gsm8k_task,
    "ifeval": ifeval_task,
    "math": math_task,
    "multi_env": multi_env_task,
    "nim": nim_task,
    "number_guessing": number_guessing_task,
    "openenv": openenv_task,
    "search": search_task,
    "wordle": wordle_task,
}
"""What makes a task, by its name; its keyword arguments are the task's settings."""
GENERATOR_PREFIX: Final = "reasoning_gym/"
"""Names a generator of reasoning-gym even where a task has the same name (``countdown``)."""


def task_factory(name: str) -> Callable[..., Task]:
    """What makes a task; its keyword arguments are the task's settings.

    Args:
        name: one of :data:`TASKS`; ``"textarena/"`` and a game of TextArena for one player; or a
            generator of reasoning-gym, with ``"reasoning_gym/"`` before it or without.

    Raises:
        ValueError: there is no such task; the message names those that are like it.
    """
    if name in TASKS:
        return TASKS[name]
    if name.startswith(PREFIX):
        return partial(textarena_task, name.removeprefix(PREFIX))
    generator = name.removeprefix(GENERATOR_PREFIX)
    if generator in generator_names():
        return partial(question_task, generator)
    raise ValueError(unknown_task(name, [*TASKS, *generator_names()]))


def unknown_task(name: str, known: Sequence[str]) -> str:
    """What to say of a name that no task has."""
    games = textarena_games() if name.startswith(PREFIX) else []
    tail = name.rpartition("/")[2]
    close = get_close_matches(tail, [*known, *games], n=3, cutoff=0.6)
    guess = f" Did you mean {' or '.join(close)}?" if close else ""
    return (
        f"There is no task {name!r}.{guess} There are {', '.join(TASKS)}; {PREFIX}<game>; and any "
        "generator of reasoning-gym (gcd, spell_backward, ...)."
    )


def make_task(name: str, /, *, seed: int = 0, **settings: Any) -> Task:
    """A task by its name.

    Args:
        name: see :func:`task_factory`.
        seed: of its data, where the task makes them.
        **settings: of the task's own function.

    Raises:
        ValueError: there is no such task, or a setting is out of range.
    """
    factory = task_factory(name)
    seeds = {"seed": seed} if "seed" in signature(factory).parameters else {}
    return factory(**seeds, **settings)

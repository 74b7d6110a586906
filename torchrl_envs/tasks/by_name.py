"""Tasks by name, one or several at once."""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from inspect import signature
from typing import Any, Final

from torchrl_data.checks import check_numbers
from torchrl_envs.tasks import find_task, settings_of_task

from .combined import combine_tasks
from .task import Task

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
    settings: dict[str, dict[str, Any]] = {}
    for name, given in (tasks or _DEFAULT_MIX).items():
        own = dict(given) if isinstance(given, Mapping) else {"share": given}
        check_numbers("tasks", **{f"the share of {name}": own.setdefault("share", 1.0)})
        settings[name] = {"task": name, **own}
    shares = [own.pop("share") for own in settings.values()]
    counts = {"num_rows": num_rows, "num_held_out": num_held_out}
    counts["num_demonstrations"] = num_demonstrations
    shared = {name: -(-count // len(settings)) for name, count in counts.items()}
    parts = []
    for name, own in settings.items():
        kind = own.pop("task")
        known = settings_of_task(kind)
        given = {k: value for k, value in {"level": level, **shared}.items() if k in known}
        parts.append(replace(make_task(kind, seed=seed, **{**given, **own}), name=name))
    return combine_tasks("multi_env", parts, shares if tasks else None, seed=seed)


def make_task(name: str, /, *, seed: int = 0, **settings: Any) -> Task:
    """A task by its name.

    Args:
        name: see :func:`~torchrl_envs.tasks.find_task`.
        seed: of its data, where the task makes them.
        **settings: of the task's own function.

    Raises:
        ValueError: there is no such task, or a setting is out of range.
    """
    module, function, arguments = find_task(name)
    factory = getattr(import_module(module), function)
    seeds = {"seed": seed} if "seed" in signature(factory).parameters else {}
    return factory(*arguments, **seeds, **settings)

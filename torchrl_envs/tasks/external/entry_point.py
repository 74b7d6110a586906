"""A function of the user's as a task: it makes an environment of any known protocol, or a task."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from torchrl_data.validation import check_counts
from torchrl_envs.concurrency.calls import accepted_arguments
from torchrl_envs.concurrency.own_random import OwnRandom
from torchrl_envs.tasks.task import Task, load_task_rows
from torchrl_envs.tools.step_environments import StepEnvironments, protocol_of

PROMPT: Final = "Act in the environment: each of your messages is one action."


def environment_task(
    *,
    factory: str,
    arguments: Any = None,
    row_argument: str | None = None,
    reset_columns: Sequence[str] = (),
    reward: str = "sum",
    global_random: bool = False,
    prompt: str = PROMPT,
    dataset: Any = None,
    name: str | None = None,
    split: str | None = None,
    held_out_split: str | None = None,
    system_prompt: str | None = None,
    max_turns: int = 8,
    max_new_tokens: int = 256,
    num_rows: int = 4096,
    num_held_out: int = 64,
    seed: int = 0,
) -> Task:
    """What a function makes: an environment, or a whole task.

    Args:
        factory: ``package.module:name``; what it makes is known by its methods: an environment
            with tools (``EnvironmentTools``) or steps (``StepEnvironments``), or a ``Task``.
        arguments: that it is called with, by name.
        row_argument: the argument that gets the row of the data, if one does.
        reset_columns: columns that are ``options`` of ``reset``, of environments with steps.
        reward: the sum of the steps' rewards, or the last one.
        global_random: see :class:`~torchrl_envs.StepEnvironments`.
        prompt: what every episode begins with where there are no data: they differ in their seed.
        dataset: a hub id, a local path, or rows with a ``prompt`` each.
        name: of the configuration, for a hub id.
        split: which to train on.
        held_out_split: which to test on; when not given, rows of ``split``.
        system_prompt: begins every episode.
        max_turns: most turns of the policy.
        max_new_tokens: most tokens of a turn, for the embedded model.
        num_rows: training rows, where there are no data.
        num_held_out: rows held out.
        seed: given to a function that makes a task.

    Raises:
        ValueError: no such function, too few rows, or a setting has no effect on what it makes.
        TypeError: what it makes follows no known protocol.
    """
    check_counts("environment", max_turns=max_turns, max_new_tokens=max_new_tokens)
    given, make = _arguments(arguments), found("factory", factory)
    rows: Any = [{"prompt": prompt}] * num_rows, [{"prompt": prompt}] * num_held_out
    if dataset is not None:
        splits: dict[str, Any] = {"split": split, "held_out_split": held_out_split}
        rows = load_task_rows(dataset, name=name, num_held_out=num_held_out, **splits)
    made = _tried(factory, make, given, row_argument, next(iter(rows[0])), seed, num_held_out)
    steps: Any = {"reset_columns": reset_columns, "reward": reward, "global_random": global_random}
    if isinstance(made, Task):
        steps |= {"row_argument": row_argument, "dataset": dataset, "system_prompt": system_prompt}
        _refuse(factory, "a task, which has all of its own", steps)
        return made
    if protocol_of(made) is not None and not hasattr(made, "get_reward"):
        call = functools.partial(_from_row, make, given, row_argument)
        parts: dict[str, Any] = {"tools": lambda _: [StepEnvironments(call, **steps)]}
    else:
        _refuse(factory, "an environment with tools", {**steps, "row_argument": row_argument})
        parts = {"environment": functools.partial(make, **given)}
    return Task(
        name="environment",
        train_rows=rows[0],
        held_out_rows=rows[1],
        columns=("prompt", *reset_columns),
        prompt_column="prompt",
        system_prompt=system_prompt,
        max_turns=max_turns,
        max_new_tokens=max_new_tokens,
        **parts,
    )


def _arguments(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"arguments must be {{name: value}}, got {given!r}.")
    return {str(name): value for name, value in given.items()}


def found(setting: str, path: str) -> Callable[..., Any]:
    """What ``package.module:name`` names.

    Args:
        setting: that has it.
        path: its value.

    Raises:
        ValueError: there is no such thing, or it can't be called.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{setting} must be package.module:name, got {path!r}.")
    try:
        named = functools.reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{setting}={path!r} can't be found: {error}") from error
    if not callable(named):
        raise ValueError(f"{setting}={path!r} can't be called: it is {named!r:.80}.")
    return named


def _from_row(
    make: Callable[..., Any],
    arguments: Mapping[str, Any],
    row_argument: str | None,
    row: Mapping[str, Any],
) -> Any:
    return make(**arguments, **({} if row_argument is None else {row_argument: dict(row)}))


def _tried(
    factory: str,
    make: Callable[..., Any],
    arguments: dict[str, Any],
    row_argument: str | None,
    row: Mapping[str, Any],
    seed: int,
    num_held_out: int,
) -> Any:
    """What it makes of the first row, to see what that is; an environment is closed again."""
    own = {"seed": seed, "num_held_out": num_held_out} if _makes_task(make) else {}
    arguments = {**accepted_arguments(make, own), **arguments} if own else arguments
    try:
        with OwnRandom(seed)():  # not the caller's
            made = _from_row(make, arguments, row_argument, row)
    except Exception as error:
        raise ValueError(f"factory={factory!r} failed: {type(error).__name__}: {error}") from error
    if hasattr(made, "close"):
        made.close()
    if not isinstance(made, Task) and not hasattr(made, "reset") and protocol_of(made) is None:
        raise TypeError(
            f"factory={factory!r} made a {type(made).__name__}, which has neither reset() with "
            "tools, nor reset() and step(), nor init() and step()."
        )
    return made


def _makes_task(make: Callable[..., Any]) -> bool:
    try:
        return inspect.signature(make).return_annotation in (Task, "Task")
    except ValueError:  # a class that is not written in Python
        return False


def _refuse(factory: str, what: str, settings: Mapping[str, Any]) -> None:
    usual = inspect.signature(environment_task).parameters
    changed = [name for name, value in settings.items() if value != usual[name].default]
    if changed:
        raise ValueError(f"{changed[0]} has no effect: factory={factory!r} makes {what}.")

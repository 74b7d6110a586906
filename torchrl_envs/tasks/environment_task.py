"""A function of the user's as a task: it makes an environment of any known protocol, or a task."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torchrl_data.checks import check_counts
from torchrl_data.import_path import import_callable
from torchrl_envs.concurrency.calls import accepted_arguments
from torchrl_envs.concurrency.own_random import OwnRandom
from torchrl_envs.datasets import MODEL_FILES, check_source
from torchrl_envs.graders.reward_model import RewardModel
from torchrl_envs.rewards.functions import RewardFunctions
from torchrl_envs.tools.functions import FunctionTools
from torchrl_envs.tools.step_environments import StepEnvironments, protocol_of
from torchrl_envs.transforms.simulated_user import SimulatedUser

from .task import Task, load_task_rows
from .users import simulated_user

PROMPT: Final = "Act in the environment: each of your messages is one action."
_OF_USER: Final = ("model", "temperature", "max_tokens", "instructions", "opens")
_OF_TASK: Final = ("prompt_column", "skip_bad_rows", "system_prompt", "max_turns", "max_new_tokens")


def environment_task(
    *,
    factory: str | None = None,
    tools: Any = (),
    rewards: Any = (),
    reward_weights: Sequence[float] = (),
    user: str | None = None,
    user_model: str | None = None,
    user_temperature: float = 0.0,
    user_max_tokens: int | None = None,
    user_instructions: str | None = None,
    user_opens: bool = False,
    user_tools: Any = (),
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
    prompt_column: str = "prompt",
    skip_bad_rows: bool = False,
    system_prompt: str | None = None,
    max_turns: int = 8,
    max_new_tokens: int = 256,
    num_rows: int = 4096,
    num_held_out: int = 64,
    seed: int = 0,
) -> Task:
    """A task of the user's own parts: an environment, tools, reward functions, data.

    At least one of ``factory``, ``tools`` and ``rewards`` is given; they go together.

    Args:
        factory: ``package.module:name``; what it makes is known by its methods: an environment
            with tools (``EnvironmentTools``) or steps (``StepEnvironments``), or a ``Task``.
        tools: functions that the policy can call (``FunctionTools``): one ``module:name``, or a
            list of them.
        rewards: functions that score (``RewardFunctions``): one ``module:name``, or a list; a
            folder, or a hub id with its owner, is that of a reward model (``RewardModel``).
        reward_weights: of these, in the same order; 1 each when not given.
        user: who answers what the policy says (``SimulatedUser``): a server of OpenAI's protocol,
            http://host:8000/v1; ``module:name``, a function of questions; or a model of this
            process, a hub id or a folder, which is not trained.
        user_model: its name at the server.
        user_temperature: of a server's or a model's answers.
        user_max_tokens: most tokens of such an answer; 512 of a model of this process, and what a
            server takes, when not given.
        user_instructions: what the user is told, with ``{names}`` of columns; when not given, a
            text with the column ``scenario``.
        user_opens: whether the user begins; its words take the place of the prompt.
        user_tools: functions that the user can call, and the policy can't: one ``module:name``, or
            a list; beside methods of the factory's class that ``user_tool`` marks.
        arguments: that the factory is called with, by name.
        row_argument: the argument that gets the row of the data, if one does.
        reset_columns: columns that are ``options`` of ``reset``, of environments with steps.
        reward: the sum of the steps' rewards, or the last one.
        global_random: see :class:`~torchrl_envs.StepEnvironments`.
        prompt: what every episode begins with where there are no data: they differ in their seed.
        dataset: a hub id, a local path, or rows with a prompt each.
        name: of the configuration, for a hub id.
        split: which to train on.
        held_out_split: which to test on; when not given, rows of ``split``.
        prompt_column: the column with the prompts.
        skip_bad_rows: leave out rows that can't be used, and log how many; else they are refused.
        system_prompt: begins every episode.
        max_turns: most turns of the policy.
        max_new_tokens: most tokens of a turn, for the embedded model.
        num_rows: training rows, where there are no data.
        num_held_out: rows held out.
        seed: given to a function that makes a task.

    Raises:
        ValueError: no such function, too few rows, nothing that scores, or a setting has no effect
            on what the factory makes.
        TypeError: what it makes follows no known protocol.
    """
    settings: Any = dict(locals())
    check_counts("environment", max_turns=max_turns, max_new_tokens=max_new_tokens)
    called, scoring = _functions("tools", tools), _scoring(rewards, list(reward_weights))
    if factory is None and not (dataset and (called or scoring)):
        raise ValueError(
            "give it factory=, or tools= or rewards= (each module:name) with dataset=, rows with a "
            "prompt each."
        )
    rows = _rows(settings)
    steps: Any = {"reset_columns": reset_columns, "reward": reward, "global_random": global_random}
    of_row, parts = {"row_argument": row_argument}, dict[str, Any]()
    sources: list[Any] = [functools.partial(FunctionTools, called)] if called else []
    if factory is None:
        _refuse("no factory= is given", {**steps, **of_row, "arguments": arguments})
        is_scored = False
    else:
        sizes, row = {"seed": seed, "num_held_out": num_held_out}, next(iter(rows[0]))
        make, made = _tried(factory, arguments, row_argument, row, **sizes)
        whose = f"factory={factory!r} makes"
        if isinstance(made, Task):
            others = settings.keys() - {"factory", "arguments", "num_held_out", "seed"}
            its = {name: settings[name] for name in sorted(others)}
            _refuse(f"{whose} a task, which has all of its own", its)
            return made
        is_scored = hasattr(made, "get_reward")
        if protocol_of(made) is not None and not is_scored:
            sources.append(lambda **_: StepEnvironments(make, **steps))
            is_scored = True
        else:
            _refuse(f"{whose} an environment with tools", {**steps, **of_row})
            parts["environment"] = make
    if not (is_scored or scoring):
        raise ValueError(
            "nothing scores an episode: give it rewards=module:name, or a factory= whose class has "
            "get_reward()."
        )
    if sources:
        parts["tools"] = lambda shown: [source(show_schemas=shown) for source in sources]
    parts |= {"rewards": scoring, "user": _user(settings)}
    return Task(
        name="environment",
        train_rows=rows[0],
        held_out_rows=rows[1],
        columns=(prompt_column, *reset_columns),
        **{name: settings[name] for name in _OF_TASK},
        **parts,
    )


def _user(settings: Mapping[str, Any]) -> Callable[[], SimulatedUser | None]:
    """Return what makes the user; what is wrong with its settings is said now."""
    of_user = {name: settings[f"user_{name}"] for name in _OF_USER}
    tools = _functions("user_tools", settings["user_tools"])
    make = functools.partial(simulated_user, settings["user"], **of_user, tools=tools)
    make()
    return make


def _functions(setting: str, given: Any) -> list[Callable[..., Any]]:
    """The functions that a setting names, one or several."""
    names = [given] if isinstance(given, str) else list(given or ())
    return [import_callable(setting, str(name)) for name in names]


def _rows(settings: Mapping[str, Any]) -> tuple[Any, Sequence[dict[str, Any]]]:
    """Return the training and held-out rows: of the data, or of one prompt over and over."""
    if settings["dataset"] is None:
        prompt = {settings["prompt_column"]: settings["prompt"]}
        return [prompt] * settings["num_rows"], [prompt] * settings["num_held_out"]
    names = ("name", "split", "held_out_split", "num_held_out", "prompt_column", "skip_bad_rows")
    return load_task_rows(settings["dataset"], **{name: settings[name] for name in names})


def _scoring(rewards: Any, weights: list[float]) -> Callable[[], list[RewardFunctions]] | None:
    """Make of the reward functions what makes their transform; ``None`` where there are none."""
    names = [rewards] if isinstance(rewards, str) else list(rewards or ())
    scores = [_scorer(str(name)) for name in names]
    if weights and len(weights) != len(scores):
        raise ValueError(f"reward_weights={weights} are for {len(scores)} rewards.")
    return (lambda: [RewardFunctions(scores, weights=weights or None)]) if scores else None


def _scorer(name: str) -> Callable[..., Any]:
    """A function of the user's, or a reward model, whose weights are loaded when they score."""
    is_model = Path(name).is_dir() or (":" not in name and "/" in name)
    if not is_model or name.endswith(".py"):
        return import_callable("rewards", name)
    try:
        check_source(name, MODEL_FILES)
        return RewardModel(name, load=False)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"rewards={name!r} is no reward model: {first}") from error


def _tried(
    factory: str, arguments: Any, row_argument: str | None, row: Mapping[str, Any], **sizes: int
) -> tuple[Callable[..., Any], Any]:
    """Factory of an environment, or of a task of so many rows, and its result for the first row.

    That one is to see what it is; an environment is closed again.
    """
    make = import_callable("factory", factory)
    if arguments is not None and not isinstance(arguments, Mapping):
        raise ValueError(f"arguments must be {{name: value}}, got {arguments!r}.")
    given = {str(name): value for name, value in (arguments or {}).items()}
    try:
        makes_task = inspect.signature(make).return_annotation in (Task, "Task")
    except ValueError:  # a class that is not written in Python
        makes_task = False
    if makes_task:
        given = {**accepted_arguments(make, sizes), **given}

    def make_of(row: Mapping[str, Any] | None = None) -> Any:
        return make(**given, **({} if row_argument is None else {row_argument: dict(row or {})}))

    try:
        with OwnRandom(sizes["seed"])():  # not the caller's
            made = make_of(row)
    except Exception as error:
        raise ValueError(f"factory={factory!r} failed: {type(error).__name__}: {error}") from error
    if hasattr(made, "close"):
        made.close()
    if not isinstance(made, Task) and not hasattr(made, "reset") and protocol_of(made) is None:
        raise TypeError(
            f"factory={factory!r} made a {type(made).__name__}, which has neither reset() with "
            "tools, nor reset() and step(), nor init() and step()."
        )
    return make_of, made


def _refuse(why: str, settings: Mapping[str, Any]) -> None:
    usual = inspect.signature(environment_task).parameters
    changed = [name for name, value in settings.items() if value != usual[name].default]
    if changed:
        raise ValueError(f"{changed[0]} has no effect: {why}.")

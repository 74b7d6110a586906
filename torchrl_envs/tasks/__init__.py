"""Tasks: an environment, its data and, where a model starts from nothing, demonstrations.

This file knows their names and settings without importing them, which takes seconds.
"""

import ast
import re
import sys
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from inspect import Parameter, cleandoc
from pathlib import Path
from typing import Any, Final

from torchrl_data import import_package

TASKS: Final[dict[str, str]] = {
    "agent": "torchrl_envs.tasks.agent_task:agent_task",
    "calculator": "torchrl_envs.tasks.calculator:calculator_task",
    "calculator_agent": "torchrl_tasks.calculator_agent:calculator_agent_task",
    "catch": "torchrl_tasks.catch:catch_task",
    "countdown": "torchrl_envs.tasks.countdown:countdown_task",
    "echo": "torchrl_tasks.echo:echo_task",
    "environment": "torchrl_envs.tasks.environment_task:environment_task",
    "gsm8k": "torchrl_envs.tasks.gsm8k:gsm8k_task",
    "harbor": "torchrl_envs.tasks.harbor:harbor_task",
    "ifeval": "torchrl_tasks.ifeval.ifeval:ifeval_task",
    "math": "torchrl_envs.tasks.math_problems:math_task",
    "multi_env": "torchrl_envs.tasks.by_name:multi_env_task",
    "nim": "torchrl_tasks.nim:nim_task",
    "number_guessing": "torchrl_tasks.number_guessing:number_guessing_task",
    "openenv": "torchrl_envs.tasks.openenv:openenv_task",
    "ordering": "torchrl_tasks.ordering:ordering_task",
    "search": "torchrl_tasks.search.search:search_task",
    "tau2": "torchrl_tasks.tau2.tau2:tau2_task",
    "terminal": "torchrl_tasks.terminal:make_task",
    "wordle": "torchrl_tasks.wordle:wordle_task",
}
"""``module:function`` of what makes a task, by its name."""
PREFIX: Final = "textarena/"
"""Begins the name of a game of TextArena."""
GENERATOR_PREFIX: Final = "reasoning_gym/"
"""Names a generator of reasoning-gym even where a task has the same name (``countdown``)."""
_PLAIN: Final = (int, float, str, bool, type(None))


def find_task(name: str) -> tuple[str, str, tuple[str, ...]]:
    """Return what makes a task: module and function, and the arguments that the name stands for.

    Args:
        name: one of :data:`TASKS`; ``"textarena/"`` and a game of TextArena for one player; or a
            generator of reasoning-gym, with ``"reasoning_gym/"`` before it or without.

    Raises:
        ValueError: there is no such task; the message names those that are like it.
        ImportError: it may be a generator of reasoning-gym, which is not installed.
    """
    if name in TASKS:
        module, _, function = TASKS[name].partition(":")
        return module, function, ()
    if name.startswith(PREFIX):
        return f"{__name__}.textarena", "textarena_task", (name.removeprefix(PREFIX),)
    generators = generator_names()
    if (generator := name.removeprefix(GENERATOR_PREFIX)) in generators:
        return f"{__name__}.reasoning_gym", "question_task", (generator,)
    close = get_close_matches(name.rpartition("/")[2], [*TASKS, *generators], n=3, cutoff=0.6)
    guess = f" Did you mean {' or '.join(close)}?" if close else ""
    raise ValueError(
        f"There is no task {name!r}.{guess} There are {', '.join(TASKS)}; {PREFIX}<game>; and any "
        "generator of reasoning-gym (gcd, spell_backward, ...)."
    )


_parsed: Final = cache(lambda path: ast.parse(Path(path).read_text(encoding="utf-8")))
"""The source of a module, which may make several tasks."""


@cache
def settings_of_task(name: str) -> dict[str, tuple[str, Any, str]]:
    """The settings of a task, as the source of its function has its keyword arguments.

    Returns:
        By its name the annotation of each, its default (``inspect.Parameter.empty`` where there
        is none), and what the docstring says of it.

    Raises:
        ValueError: there is no such task.
        ImportError: see :func:`find_task`.
    """
    module, function, _ = find_task(name)
    spec: Any = find_spec(module)
    body = _parsed(spec.origin).body
    constants = {ast.unparse(x.target): x.value for x in body if isinstance(x, ast.AnnAssign)}
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    made_by = functions[function]
    arguments = made_by.args
    docstring = cleandoc(ast.get_docstring(made_by) or "")
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", docstring, re.MULTILINE | re.DOTALL)
    said = r"^    (\w+): (.*?)(?=^    \S|\Z)"
    pairs = re.findall(said, section[1] if section else "", re.MULTILINE | re.DOTALL)
    helps = {argument: " ".join(text.split()) for argument, text in pairs}
    found = {}
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        value = constants[default.id] if isinstance(default, ast.Name) else default
        kind = "" if argument.annotation is None else ast.unparse(argument.annotation)
        usual = Parameter.empty if value is None else ast.literal_eval(value)
        found[argument.arg] = kind, usual, helps.get(argument.arg, "")
    return found


def load_reasoning_gym() -> Any:
    """The package.

    Raises:
        ImportError: it is not installed, or lacks a package.
    """
    install = "pip install reasoning-gym"
    return import_package("reasoning_gym", who="A task of reasoning-gym", install=install)


def generator_names() -> list[str]:
    """Names of all generators of reasoning-gym, which is not imported for that: it takes seconds.

    Those that a program has registered itself are among them.

    Raises:
        ImportError: the package is not installed.
    """
    # What is registered is all of it only where the package was imported to its end.
    factory = sys.modules.get("reasoning_gym.factory")
    return sorted({*_own_generators(), *getattr(factory, "DATASETS", ())})


@cache
def _own_generators() -> frozenset[str]:
    """Names of the generators that the package brings, from its files."""
    package = find_spec("reasoning_gym") or load_reasoning_gym().__spec__
    files = Path(str(package.origin)).parent.rglob("*.py")
    texts = (path.read_text(encoding="utf-8") for path in files)
    named = re.compile(r'^(?:DATASET_NAME = |register_dataset\()"(\w+)"', re.MULTILINE)
    return frozenset(name for text in texts for name in named.findall(text))


def generator_settings(generator: str) -> dict[str, Any]:
    """The settings of a generator that plain values can write, with their defaults.

    Args:
        generator: its name.

    Returns:
        Numbers, strings, booleans, ``None`` and lists of them, by name; size and seed are not
        among them.
    """
    kind = load_reasoning_gym().factory.DATASETS[generator][1]
    defaults = {}
    for one in fields(kind):
        make: Any = one.default_factory
        value = make() if one.default is MISSING else one.default
        value = list(value) if isinstance(value, tuple) else value
        plain = value if isinstance(value, list) else [value]
        if one.name not in ("size", "seed") and all(isinstance(x, _PLAIN) for x in plain):
            defaults[one.name] = value
    return defaults

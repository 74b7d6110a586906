"""The command line of a recipe: its help, its task's settings, and errors in words."""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, is_dataclass, make_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf

from torchrl_envs.tasks.reasoning_gym import generator_settings
from torchrl_envs.tasks.registry import TASKS, task_factory

from .schema import EMBEDDED, PRETRAINED, Recipe, SettingsError

# The help of a recipe: every choice and every setting, with its value and what it means.


def help_text(recipe: Recipe, cfg: DictConfig, groups: Mapping[str, Sequence[str]]) -> str:
    """All that a recipe can be told.

    Args:
        recipe: whose settings they are.
        cfg: the settings as chosen so far.
        groups: the choices of each group.
    """
    lines = [
        recipe.summary,
        "",
        f"  {recipe.name}.py {recipe.example}",
        "",
        "Choices (group=choice); --multirun takes several, with commas:",
    ]
    for group, choices in groups.items():
        more = ", textarena/<game>, any generator of reasoning-gym" if group == "task" else ""
        lines.append(f"  {group:<12}{', '.join(choices)}{more}")
    lines += ["", f"Settings (setting=value), with the values of task={cfg.task.id}:", ""]
    root = _described(recipe.config)
    for name in (n for n in cfg if not isinstance(cfg._get_node(n), DictConfig)):
        lines.append(_setting(recipe, cfg, str(name), root.get(str(name), "")))
    for name in (n for n in cfg if isinstance(cfg._get_node(n), DictConfig) and n != "task"):
        of_group = _described(OmegaConf.get_type(cfg, str(name)))
        lines += ["", f"{name}: {of_group['']}"]
        lines += [
            _setting(recipe, cfg, f"{name}.{key}", of_group.get(str(key), "")) for key in cfg[name]
        ]
    lines += ["", f"task: {cfg.task.id}"]
    factory = task_factory(cfg.task.id)
    said = _arguments(inspect.getdoc(getattr(factory, "func", factory)) or "")
    for key in (k for k in setting_names(cfg.task) if k not in ("id", "config")):
        lines.append(_setting(recipe, cfg, f"task.{key}", said.get(key, "")))
    return "\n".join(lines)


def _setting(recipe: Recipe, cfg: DictConfig, key: str, text: str) -> str:
    value = "???" if OmegaConf.is_missing(cfg, key) else OmegaConf.select(cfg, key)
    embedded, pretrained = {**EMBEDDED, **recipe.embedded}, {**PRETRAINED, **recipe.pretrained}
    if value is None and key in {**embedded, **pretrained}:
        own = [d.get(key, "the task's") for d in (embedded, pretrained)]
        text = f"{text} [embedded model: {own[0]}; given model: {own[1]}]".strip()
    plain = value is None or isinstance(value, bool)
    shown = {None: "null", True: "true", False: "false"}[value] if plain else str(value)
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    return f"  {f'{key}={shown}':<44} {text}".rstrip()


def _described(kind: type | None) -> dict[str, str]:
    """What the docstrings of a data class's fields say, and under ``""`` its own."""
    assert kind is not None
    found = {"": inspect.getdoc(kind) or ""}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        (node,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(node, ast.ClassDef)
        for line, after in zip(node.body, [*node.body[1:], None], strict=True):
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                found[line.target.id] = " ".join(str(after.value.value).split())
    return found


def _arguments(docstring: str) -> dict[str, str]:
    """What the ``Args:`` section of a docstring says of each argument."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", docstring, re.MULTILINE | re.DOTALL)
    if section is None:
        return {}
    pairs = re.findall(r"^    (\w+): (.*?)(?=^    \S|\Z)", section[1], re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in pairs}


def setting_names(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """The path of each setting."""
    for key in cfg:
        yield f"{prefix}{key}"
        inside = None if OmegaConf.is_missing(cfg, key) else cfg._get_node(key)
        if isinstance(inside, DictConfig) and not inside._is_none():
            yield from setting_names(inside, f"{prefix}{key}.")


# The command line: settings of the chosen task, and what was misspelt.

GIVEN_BY_THE_SCRIPT: Final = {"seed": "seed", "num_held_out": "evaluate.num_prompts"}
"""Settings of tasks that the script's own settings stand for."""
_TYPES: Final = (int, float, bool, str, int | None, float | None, bool | None, str | None)
SHARED: Final = Path(__file__).parent / "config"
"""Files that all recipes have."""
_FILES: Final = ("profile", "experiment", "debug")
"""Groups of YAML files."""


# ``${of_embedded:VALUE}`` in a file of settings: none where a model is given.
OmegaConf.register_new_resolver(
    "of_embedded",
    lambda value, *, _root_: value if _root_.policy.model is None else None,
    replace=True,
)


# Tasks --------------------------------------------------------------------------------------------


def store_task(name: str) -> None:
    """Tell Hydra the settings of a task: the keyword arguments of the function that makes it.

    Raises:
        SettingsError: there is no such task.
    """
    try:
        factory = task_factory(name)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    except ImportError as error:
        raise SettingsError(f"task={name}: {error}") from error
    hints = get_type_hints(getattr(factory, "func", factory))
    columns: list[Any] = [("id", str, field(default=name))]
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.name in GIVEN_BY_THE_SCRIPT:
            continue
        if parameter.name == "config":
            own: Any = generator_settings(factory.args[0])  # type: ignore[attr-defined]
            columns.append(("config", Any, field(default_factory=own.copy)))
            continue
        kind = hints[parameter.name] if hints[parameter.name] in _TYPES else Any
        default = MISSING if parameter.default is parameter.empty else parameter.default
        default = list(default) if isinstance(default, tuple) else default
        make = field(default_factory=default.copy) if isinstance(default, list) else None
        columns.append((parameter.name, kind, make or field(default=default)))
    node = make_dataclass("TaskConfig", columns)
    folder, _, tail = f"task/{name}".rpartition("/")
    ConfigStore.instance().store(group=folder, name=tail, node=node, package="task")


def task_settings(cfg: DictConfig) -> dict[str, Any]:
    """Keyword arguments for the function that makes the chosen task.

    Raises:
        SettingsError: a setting that has no default is missing.
    """
    missing = sorted(OmegaConf.missing_keys(cfg.task))
    if missing:
        raise SettingsError(f"The task {cfg.task.id} needs task.{missing[0]}=...")
    settings = OmegaConf.to_container(cfg.task, resolve=True)
    assert isinstance(settings, dict)
    name = settings.pop("id")
    if "config" in settings:  # only what was changed: a generator has more than can be written
        defaults = generator_settings(task_factory(name).args[0])  # type: ignore[attr-defined]
        changed = {k: v for k, v in settings["config"].items() if v != defaults[k]}
        settings["config"] = changed
    usual = inspect.signature(task_factory(name)).parameters
    return {
        str(key): tuple(value)
        if isinstance(value, list) and isinstance(usual[str(key)].default, tuple)
        else value
        for key, value in settings.items()
    }


# What was written ---------------------------------------------------------------------------------


def prepare(recipe: Recipe, arguments: Sequence[str]) -> str | None:
    """Make the command line's task known, and check the names that are on it.

    Args:
        recipe: whose settings they are.
        arguments: without the program's name.

    Returns:
        The help text, if that was asked for.

    Raises:
        SettingsError: a task, a choice or a setting is unknown; the message has what is like it.
    """
    for name in TASKS:
        store_task(name)
    written = [a for a in arguments if ("=" in a and not a.startswith("-")) or a.startswith("~")]
    try:
        overrides = OverridesParser.create().parse_overrides(written)
    except HydraException as error:
        raise SettingsError(str(error).splitlines()[0]) from error
    known_groups = groups(recipe)
    choices = [o for o in overrides if o.key_or_group in known_groups]
    for override in choices:
        _check_choice(known_groups, override)
    composed = compose_config(
        recipe, [o.input_line or "" for o in choices if not o.is_sweep_override()]
    )
    known = sorted(setting_names(composed))
    for override in overrides:
        if override not in choices:
            _check_setting(override, known, composed)
    # Values of a wrong type show here, in one line, and not when Hydra has begun a run.
    own = (o for o in overrides if not o.key_or_group.startswith("hydra"))
    compose_config(recipe, [o.input_line or "" for o in own if not o.is_sweep_override()])
    if {"--help", "-h"} & set(arguments):
        return help_text(recipe, composed, known_groups)
    return None


def compose_config(recipe: Recipe, overrides: Sequence[str]) -> DictConfig:
    """The settings that a command line gives.

    Raises:
        SettingsError: they do not go together.
    """
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(recipe.config_dir)):
            return compose(config_name=recipe.name, overrides=list(overrides))
    except HydraException as error:
        told = str(error.__cause__ or error)
        key = re.search(r"full_key: (\S+)", told)
        words = re.split(r"\n\s+full_key", told)[0].strip()
        raise SettingsError(f"{key[1]}: {words}" if key else words) from error


def groups(recipe: Recipe) -> dict[str, list[str]]:
    """The choices of each group."""
    found = {"task": list(TASKS)} | {name: list(each) for name, each in recipe.all_groups.items()}
    for name in _FILES:
        paths = [path for each in (recipe.config_dir, SHARED) for path in (each / name).glob("*")]
        found[name] = sorted(path.stem for path in paths if path.suffix == ".yaml")
    return found


def _check_choice(known: Mapping[str, Sequence[str]], override: Override) -> None:
    group = override.key_or_group
    if override.is_sweep_override():
        chosen = list(override.sweep_string_iterator())
    else:
        chosen = [override.value()]
    for choice in chosen:
        if group == "task" and isinstance(choice, str):
            store_task(choice)
        elif choice not in (*known[group], None):
            raise SettingsError(
                f"{group} has no choice {choice!r}.{_guess(str(choice), known[group])} There "
                f"are {', '.join(known[group])}."
            )


def _check_setting(override: Override, known: Sequence[str], composed: DictConfig) -> None:
    key = override.key_or_group
    if override.is_delete():
        raise SettingsError(f"{key} can't be taken out: give it a value, null for none.")
    if key in known or key.startswith("hydra.") or override.is_add():
        return
    parent = key.rpartition(".")[0]
    if isinstance(OmegaConf.select(composed, parent), DictConfig) and parent.endswith("kwargs"):
        raise SettingsError(
            f"{parent} is a dictionary: write '{parent}={{{key.rpartition('.')[2]}: ...}}' or "
            f"+{override.input_line}."
        )
    same = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    beside = [name for name in known if name.rpartition(".")[0] == parent != ""]
    guess = f" Did you mean {' or '.join(same)}?" if same else _guess(key, beside or known)
    if beside and not guess:
        guess = f" There are {', '.join(beside)}."
    raise SettingsError(f"There is no setting {key!r}.{guess} --help shows all.")


def _guess(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=2, cutoff=0.75)
    return f" Did you mean {' or '.join(close)}?" if close else ""

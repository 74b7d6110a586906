"""Files of settings among the arguments: what they say becomes arguments."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .arguments import name_of, parse, written
from .errors import SettingsError
from .recipe import FILES, Recipe


class _FromFile(NamedTuple):
    """An argument that a file stands for."""

    text: str
    file: str


def with_files(recipe: Recipe, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Replace each YAML file among the arguments with the settings in it, as if they were typed.

    A file says what ``name=value`` would: groups of settings, a choice of a group
    (``loss: dr_grpo``), or paths (``train.num_steps: 7``). What is typed wins over every file. Of
    files and of ``profile=``, ``experiment=`` and ``debug=`` the later one wins. ``task=NAME`` for
    another task leaves out the file's settings of its own.

    Args:
        recipe: whose settings they are.
        arguments: without the program's name.

    Returns:
        The arguments without files, those of files first; and the file that each of these is from.

    Raises:
        SettingsError: a file is not there, is no YAML of settings, or sets parts of a group of
            which another choice is typed.
    """
    found: dict[str, _FromFile] = {}
    typed: list[str] = []
    for argument in arguments:
        if _is_file(argument):
            new = {name_of(text): _FromFile(text, argument) for text in _read(recipe, argument)}
            for each in new.values():
                _give_way(recipe, each.text, found, by=argument)
            found |= new
            continue
        typed.append(argument)
        if name_of(argument) in FILES and found:
            _leave_to(recipe, argument, found)
    for argument in typed if found else ():
        _give_way(recipe, argument, found, by=argument)
    return [*(each.text for each in found.values()), *typed], dict(found.values())


def _is_file(argument: str) -> bool:
    is_yaml = argument.endswith((".yaml", ".yml")) and not argument.startswith("-")
    return is_yaml and ("=" not in argument or Path(argument).is_file())


def _read(recipe: Recipe, file: str | Path) -> Iterator[str]:
    """Give the arguments that a file stands for."""
    path = Path(file)
    if not path.is_file():
        raise SettingsError(f"There is no file {path}, from {Path.cwd()}.")
    try:
        loaded = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise SettingsError(f"{path} is no YAML: {' '.join(str(error).split())}.") from error
    whole = OmegaConf.to_container(loaded)
    if not isinstance(whole, dict) or not whole:
        raise SettingsError(f"{path} has no settings: write lines such as 'train.num_steps: 7'.")
    for name, value in _settings_in(recipe, path, whole):
        plain = f"{name}={value}"
        is_plain = isinstance(value, str) and (read := parse(plain)) and read._value == value
        text = plain if is_plain else f"{name}={written(value)}"
        if (read := parse(text)) is None or repr(read.value()) != repr(value):
            raise SettingsError(
                f"{path}: {name} can't be {value!r}. Values are texts, numbers, true, false, null, "
                "lists, and dictionaries whose names have the letters a to z, digits and _ - . / @."
            )
        yield text


def _settings_in(recipe: Recipe, path: Path, whole: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Give each setting in a file, by its path."""
    sections = {name for name, kind in get_type_hints(recipe.config).items() if is_dataclass(kind)}
    for name, value in whole.items():
        if name == "defaults":
            yield from _defaults(path, value)
        elif name == "hydra" and isinstance(value, Mapping):
            yield from _leaves(value, "hydra.")
        elif name == "task" and isinstance(value, Mapping):
            if "id" in value:
                yield "task", value["id"]
            yield from ((f"task.{key}", each) for key, each in value.items() if key != "id")
        elif name in sections and isinstance(value, Mapping):
            yield from ((f"{name}.{key}", each) for key, each in value.items())
        else:
            yield str(name), value


def _defaults(path: Path, listed: Any) -> Iterator[tuple[str, Any]]:
    """Give the choices in a list of defaults, as in a file of ``config/experiment``."""
    for each in listed if isinstance(listed, list) else [listed]:
        match each:
            case "_self_":
                continue
            case dict() if len(each) == 1:
                ((group, choice),) = each.items()
                yield str(group).removeprefix("override ").strip().lstrip("/"), choice
            case _:
                raise SettingsError(
                    f"{path}: a default is '- override /group: choice', got {each}."
                )


def _leaves(settings: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _choices(argument: str) -> list[Any]:
    """Give what an argument chooses: several values where it is of a sweep."""
    if (read := parse(argument)) is None:
        return []
    return [*read.sweep_string_iterator()] if read.is_sweep_override() else [read.value()]


def _leave_to(recipe: Recipe, argument: str, found: dict[str, _FromFile]) -> None:
    """Take out of earlier files what a typed profile, experiment or debug file sets."""
    chosen = _choices(argument)
    for choice in chosen:
        places = (folder / name_of(argument) / f"{choice}.yaml" for folder in recipe.folders)
        if (path := next(filter(Path.is_file, places), None)) is None:
            continue  # none, or refused later, in words
        for text in _read(recipe, path):
            if len(chosen) > 1 and (before := found.get(name_of(text))):
                raise SettingsError(
                    f"{argument}: {choice} sets {name_of(text)}, and so does {before.file}, which "
                    "comes before. Give the file after it."
                )
            _give_way(recipe, text, found, by=argument)


def _give_way(recipe: Recipe, argument: str, found: dict[str, _FromFile], *, by: str) -> None:
    """Take out of what files say what an argument says in its place.

    Args:
        recipe: whose settings they are.
        argument: ``name=value``.
        found: what files say, by the setting's path; changed in place.
        by: what was typed that stands for the argument.
    """
    group, chosen = name_of(argument), _choices(argument)
    before = found.pop(group, None)
    parts = {name: each for name, each in found.items() if name.startswith(f"{group}.")}
    if group == "task":
        if before is not None and _choices(before.text) != chosen:
            for name in parts:
                del found[name]
        return
    for node in (recipe.all_groups.get(group, {}).get(str(each)) for each in chosen):
        names = [] if node is None else [each.name for each in fields(node)]
        own = [n for n in names if getattr(node, n) != getattr(type(node)(), n)] or names[:1]
        if both := [each for n in own if (each := parts.get(f"{group}.{n}"))]:
            remedy = " ".join(f"{group}.{n}={getattr(node, n)}" for n in own)
            what = " ".join(each.text for each in both)
            raise SettingsError(
                f"{by}: it chooses {argument}, and {both[0].file} says {what}. Take that out of "
                f"the file, or type {remedy} in its place."
            )

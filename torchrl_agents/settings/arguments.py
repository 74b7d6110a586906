"""Arguments of a recipe as they are typed: files of settings, texts as they are, files of text.

Hydra reads ``name=value`` by a grammar of its own, in which a comma, an apostrophe or a letter
beyond ASCII means something else, or is refused. What is here writes such arguments so that Hydra
reads what was meant.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, get_type_hints

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import AnyNode, DictConfig, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from .schema import FILES, Recipe, SettingsError

OF_A_START: Final = ("resume", "overwrite", "dry_run")
"""Settings of one start of a run, which the settings that it writes down leave out."""
_PLAIN: Final = re.compile(r"((?!(true|false|null|inf|nan)$)[a-z_/][\w./:-]*)?", re.ASCII | re.I)
"""Texts that Hydra reads as they are."""


def name_of(argument: str) -> str:
    """Give the setting's path in ``name=value``, without Hydra's ``+`` and ``~``."""
    return argument.partition("=")[0].lstrip("+~")


def setting_names(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """The path of each setting."""
    for key in cfg:
        yield f"{prefix}{key}"
        inside = None if OmegaConf.is_missing(cfg, key) else cfg._get_node(key)
        if isinstance(inside, DictConfig) and not inside._is_none():
            yield from setting_names(inside, f"{prefix}{key}.")


def parse(argument: str) -> Override | None:
    """Read one argument by Hydra's grammar; ``None`` where the grammar refuses it."""
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        return None


# A value as Hydra's grammar has it.


def escaped(value: Any) -> Any:
    """Escape ``${`` in all texts of a value, so that OmegaConf takes them as they are."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", value)
    if isinstance(value, Mapping):
        return {key: escaped(each) for key, each in value.items()}
    return [escaped(each) for each in value] if isinstance(value, list | tuple) else value


def written(value: Any) -> str:
    """Write a value by Hydra's grammar: texts in quotes, lists and dictionaries in brackets."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return QuotedString(value, Quote.single).with_quotes()
        case Mapping():
            pairs = (f"{_written_key(key)}:{written(each)}" for key, each in value.items())
            return f"{{{','.join(pairs)}}}"
        case list() | tuple():
            return f"[{','.join(map(written, value))}]"
    return str(value)


def _written_key(key: Any) -> str:
    plain = str(key).lower() if isinstance(key, bool) else str(key)
    return re.sub(r"[\\()\[\]{}:=, \t]", r"\\\g<0>", plain)


def settings_text(settings: Any) -> str:
    """Give the settings of a run as YAML, from which :func:`with_files` reads them again.

    Args:
        settings: an object of a recipe's data class, whose interpolations have been resolved.
    """
    own = {name: value for name, value in asdict(settings).items() if name not in OF_A_START}
    return OmegaConf.to_yaml(OmegaConf.create(escaped(own)))


# Files of settings: what they say becomes arguments.


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


# Texts as they are.


def with_texts(
    recipe: Recipe, arguments: Sequence[str], compose: Callable[[Sequence[Override]], DictConfig]
) -> list[str]:
    """Write texts so that Hydra reads them as they were typed, and read those that files hold.

    Of a setting that is a text, what Hydra's grammar refuses, or would read as something else than
    this text, is the text itself. ``@FILE`` is what a file holds, without the line break at its
    end; ``@@`` begins a text with ``@``. A dictionary adds to a setting that takes one. As in Hydra
    ``null`` is none, a text in quotes is what is in them, ``${seed}`` is the value of another
    setting, and commas make several values where ``--multirun`` is there.

    Args:
        recipe: whose settings they are.
        arguments: without the program's name.
        compose: gives the settings for choices of groups, which tell what is a text.

    Returns:
        The arguments; those that Hydra reads rightly are as they were.

    Raises:
        SettingsError: a file of text can't be read.
    """
    groups = {"task", *FILES, *recipe.all_groups}
    odd = {
        each
        for each in arguments
        if not each.startswith(("-", "hydra.", "hydra/"))
        and not _PLAIN.fullmatch(each.partition("=")[2])
        and name_of(each) not in groups
    }
    if not odd:
        return list(arguments)
    several = bool({"-m", "--multirun"} & {*arguments})
    choices = (parse(each) for each in arguments if name_of(each) in groups)
    try:
        composed = compose([each for each in choices if each is not None])
    except SettingsError:
        return list(arguments)  # refused later, in words
    return [
        _as_text(each, composed, several=several) if each in odd else each for each in arguments
    ]


def _as_text(argument: str, composed: DictConfig, *, several: bool) -> str:
    """Write one argument so that Hydra reads the text that was typed."""
    name, _, text = argument.partition("=")
    path, _, last = name_of(argument).rpartition(".")
    parent = OmegaConf.select(composed, path) if path else composed
    node = parent._get_node(last) if isinstance(parent, DictConfig) and last in parent else None
    read = parse(argument)
    if isinstance(node, StringNode):
        if text.startswith("@"):
            text = text[1:] if text.startswith("@@") else _read_text(argument, Path(text[1:]))
        else:
            plain = text
            if read is not None and _is_quoted(read, text):
                text = str(read.value())
                plain = text.replace("\\${", "")  # as it is written here, or was for a run before
            if _reads_it(read, text, plain, composed, several=several):
                return argument
    elif isinstance(node, DictConfig) and read is not None and _takes_any_names(node, read):
        return f"++{argument}"
    elif read is not None or text[:1] in tuple("[{'\"") or not isinstance(node, AnyNode | None):
        return argument
    return f"{name}={written(escaped(text))}"


def _takes_any_names(node: DictConfig, read: Override) -> bool:
    """Tell whether a dictionary is given to a setting that has no names of its own."""
    is_open = node._metadata.ref_type is not Any and not is_dataclass(OmegaConf.get_type(node))
    return is_open and isinstance(read.value(), dict) and not read.is_add()


def _is_quoted(read: Override, text: str) -> bool:
    return isinstance(read._value, QuotedString) and text[:1] + text[-1:] in ("''", '""')


def _reads_it(
    read: Override | None, text: str, plain: str, composed: DictConfig, *, several: bool
) -> bool:
    """Tell whether Hydra reads what was meant by a text."""
    if read is None:
        return False
    if read.is_sweep_override():
        return several
    if "${" in plain:
        known, names = {*setting_names(composed)}, re.findall(r"\$\{([\w.]+)(:?)[^{}]*\}", plain)
        return len(names) == plain.count("${") and all(
            OmegaConf.has_resolver(name) if colon else name in known for name, colon in names
        )
    value = read.value()
    return value == text if isinstance(value, str) else value is None and text.lower() == "null"


def _read_text(argument: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        name = argument.partition("=")[0]
        raise SettingsError(
            f"{argument}: the file can't be read ({error}), from {Path.cwd()}. A text that begins "
            f"with @ is {name}=@@..."
        ) from error

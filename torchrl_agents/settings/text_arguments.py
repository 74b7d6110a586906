"""Texts among the arguments, written so that Hydra reads them as they were typed."""

import re
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Final

from hydra.core.override_parser.types import Override, QuotedString
from omegaconf import AnyNode, DictConfig, OmegaConf, StringNode

from .arguments import FOLDERS, escaped, name_of, parse, setting_names, written
from .errors import SettingsError
from .recipe import FILES, Recipe

_PLAIN: Final = re.compile(r"((?!(true|false|null|inf|nan)$)[a-z_/][\w./:-]*)?", re.ASCII | re.I)
"""Texts that Hydra reads as they are."""


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
        if (not each.startswith(("-", "hydra.", "hydra/")) or name_of(each) in FOLDERS)
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
    if name in FOLDERS and parse(argument) is None:  # a space, or a letter beyond ASCII
        return f"{name}={written(text)}"
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

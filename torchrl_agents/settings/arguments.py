"""Arguments as Hydra reads them: ``name=value``, and values by its grammar.

Hydra reads ``name=value`` by a grammar of its own, in which a comma, an apostrophe or a letter
beyond ASCII means something else, or is refused. What is here writes such arguments so that Hydra
reads what was meant.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

FOLDERS: Final = ("hydra.run.dir", "hydra.sweep.dir")
"""Settings that are folders, which Hydra would make."""
OF_A_START: Final = ("resume", "overwrite", "dry_run")
"""Settings of one start of a run, which the settings that it writes down leave out."""


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

"""Which run goes on, and whether its settings are those that it began with."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from collectors.checkpoint.retention import stored
from torchrl_agents.settings.errors import SettingsError

AUTO: Final = "auto"
RECORD: Final = "run.json"
CHECKPOINTS: Final = "checkpoints"
_MAY_DIFFER: Final = (
    "checkpoint",
    "dry_run",
    "evaluate.num_shown",
    "hydra",
    "logger",
    "overwrite",
    "resume",
    "train.num_steps",
    "train.parallel",
    "train.timeout_s",
    "train.wait_s",
)
"""Settings that change nothing of the steps that were made."""
FINISHED: Final = "finished"


def with_recorded(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command line, with those of the run that it resumes before them.

    Args:
        arguments: without the program's name; ``resume=<folder>`` stands for all that the run was
            started with.

    Raises:
        SettingsError: the folder holds no run.
    """
    given = _by_name(arguments)
    folder = given.get("resume", "").partition("=")[2]
    if folder in ("", AUTO, "null"):
        return list(arguments)
    recorded = _by_name(read_record(Path(folder))["command"][1:])
    kept = [text for name, text in recorded.items() if name not in {*given, "overwrite", "resume"}]
    return [*kept, *arguments]


def _by_name(arguments: Sequence[str]) -> dict[str, str]:
    return {a.partition("=")[0].lstrip("+~"): a for a in arguments}


def read_record(folder: Path) -> dict[str, Any]:
    """What a run wrote down of itself.

    Raises:
        SettingsError: there is none in the folder.
    """
    try:
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"resume={folder}: it holds no run: {error}.") from error


def plain_settings(cfg: DictConfig) -> dict[str, Any]:
    """What decides a run, by the setting's path.

    Args:
        cfg: the settings as they were composed.
    """
    whole = OmegaConf.to_container(cfg, throw_on_missing=False)
    assert isinstance(whole, dict)
    return {
        name: OmegaConf.select(cfg, name) if "${" in str(value) else value
        for name, value in _leaves(whole)
        if not any(name == other or name.startswith(f"{other}.") for other in _MAY_DIFFER)
    }


def _leaves(settings: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def find_run(folders: Sequence[Path], settings: Mapping[str, Any]) -> Path | None:
    """The newest run that was stopped, has a checkpoint and the same settings.

    Args:
        folders: of runs, the newest last.
        settings: what :func:`plain_settings` gave.
    """
    for folder in reversed(folders):
        if not ((folder / RECORD).exists() and has_checkpoint(folder)):
            continue
        record = read_record(folder)
        if record["status"] != FINISHED and record.get("settings") == settings:
            return folder
    return None


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has a checkpoint; one that was killed while it wrote its first has none.

    Args:
        folder: of the run.
    """
    return bool(stored(folder / CHECKPOINTS))


def check_same_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Check that a run goes on with the settings that it began with.

    Args:
        folder: of the run.
        settings: what :func:`plain_settings` gave.

    Raises:
        SettingsError: some differ; the message names them.
    """
    saved = read_record(folder).get("settings", {})
    differ = [
        f"{name} was {saved.get(name)!r} and is {settings.get(name)!r}"
        for name in sorted({*saved, *settings})
        if saved.get(name) != settings.get(name)
    ]
    if differ:
        raise SettingsError(
            f"resume={folder}: a run goes on with its own settings, and {'; '.join(differ[:5])}. "
            "Leave them out, or begin a new run."
        )

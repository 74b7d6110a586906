"""The run that goes on, found by its settings, which must be those that it began with."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig, OmegaConf

from collectors.checkpoint.retention import stored
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.recorded_arguments import RECORD, read_record
from torchrl_agents.settings.started_ranks import OF_RANKS

CHECKPOINTS: Final = "checkpoints"
_MAY_DIFFER: Final = (
    *("checkpoint", "dry_run", "evaluate.num_shown", "hydra", "logger", "overwrite", "resume"),
    *("collector.num_collectors", "collector.remote_config"),  # groups have seeds of their own
    *("collector.verify_every", "push_to_hub", "record.check_every", "record.stop_on"),
    *("train.num_steps", "train.timeout_s", "train.wait_s"),
    *(f"train.{name}" for name in OF_RANKS),
)
"""Settings that change nothing of the steps that were made."""
FINISHED: Final = "finished"


def plain_settings(cfg: DictConfig) -> dict[str, Any]:
    """Return what decides a run, by the setting's path.

    Args:
        cfg: the settings as they were composed.
    """
    whole = OmegaConf.to_container(cfg, throw_on_missing=False)
    assert isinstance(whole, dict)
    return {
        name: OmegaConf.select(cfg, name) if "${" in str(value) else value
        for name, value in _leaves(whole)
        if _decides(name)
    }


def _decides(name: str) -> bool:
    return not any(name == other or name.startswith(f"{other}.") for other in _MAY_DIFFER)


def _leaves(settings: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def find_run(folders: Sequence[Path], settings: Mapping[str, Any]) -> Path | None:
    """The newest run that was stopped, has a checkpoint and the same settings.

    Where there is none, what keeps the newest other one from going on is logged.

    Args:
        folders: of runs, the newest last.
        settings: what :func:`plain_settings` gave.
    """
    why = []
    for folder in reversed(folders):
        # One that was killed while it wrote its first checkpoint has none.
        is_there = (folder / RECORD).exists() and stored(folder / CHECKPOINTS)
        if is_there and read_record(folder)["status"] != FINISHED:
            try:
                check_same_settings(folder, settings)
                return folder
            except SettingsError as error:
                why.append(error)
    if why:
        _LOG.warning("resume=auto begins a new run, for the last one can't go on. %s", why[0])
    return None


def check_same_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Check that a run goes on with the settings that it began with.

    Args:
        folder: of the run.
        settings: what :func:`plain_settings` gave.

    Raises:
        SettingsError: some differ; the message names them.
    """
    record = read_record(folder)
    # One that has begun before some of them might differ has these, too.
    saved = {name: value for name, value in record.get("settings", {}).items() if _decides(name)}
    differ = [
        f"{name} was {saved.get(name)!r} and is {settings.get(name)!r}"
        for name in sorted({*saved, *settings})
        if saved.get(name) != settings.get(name)
    ]
    if differ:
        raise SettingsError(
            f"resume={folder}: a run goes on with its own settings, and {'; '.join(differ[:5])}. "
            "Leave them out (train.num_steps, logger, checkpoint and, on Ray, "
            "collector.num_collectors may be others), or begin a new "
            f"run with the settings of this one, {folder / 'config.yaml'}, before your own. "
            f"Defaults may be others since its commit {record.get('commit')}."
        )


_LOG = logging.getLogger("torchrl_agents")

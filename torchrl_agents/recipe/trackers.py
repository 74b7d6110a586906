"""Where metrics go: TorchRL's loggers, by name."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from torchrl_agents.settings.schema import LoggerConfig

LOGGERS: Final = {
    "csv": ("torchrl.record.loggers.csv", "CSVLogger", None),
    "tensorboard": ("torchrl.record.loggers.tensorboard", "TensorboardLogger", "tensorboard"),
    "wandb": ("torchrl.record.loggers.wandb", "WandbLogger", "wandb"),
    "trackio": ("torchrl.record.loggers.trackio", "TrackioLogger", "trackio"),
}
"""Module, class, and the package that it needs."""


def build_loggers(cfg: LoggerConfig, folder: Path, project: str) -> list[Any]:
    """TorchRL's loggers, by name.

    Args:
        cfg: their names.
        folder: of the run.
        project: what the runs of a recipe are filed under, unless the settings say it.
    """
    loggers = []
    for name in cfg.backends:
        module, kind, _ = LOGGERS[name]
        make = getattr(import_module(module), kind)
        if name in ("csv", "tensorboard"):
            loggers.append(make(name, str(folder)))
        else:
            loggers.append(make(exp_name=folder.name, project=cfg.project or project))
    return loggers


def missing_package(logger: str) -> str | None:
    """The package that a logger needs and that is not installed."""
    package = LOGGERS[logger][2]
    return None if package is None or find_spec(package) else package

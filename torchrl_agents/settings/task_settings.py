"""Settings of the chosen task: the keyword arguments of the function that makes it."""

import inspect
from dataclasses import field, make_dataclass
from typing import Any, Final

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from torchrl_envs.tasks import find_task, generator_settings, settings_of_task

from .errors import SettingsError

GIVEN_BY_THE_SCRIPT: Final = {"seed": "seed", "num_held_out": "evaluate.num_prompts"}
"""Settings of tasks that the script's own settings stand for."""
_TYPES: Final[dict[str, Any]] = {
    **{each.__name__: each for each in (int, float, bool, str)},
    **{f"{each.__name__} | None": each | None for each in (int, float, bool, str)},
}
"""By their annotations; any value is taken for others."""


def store_task(name: str) -> None:
    """Tell Hydra the settings of a task: the keyword arguments of the function that makes it.

    Raises:
        SettingsError: there is no such task.
    """
    try:
        settings = settings_of_task(name)
    except ValueError as error:
        raise SettingsError(str(error)) from error
    except ImportError as error:
        raise SettingsError(f"task={name}: {error}") from error
    columns: list[Any] = [("id", str, field(default=name))]
    for key, (kind, default, _) in settings.items():
        if key in GIVEN_BY_THE_SCRIPT:
            continue
        if key == "config":
            default = generator_settings(*find_task(name)[2])
        default = MISSING if default is inspect.Parameter.empty else default
        default = list(default) if isinstance(default, tuple) else default
        can_change = isinstance(default, list | dict)
        default = field(default_factory=default.copy) if can_change else field(default=default)
        columns.append((key, _TYPES.get(kind, Any), default))
    node = make_dataclass("TaskConfig", columns)
    folder, _, tail = f"task/{name}".rpartition("/")
    ConfigStore.instance().store(group=folder, name=tail, node=node, package="task")


def task_settings(cfg: DictConfig) -> dict[str, Any]:
    """Keyword arguments for the function that makes the chosen task.

    Raises:
        SettingsError: a setting that has no default is missing.
    """
    if missing := sorted(OmegaConf.missing_keys(cfg.task)):
        raise SettingsError(f"The task {cfg.task.id} needs {missing[0]}=...")
    settings = OmegaConf.to_container(cfg.task, resolve=True)
    assert isinstance(settings, dict)
    name = settings.pop("id")
    if "config" in settings:  # only what was changed: a generator has more than can be written
        defaults = generator_settings(*find_task(name)[2])
        changed = {k: v for k, v in settings["config"].items() if v != defaults[k]}
        settings["config"] = changed
    usual = settings_of_task(name)
    return {
        str(key): tuple(value)
        if isinstance(value, list) and isinstance(usual[str(key)][1], tuple)
        else value
        for key, value in settings.items()
    }

"""Defaults that ``None`` stands for in the settings, by the model that was chosen."""

from collections.abc import Mapping
from typing import Any, Final

from .schema import RecipeConfig

EMBEDDED: Final[dict[str, Any]] = {
    "policy.show_tool_schemas": False,
    "policy.gradient_checkpointing": False,
    "warm_start.num_steps": 600,
    "warm_start.learning_rate": 1e-2,
    "optim.learning_rate": 1e-3,
    "optim.max_grad_norm": 0.1,
    "train.num_epochs": 4,
}
"""Defaults of the embedded model, which is made and warmed up here; of a run that left it, too."""
PRETRAINED: Final[dict[str, Any]] = {
    "policy.show_tool_schemas": True,
    "policy.gradient_checkpointing": True,
    "policy.max_new_tokens": 512,
    "warm_start.num_steps": 0,
    "warm_start.learning_rate": 1e-5,
    "optim.learning_rate": 1e-6,
    "optim.max_grad_norm": 1.0,
    "train.num_epochs": 1,
}
"""Defaults of a model that was given."""
BY_MODEL: Final[dict[str, dict[str, Any]]] = {
    "smollm2": {
        "policy.gradient_checkpointing": False,
        "policy.max_new_tokens": 64,
        "warm_start.learning_rate": 5e-5,
        "optim.learning_rate": 3e-5,
    },
}
"""What is different for a model that is this one, wherever it comes from, see
:func:`~torchrl_modules.policies.model_files.known_model`: smollm2 trains on a CPU."""


def defaults_of(
    cfg: RecipeConfig,
    embedded: Mapping[str, Any],
    pretrained: Mapping[str, Any],
    *,
    origin: str | None,
) -> dict[str, Any]:
    """Defaults that ``None`` stands for in the settings, for the model that was chosen.

    They go by what the model is, not by what it is called: the same weights in a folder train the
    same.

    Args:
        cfg: the settings.
        embedded: a recipe's own defaults of the embedded model.
        pretrained: the same of a model that was given.
        origin: the model, or that with which the run that left it began; ``None`` is the embedded
            one.
    """
    from torchrl_modules.policies.model_files import known_model

    shared, own = (EMBEDDED, embedded) if origin is None else (PRETRAINED, pretrained)
    name = None if origin is None else known_model(origin)
    known = BY_MODEL.get(name or "", {})
    return {
        key: value
        for key, value in {**shared, **own, **known}.items()
        if hasattr(getattr(cfg, key.split(".")[0], None), key.split(".")[1])
    }


def fill_in(cfg: RecipeConfig, defaults: Mapping[str, Any]) -> None:
    """Replace each ``None`` that stands for a default of the model or the task, in place.

    Args:
        cfg: the settings.
        defaults: by the setting's path.
    """
    for key, value in defaults.items():
        group, name = key.split(".")
        if getattr(getattr(cfg, group), name) is None:
            setattr(getattr(cfg, group), name, value)

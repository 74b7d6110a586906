"""Origin of a model, and what it takes along from the run that left it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from omegaconf import OmegaConf

_PROMPTS: Final = (
    *("chat_template_name", "show_tool_schemas", "tool_call_format", "max_new_tokens", "stop"),
)
"""Of ``policy``: what the prompts and turns were that a model was trained with."""
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p")
"""Of ``policy``: how tokens were drawn. They have defaults of their own and are not taken over."""


class Origin(NamedTuple):
    """The origin of a model, which is known before it is loaded."""

    model: str | None
    """What the first of the runs began with that led to it; ``None`` is the embedded model."""
    task: str | None
    """What its last run trained it on; ``None`` where no run did."""
    settings: Mapping[str, Any]
    """Of that run, by their paths: how prompts show tools, and how long turns are."""
    sampling: Mapping[str, Any] = {}
    """Of that run, by their paths: how tokens were drawn."""


def origin_of(model: str | None) -> Origin:
    """Return where a model comes from.

    Args:
        model: ``policy.model``: a run's folder (or the ``model`` in it), a hub id, another path;
            ``None`` is the embedded one.
    """
    last = {} if model is None else _settings_of(model)
    policy = last.get("policy") or {}
    prompts, sampling = (
        {f"policy.{name}": policy[name] for name in names if policy.get(name) is not None}
        for names in (_PROMPTS, _SAMPLING)
    )
    run = last
    while run:
        model = (run.get("policy") or {}).get("model")
        run = {} if model is None else _settings_of(model)
    return Origin(model, (last.get("task") or {}).get("id"), prompts, sampling)


def _settings_of(model: str) -> dict[str, Any]:
    """The settings of the run that left a model; nothing where none did."""
    path = Path(model)
    folder = path.parent if path.name == "model" else path
    folder = folder.parent.parent if folder.parent.name == "agents" else folder  # of one agent
    if not (folder / "config.yaml").is_file():
        return {}
    settings: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    return settings if isinstance(settings, dict) else {}

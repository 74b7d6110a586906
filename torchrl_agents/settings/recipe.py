"""A recipe: what tells one from another, its settings, and what they are checked with."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hydra.core.config_store import ConfigStore

from . import program
from .field_rules import FieldRule, values_of
from .schema import (
    CollectorConfig,
    EngineConfig,
    LoggerConfig,
    OptimConfig,
    PolicyConfig,
    RecipeConfig,
)

GROUPS: Final[dict[str, dict[str, Any]]] = {
    "policy": {
        "embedded": PolicyConfig(),
        "qwen3_0.6b": PolicyConfig(model="Qwen/Qwen3-0.6B"),
        "smollm2": PolicyConfig(model="smollm2", chat_template_name="smollm"),
    },
    "engine": {
        "transformers": EngineConfig(),
        **{name: EngineConfig(name=name) for name in ("vllm", "sglang")},
    },
    "collector": {name: CollectorConfig(mode=name) for name in values_of(CollectorConfig, "mode")},
    "optim": {name: OptimConfig(name=name) for name in values_of(OptimConfig, "name")},
    "logger": {
        "files": LoggerConfig(),
        "none": LoggerConfig(backends=[]),
        **{name: LoggerConfig(backends=["csv", name]) for name in ("wandb", "trackio", "mlflow")},
    },
}
"""The choices of each group, by name."""
SHARED: Final = Path(__file__).parent / "config"
"""Files of settings that all recipes have."""
FILES: Final = ("profile", "experiment", "debug")
"""Groups whose choices are YAML files."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A script with settings of its own.

    Making one tells Hydra its schema, as ``schema``, and the choices of its groups.
    """

    name: str
    """Of the script, of the file with its defaults, and of the folder of its runs."""
    summary: str
    """One line for the help."""
    example: str
    """Arguments, for the help."""
    config: type[RecipeConfig]
    """Its settings. The folder ``config`` beside their module has its YAML files."""
    config_dir: Path = field(init=False)
    """That folder."""
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The choices of its own groups, by name; those of all recipes are :data:`GROUPS`."""
    rules: Mapping[str, FieldRule] = field(init=False)
    """Rules of settings that depend on its groups, by the setting's path; those of others stand at
    their fields."""
    embedded: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the embedded model that differ from those of all recipes."""
    pretrained: Mapping[str, Any] = field(default_factory=dict)
    """The same of a model that was given."""
    needs_groups: bool = True
    """Whether a group of one has no signal."""
    gives_rewards: bool = False
    """Whether a reward model is trained, and no policy: nothing samples."""
    unused: Mapping[str, str] = field(default_factory=dict)
    """Settings of all recipes that have no effect on this one, and are refused: why, by the path of
    each, or of a whole group."""
    parts: Callable[[Any], Mapping[str, Callable[[], Any]]] = lambda _: {}
    """What is tried without a model, from the settings, by the group that is wrong if it fails."""

    rehearse: Callable[..., Any] | None = None
    """What else a dry run tries: gets settings, task and a policy whose model has no weights.
    With settings of ``data`` it gives the rows of them that are learnt from or held out."""

    loss: Callable[[Any, Any], Any] | None = None
    """The loss, from settings and actor; settings are tried with it, too."""
    train: Callable[[Any], Any] | None = None
    """The loop, which every rank runs; ``None``: :func:`torchrl_agents.training.learn`, which has
    its argument and its result."""

    def __post_init__(self) -> None:
        folder = Path(inspect.getfile(self.config)).resolve().with_name("config")
        object.__setattr__(self, "config_dir", folder)
        object.__setattr__(self, "rules", {"engine.name": _engine_rule(self.all_groups["engine"])})
        store = ConfigStore.instance()
        store.store(name="schema", node=self.config)
        for group, choices in self.all_groups.items():
            for name, node in choices.items():
                store.store(group=group, name=name, node=node)

    def why_unused(self, path: str) -> str | None:
        """Return why a setting, or all of a group, has no effect; ``None`` where it has one."""
        parts = path.split(".")
        begun = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return next((self.unused[each] for each in begun if each in self.unused), None)

    @property
    def folders(self) -> tuple[Path, Path]:
        """Folders of its files of settings: its own, and those of all recipes."""
        return self.config_dir, SHARED

    @property
    def program(self) -> str:
        """Command that was typed for it, with which its messages begin: ``torchrl-agents grpo``."""
        return program(self.name)

    @property
    def all_groups(self) -> dict[str, Mapping[str, Any]]:
        """The choices of each group that its settings have."""
        shared = {k: v for k, v in GROUPS.items() if k in self.config.__dataclass_fields__}
        return {**shared, **self.groups}


def _engine_rule(engines: Collection[str]) -> FieldRule:
    """Return the rule of ``engine.name``; where vLLM may draw, an engine of the user's own may."""
    takes_own = "vllm" in engines
    own = ", or mine:Engine, one of yours" if takes_own else ""
    return FieldRule(
        f"one of {', '.join(engines)}{own}",
        lambda name: name in engines or (takes_own and EngineConfig(name=name).is_own),
        tuple(engines),
    )


BASELINES: Final = ("batch_mean", "running_mean", "gae")
"""Values of ``loss.advantage`` with which a rollout is not compared with others of its prompt."""


def compares_groups(recipe: "Recipe", cfg: RecipeConfig) -> bool:
    """Whether a group whose rewards are all equal has no signal."""
    advantage = getattr(getattr(cfg, "loss", None), "advantage", None)
    return recipe.needs_groups and advantage not in BASELINES

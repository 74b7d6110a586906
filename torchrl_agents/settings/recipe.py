"""What tells one recipe from another: its settings, and what they are checked with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .schema import GROUPS, RecipeConfig, store_groups


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
    script: Path
    """Its file; ``config/`` is beside it."""
    config: type[RecipeConfig]
    """Its settings."""
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The choices of its own groups, by name; those of all recipes are :data:`GROUPS`."""
    embedded: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of the embedded model that differ from those of all recipes."""
    pretrained: Mapping[str, Any] = field(default_factory=dict)
    """The same of a model that was given."""
    needs_groups: bool = True
    """Whether a group of one has no signal."""
    required: Sequence[str] = ()
    """Settings that have to be given."""
    engines: Sequence[str] = ("transformers", "vllm")
    """What may draw its tokens."""
    parts: Callable[[Any], Mapping[str, Callable[[], Any]]] = lambda _: {}
    """What is tried without a model, from the settings, by the group that is wrong if it fails."""

    rehearse: Callable[..., None] | None = None
    """What else a dry run tries: gets settings, task and a policy whose model has no weights."""

    updates: Callable[..., Any] | None = None
    """What makes the optimizer steps, on every rank: gets settings, actor, folder and crew."""

    def __post_init__(self) -> None:
        store_groups(self.config, self.all_groups)

    @property
    def title(self) -> str:
        """What its summary begins with."""
        return self.summary.partition(":")[0]

    @property
    def all_groups(self) -> dict[str, Mapping[str, Any]]:
        """The choices of each group that its settings have."""
        shared = {k: v for k, v in GROUPS.items() if k in self.config.__dataclass_fields__}
        return {**shared, **self.groups}

    @property
    def config_dir(self) -> Path:
        """The folder with its YAML files."""
        return self.script.parent / "config"

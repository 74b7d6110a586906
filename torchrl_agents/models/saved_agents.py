"""Models of several agents, as a run has left them, and as another one finds them."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from torchrl_agents.settings.agent_rules import whole_models_fault
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import (
    AgentsConfig,
    RecipeConfig,
    RolloutsConfig,
    TrainingConfig,
    agents_settings,
)

FOLDER: Final = "agents"
"""In the folder of a run: of each agent's model, and of what is known of all."""
_ABOUT: Final = "agents.json"


@dataclass(frozen=True)
class SavedAgents:
    """The agents that a run has left."""

    folder: Path
    """Has a folder for each, but for those that stayed as the base is."""
    settings: AgentsConfig
    base: str | None
    """Hub id or folder of the model that all have adapters over; ``None``: each has its own."""

    def model(self, name: str) -> Path:
        """The folder of an agent's whole model, adapters merged."""
        return self.folder / name / "model"

    def adapter(self, name: str) -> Path:
        """The folder of an agent's adapters; it is not there where the agent has none."""
        return self.folder / name / "adapter"

    def rank(self, name: str) -> int | None:
        """The rank of an agent's adapters; ``None`` where it has none."""
        file = self.adapter(name) / "adapter_config.json"
        return int(json.loads(file.read_text(encoding="utf-8"))["r"]) if file.is_file() else None

    def whole(self, name: str) -> str:
        """The place of an agent's whole model: its folder, or the base that it is the same as."""
        folder = self.model(name)
        return str(folder) if folder.is_dir() or self.base is None else self.base

    def source(self, *, adapters: bool) -> str:
        """The place of what is loaded first: the model below the adapters, or the first agent's."""
        if adapters and self.base is not None:
            return self.base
        return str(self.model(self.settings.trained[0]))

    def owner(self, agent: str) -> str | None:
        """The agent whose policy took the turns of an author."""
        return agent if agent in self.settings.names else self.settings.otherwise

    def write(self) -> None:
        """Write what is known of all into the folder."""
        about = asdict(self.settings) | {"base": self.base}
        (self.folder / _ABOUT).write_text(json.dumps(about, indent=2), encoding="utf-8")


def saved_agents(model: str | None) -> SavedAgents | None:
    """Return the agents that a run has left; ``None`` where it is no run with agents.

    Args:
        model: ``policy.model``, which may be the folder of a run.
    """
    folder = Path(model or "", FOLDER)
    if model is None or not (folder / _ABOUT).is_file():
        return None
    about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    base = about.pop("base")
    if base is not None and (folder / base).is_dir():  # of the run itself, wherever that is by now
        base = str((folder / base).resolve())
    return SavedAgents(folder, AgentsConfig(**about), base)


def found_agents(cfg: RecipeConfig) -> SavedAgents | None:
    """Return the agents of the run that ``policy.model`` is, as a recipe goes on with them.

    Raises:
        SettingsError: the recipe trains one policy, or other agents than the run has.
    """
    saved, agents = saved_agents(cfg.policy.model), agents_settings(cfg)
    if saved is None:
        return None
    who, there = f"policy.model={cfg.policy.model}", saved.settings.names
    if not isinstance(cfg, TrainingConfig):  # nothing is trained: all agents are as they were left
        if cfg.engine.name not in ("transformers", "vllm"):
            raise SettingsError(
                f"{who} has the models of several agents, {there}, which engine=transformers and "
                f"engine=vllm evaluate; got engine={cfg.engine.name}."
            )
        if saved.base is None and (fault := whole_models_fault(cfg.engine, len(there))):
            raise SettingsError(f"{who} has a whole model for each of {there}: {fault}")
        return saved
    if agents is None:
        one = Path(cfg.policy.model or "", FOLDER, saved.settings.trained[0])
        raise SettingsError(
            f"{who} has the models of several agents, {there}: give agents.trained= of grpo, or "
            f"the model of one of them, policy.model={one}."
        )
    if unknown := [name for name in agents.names if name not in there]:
        raise SettingsError(f"{who} has the agents {there}, and none that are called {unknown}.")
    if isinstance(cfg, RolloutsConfig) and cfg.warm_start.num_steps:
        raise SettingsError(
            f"warm_start.num_steps={cfg.warm_start.num_steps} trains one model before agents get "
            f"weights of their own, and {who} has agents that have theirs. Leave it out."
        )
    rank = cfg.policy.lora_rank
    if rank is not None and saved.base is None:
        raise SettingsError(
            f"policy.lora_rank={rank}: the agents of {who} have a whole model each. Leave it out."
        )
    return saved


def agents_of(cfg: RecipeConfig, saved: SavedAgents | None) -> AgentsConfig | None:
    """The agents that have weights of their own; ``None`` where one policy takes all turns.

    Args:
        cfg: the settings.
        saved: agents of the run that ``policy.model`` is, if it is one.
    """
    return agents_settings(cfg) or (None if saved is None else saved.settings)


def takes_adapters(cfg: RecipeConfig, saved: SavedAgents | None) -> bool:
    """Return whether agents have adapters over one model, and not a whole model each.

    Args:
        cfg: the settings; where nothing is trained agents are as the run left them.
        saved: agents of the run that ``policy.model`` is, if it is one.
    """
    if isinstance(cfg, TrainingConfig):
        return cfg.policy.lora_rank is not None
    return saved is not None and saved.base is not None


def adapter_ranks(cfg: RecipeConfig) -> dict[str, int]:
    """The ranks of the adapters that agents have over one model, by name; of none, without.

    Args:
        cfg: the settings.

    Raises:
        SettingsError: as :func:`found_agents`.
    """
    saved = found_agents(cfg)
    agents = agents_of(cfg, saved)
    if agents is None or not takes_adapters(cfg, saved):
        return {}
    ranks = {} if saved is None else {name: saved.rank(name) for name in agents.names}
    found = {name: rank for name, rank in ranks.items() if rank is not None}
    if (rank := cfg.policy.lora_rank) is not None:
        found |= dict.fromkeys(agents.trained, rank)
    return found


def whole_models(cfg: RecipeConfig) -> list[str]:
    """The agents that have a whole model each; none where one policy takes all turns.

    Args:
        cfg: the settings.

    Raises:
        SettingsError: as :func:`found_agents`.
    """
    saved = found_agents(cfg)
    agents = agents_of(cfg, saved)
    return [] if agents is None or takes_adapters(cfg, saved) else agents.names

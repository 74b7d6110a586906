"""The trained model of a run, on the disk."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from collectors.weight_update.merged_adapters import declared_untied, merged_weights
from torchrl_modules import AgentPolicies, TransformersWrapper
from torchrl_modules.engines.transformers import TransformersEngine
from torchrl_modules.weights.quantized_weights import declared_whole

from .models.adapters import is_adapted, is_over_given
from .models.policies import set_generation
from .models.reward_models import ChatRewardModel
from .models.saved_agents import FOLDER as AGENTS
from .models.saved_agents import SavedAgents, saved_agents
from .models.sources import model_folder
from .run import remove
from .settings.schema import TrainingConfig, agents_settings


def save_model(
    folder: Path,
    cfg: TrainingConfig,
    policy: TransformersWrapper | ChatRewardModel,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Leave ``model/``, whole or not at all: it loads in Transformers and serves in vLLM.

    Of a model with adapters that is the merged one. Beside it, ``adapter/`` has the adapters as
    PEFT and vLLM load them, and ``base/`` what they are of, where no ``policy.model`` has it (a
    warm start changes it).

    Args:
        folder: of the run.
        cfg: the settings, which say where the model is from.
        policy: its model is saved, and its tokenizer with the chat template that it was used with.
        weights: of a sharded model, whole.
    """
    model: Any = policy.model
    if not is_adapted(model):
        leave(folder / "model", lambda path: _save(path, policy.scorer.model, policy, weights))
        return
    base = _base_of(folder, cfg, policy, model)
    leave(folder / "adapter", lambda path: _save_adapter(path, model, base))
    merged = merged_weights(model)
    leave(folder / "model", lambda path: _save(path, policy.scorer.model, policy, merged))


def save_agents(folder: Path, cfg: TrainingConfig, policies: AgentPolicies) -> None:
    """Leave ``agents/``, whole or not at all: in a folder of each agent what a run leaves of one.

    An agent that is as the model below the adapters has no folder. ``agents.json`` says which there
    are, so that another run goes on with all of them.

    Args:
        folder: of the run.
        cfg: the settings.
        policies: of the agents.
    """
    settings = agents_settings(cfg)
    assert settings is not None
    own: dict[str, Any] = policies.by_agent
    adapted = {name: policy for name, policy in own.items() if is_adapted(policy.model)}
    base = None
    if adapted:
        first = next(iter(adapted.values()))
        base = _base_of(folder, cfg, first, first.model)

    def save(path: Path) -> None:
        for name, policy in (adapted or own).items():
            (path / name).mkdir(parents=True)
            set_generation(cfg.policy, policy)
            merged = None
            if base is not None:
                _save_adapter(path / name / "adapter", policy.model, base)
                merged = merged_weights(policy.model)
            _save(path / name / "model", policy.scorer.model, policy, merged)
        inside = "../base" if base == str((folder / "base").resolve()) else base
        SavedAgents(path, settings, inside).write()

    leave(folder / AGENTS, save)


def left_in(folder: Path, cfg: TrainingConfig) -> str:
    """Say where a run has left what it trained."""
    if agents_settings(cfg) is None:
        return f"the model is in {folder / 'model'}"
    return f"the models are in {folder / AGENTS}"


def model_folders(folder: Path) -> list[Path]:
    """The folders of the models that a run has left."""
    return [
        path
        for path in (folder / "model", *sorted(folder.glob(f"{AGENTS}/*/model")))
        if path.is_dir()
    ]


def _base_of(folder: Path, cfg: TrainingConfig, policy: Any, model: Any) -> str:
    """Hub id or folder of the model below adapters; ``base/``, left here, where there is none."""
    saved = saved_agents(cfg.policy.model)
    given = cfg.policy.model if saved is None else saved.base
    source = None if given is None else model_folder(given)
    if source is not None and is_over_given(cfg, model):
        return str(Path(source).resolve()) if Path(source).is_dir() else source
    base = str((folder / "base").resolve())
    with model.disable_adapter():
        frozen = merged_weights(model)
    leave(Path(base), lambda path: _save(path, policy.scorer.model, policy, frozen))
    return base


def _save_adapter(path: Path, model: Any, base: str) -> None:
    for config in model.peft_config.values():
        config.base_model_name_or_path = base
    model.save_pretrained(path)


def _save(
    path: Path,
    model: Any,
    policy: TransformersWrapper | ChatRewardModel,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    with declared_whole(model), declared_untied(model, weights or {}):
        model.save_pretrained(path, state_dict=None if weights is None else dict(weights))
    if isinstance(policy, TransformersWrapper):
        images = cast("TransformersEngine", policy.engine).images
        if images is not None:
            images.processor.save_pretrained(path)
    policy.encoder.save_pretrained(path)


def leave(final: Path, save: Callable[[Path], Any]) -> None:
    """Put a folder in its place once it is whole, or leave nothing.

    Args:
        final: the folder; what is there is replaced.
        save: fills a folder.
    """
    partial = final.with_name(f"{final.name}.partial")
    remove(partial)
    try:
        save(partial)
    except BaseException:
        remove(partial)
        raise
    remove(final)
    partial.rename(final)

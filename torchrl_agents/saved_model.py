"""The trained model of a run, on the disk."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from collectors.weight_update.merged_adapters import declared_untied, merged_weights
from torchrl_modules import TransformersWrapper
from torchrl_modules.engines.transformers import TransformersEngine
from torchrl_modules.weights.quantized_weights import declared_whole

from .models.adapters import is_adapted, is_over_given
from .models.reward_models import ChatRewardModel
from .models.sources import model_folder
from .run import remove
from .settings.schema import TrainingConfig


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
    plain = policy.scorer.model
    if not is_adapted(model):
        leave(folder / "model", lambda path: _save(path, plain, policy, weights))
        return
    source = None if cfg.policy.model is None else model_folder(cfg.policy.model)
    if source is None or not is_over_given(cfg, model):
        base = str((folder / "base").resolve())
        with model.disable_adapter():
            frozen = merged_weights(model)
        leave(Path(base), lambda path: _save(path, plain, policy, frozen))
    else:
        base = str(Path(source).resolve()) if Path(source).is_dir() else source
    for config in model.peft_config.values():
        config.base_model_name_or_path = base
    leave(folder / "adapter", model.save_pretrained)
    merged = merged_weights(model)
    leave(folder / "model", lambda path: _save(path, plain, policy, merged))


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

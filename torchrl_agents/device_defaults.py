"""Defaults of a run that depend on its device."""

import logging
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from torchrl_modules import TransformersCritic, TransformersWrapper
from torchrl_modules.scoring.scorer import PackedScorer
from torchrl_modules.scoring.value_scorer import ValueScorer
from torchrl_modules.scoring.wrapped_models import evaluation_mode
from torchrl_modules.transformers_releases import recomputes_activations

from .settings.schema import TrainingConfig, agents_settings, critic_settings

_LOG = logging.getLogger("torchrl_agents")

DEFAULT_TOKENS: Final = 32_768
"""Of a micro-batch, where memory does not decide."""
_FEWEST: Final = 2_048
_MOST: Final = 131_072
_STEP: Final = 1_024
_SHARE: Final = 0.6
"""Of the free memory that kept activations may take: a layer that is computed again, the head's
tiles, gradients that are added up and what an allocator can't use take the rest."""


class Device(NamedTuple):
    """The device that decides defaults."""

    kind: str
    """``"cpu"``, ``"cuda"``, ..."""
    name: str
    has_bfloat16: bool
    """Its products are of bfloat16 as they are, not made of float32 ones."""
    free_bytes: int
    """Now."""
    total_bytes: int = 0


def describe(device: str | torch.device | None) -> Device:
    """Describe a device.

    Args:
        device: of torch; ``None`` is the accelerator where there is one, otherwise the CPU.
    """
    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if found.type != "cuda" or not torch.cuda.is_available():
        return Device(found.type, found.type, False, 0)
    # Without emulation: cards before Ampere compute bfloat16 in float32.
    has_bfloat16 = torch.cuda.get_device_capability(found) >= (8, 0)
    free, total = torch.cuda.mem_get_info(found)
    return Device("cuda", torch.cuda.get_device_name(found), has_bfloat16, free, total)


def default_autocast(device: Device, dtype: str) -> bool:
    """Return whether activations are computed in bfloat16.

    Args:
        device: where.
        dtype: of the weights, as ``policy.dtype`` has it.
    """
    return device.kind == "cuda" and device.has_bfloat16 and dtype == "float32"


def default_micro_batch_tokens(device: Device, num_bytes: float) -> int:
    """Most tokens of a forward and backward pass.

    Args:
        device: where, with what is free once weights, gradients and the optimizer's state are
            there.
        num_bytes: that a token keeps for the backward pass; positive.

    Returns:
        Whole thousands (1,024) between 2,048 and 131,072; 32,768 where memory does not decide.
    """
    if device.kind != "cuda":
        return DEFAULT_TOKENS
    fit = int(_SHARE * device.free_bytes / num_bytes)
    return max(_FEWEST, min(_MOST, fit // _STEP * _STEP))


def bytes_of_a_token(model: Any, scorer: PackedScorer | ValueScorer) -> float:
    """Return what a forward pass keeps for the backward pass, for each token of a row, in bytes.

    It is measured: every tensor that autograd saves is counted, of two rows of different lengths.
    Works on any device.

    Args:
        model: with gradient checkpointing it is what one layer keeps, and the inputs of all layers.
        scorer: of it.
    """
    weights = {value.untyped_storage().data_ptr() for value in model.parameters()}
    longest = min(384, getattr(model.config, "max_position_embeddings", None) or 384)
    found = []
    for size in (longest // 3, longest):
        kept: dict[int, int] = {}

        def count(saved: Tensor, kept: dict[int, int] = kept) -> Tensor:
            storage = saved.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return saved

        ids = torch.arange(size) % 50 + 1
        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved)
        with torch.enable_grad(), evaluation_mode(model), hooks:  # layers are not computed twice
            row = ids, torch.tensor([size]), torch.arange(size) > 0
            is_value = isinstance(scorer, ValueScorer)
            scores = scorer.value_packed(*row) if is_value else scorer.score_packed(*row)
        found.append(sum(kept.values()))
        del scores
    num_bytes = (found[1] - found[0]) / (longest - longest // 3)
    if not recomputes_activations(model):
        return num_bytes
    config = model.config.get_text_config()
    inputs = config.num_hidden_layers * config.hidden_size * model.dtype.itemsize
    return num_bytes / config.num_hidden_layers + inputs


def settle_micro_batches(
    cfg: TrainingConfig, actor: TransformersWrapper | TransformersCritic
) -> None:
    """Choose how many tokens a micro-batch has, where the settings say nothing, and log it.

    Args:
        cfg: the settings, changed in place.
        actor: on the device where it is trained.
    """
    if cfg.train.micro_batch_tokens is not None:
        return
    model: Any = actor.model
    device = describe(model.device)
    if device.kind != "cuda":
        cfg.train.micro_batch_tokens = DEFAULT_TOKENS
        return
    trained = sum(value.numel() for value in actor.parameters() if value.requires_grad)
    state = 3 * trained * model.dtype.itemsize  # gradients, and two moments of AdamW
    if (agents := agents_settings(cfg)) is not None and cfg.policy.lora_rank is None:
        models = len(agents.names) - 1  # which come yet, each with all of this
        state = state * len(agents.trained) + models * trained * model.dtype.itemsize
        of_engines = cfg.engine.gpu_share * device.total_bytes  # of vLLM here, one for each agent
        state += int(models * of_engines / len(agents.names))
    if critic_settings(cfg) is not None:  # the same of all of its weights, which come yet
        state += 4 * sum(value.numel() for value in model.parameters()) * model.dtype.itemsize
    num_bytes = bytes_of_a_token(model, actor.scorer)
    room = device._replace(free_bytes=max(0, device.free_bytes - state))
    cfg.train.micro_batch_tokens = default_micro_batch_tokens(room, num_bytes)
    _LOG.info(
        "train.micro_batch_tokens=%d: %.1f GiB are free on %s, and a token keeps %.0f KiB",
        *(cfg.train.micro_batch_tokens, room.free_bytes / 2**30, device.name, num_bytes / 1024),
    )

"""Numbers in which a policy computes, so that an engine and the trainer compute alike."""

import logging
from typing import Any, Final

import torch

from torchrl_modules.quantized_forward import forward_quantization

_LOG: Final = logging.getLogger(__name__)


def compute_dtype(policy: Any) -> torch.dtype | None:
    """The type of a policy's activations; ``None`` where it can't be told, as of a server."""
    # `compute_dtype` of the engine: that of autocast, or else of the weights.
    found = getattr(getattr(policy, "engine", None), "compute_dtype", None)
    return found if isinstance(found, torch.dtype) else None


def warn_of_other_dtype(trainer: Any, sampler: Any) -> bool:
    """Warn where the policy that samples computes in another type than the one that trains."""
    # Gives whether it did. The gap between their log-probs is then mostly rounding, and it is as
    # large as that of several updates (about 1e-2 nats a token between bfloat16 and float32).
    trained, sampled = compute_dtype(trainer), compute_dtype(sampler)
    if None in (trained, sampled) or trained == sampled:
        return False
    _LOG.warning(
        "%s samples in %s, and %s trains in %s: their log-probs of the same tokens differ by the "
        "rounding. Give both the same type (dtype= of the engine, autocast_dtype= of the trainer), "
        "or weigh the gap: GRPOLoss(old_policy='current', sampler_correction=...).",
        *(type(sampler).__name__, sampled, type(trainer).__name__, trained),
    )
    return True


def check_quantization(trainer: Any, sampler: Any) -> bool:
    """Check that an engine computes in 8 bits what a trained model does.

    Args:
        trainer: over the model that is trained.
        sampler: over an engine with weights of its own.

    Returns:
        Whether the engine alone does, which is warned of: its tokens are then another model's.

    Raises:
        ValueError: the model does, and the engine does not, or in another way.
    """
    trained = forward_quantization(trainer.model)
    engine = sampler.engine
    sampled = getattr(engine, "quantization", None)
    if trained == sampled:
        return False
    if trained is not None:
        raise ValueError(
            f"the model is trained with quantization={trained}, and {type(engine).__name__} "
            f"draws with quantization={sampled}. Build it, or start its server, with {trained}."
        )
    _LOG.warning(
        "%s draws with weights quantised by %s, and the model that is trained has whole ones: "
        "what it draws is weighed by the ratio of both. policy.quantization=fp8_per_channel "
        "trains in 8 bits, too.",
        *(type(sampler).__name__, sampled),
    )
    return True

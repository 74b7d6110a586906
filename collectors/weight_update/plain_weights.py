"""The weights of a trained model as an engine takes them: whole, merged, plainly named."""

from collections.abc import Mapping
from typing import Final

from torch import Tensor, nn

from .merged_adapters import has_adapters, merged_weights, whole

_COMPILED: Final = "_orig_mod."
_ADAPTERS: Final = {
    *("lora_A", "lora_B", "lora_E", "lora_embedding_A", "lora_embedding_B"),
    *("lora_magnitude_vector", "vera_lambda_b", "vera_lambda_d", "ia3_l", "modules_to_save"),
    *("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    *("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    *("oft_R", "oft_embedding_R", "boft_R", "boft_s", "prompt_embeddings"),
}
"""Parts of names in the usual adapters' state dicts; others are names that an engine refuses."""


def gathered_state_dict(source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a module or a state dict, by Transformers' names.

    ``DTensor`` shards (FSDP2, tensor parallelism) are gathered: a collective, so every rank calls
    this, and then has the whole model; a push does it bucket by bucket. Adapters of a PEFT model
    are merged into a copy of the weights that they change; the model is left as it was, to the bit.
    The wrappers of ``torch.compile`` and ``DistributedDataParallel`` are taken off.

    Args:
        source: a model, or its state dict.

    Returns:
        Detached tensors; those that nothing had to be done to are the model's own.

    Raises:
        TypeError: the model has adapters that can't be merged into weights, such as prompts.
        ValueError: the state dict holds adapters, which mean nothing without their model; or PEFT
            refuses to merge those of a model.
    """
    if isinstance(source, nn.Module):
        source = unwrapped_module(source)
        if has_adapters(source):
            return merged_weights(source)
        source = source.state_dict()
    return {name: whole(value) for name, value in plain_weights(source).items()}


def plain_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by Transformers' names, shards as they are.

    Raises:
        ValueError: there are adapters among them, which mean nothing without their model.
    """
    adapters = [name for name in weights if not _ADAPTERS.isdisjoint(name.split("."))]
    if adapters:
        raise ValueError(
            f"This state dict holds adapters, such as {adapters[0]}, which an engine can't apply "
            "without the model that they belong to. Push the PEFT model itself: it is merged."
        )
    return {name.replace(_COMPILED, ""): value for name, value in weights.items()}


def unwrapped_module(module: nn.Module) -> nn.Module:
    """The model inside the wrappers of ``torch.compile`` and ``DistributedDataParallel``."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module

"""The weights of a trained model as an engine takes them: whole, merged, plainly named."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_COMPILED = "_orig_mod."
_ADAPTER_MARKS = ("lora_", "hada_", "lokr_", "ia3_", "oft_", "boft_", "vera_")


def gathered_state_dict(source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a module or a state dict, by Transformers' names.

    ``DTensor`` shards (FSDP2, tensor parallelism) are gathered: a collective, so every rank calls
    this. Adapters of a PEFT model are merged into a copy of the weights that they change; the model
    is left as it was, to the bit. The wrappers of ``torch.compile`` and ``DistributedDataParallel``
    are taken off.

    Args:
        source: a model, or its state dict.

    Returns:
        Detached tensors; those that nothing had to be done to are the model's own.

    Raises:
        TypeError: the model has adapters that can't be merged into weights, such as prompts.
        ValueError: the state dict holds adapters, which mean nothing without their model.
    """
    if not isinstance(source, nn.Module):
        return _plain(source)
    module = _unwrapped(source)
    if _is_peft(module):
        return _merged(module)
    return _plain(module.state_dict())


def _plain(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    adapters = [name for name in weights if any(mark in name for mark in _ADAPTER_MARKS)]
    if adapters:
        raise ValueError(
            f"This state dict holds adapters, such as {adapters[0]}, which an engine can't apply "
            "without the model that they belong to. Push the PEFT model itself: it is merged."
        )
    return {name.replace(_COMPILED, ""): _whole(value) for name, value in weights.items()}


def _whole(value: Tensor) -> Tensor:
    value = value.detach()
    gather = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


def _unwrapped(module: nn.Module) -> nn.Module:
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def _is_peft(module: nn.Module) -> bool:
    peft: Any = sys.modules.get("peft")  # A model with adapters has imported it.
    if peft is None:
        return False
    layer = peft.tuners.tuners_utils.BaseTunerLayer
    return isinstance(module, peft.PeftModel) or any(
        isinstance(child, layer) for child in module.modules()
    )


def _merged(model: Any) -> dict[str, Tensor]:
    tuners: Any = sys.modules["peft.tuners.tuners_utils"]
    layers = [m for m in model.modules() if isinstance(m, tuners.BaseTunerLayer)]
    if not layers or getattr(model, "active_peft_config", None) is None:
        raise TypeError(
            f"{type(model).__name__} has adapters that are no change of weights, which an engine "
            "can't be given. Train one that merges, such as LoRA, wrapped by get_peft_model."
        )
    changed = {id(value) for layer in layers for value in layer.get_base_layer().parameters()}
    with _adapters_merged(model, layers):
        return {
            _plain_name(name): _whole(value).clone() if id(value) in changed else _whole(value)
            for name, value in _base_entries(model)
        }


@contextmanager
def _adapters_merged(model: Any, layers: list[Any]) -> Iterator[None]:
    bases = [value for layer in layers for value in layer.get_base_layer().parameters()]
    originals = [value.detach().clone() for value in bases]
    model.merge_adapter(safe_merge=True)
    try:
        yield
    finally:
        model.unmerge_adapter()
        with torch.no_grad():  # Subtracting what was added does not give the same bits.
            for value, original in zip(bases, originals, strict=True):
                value.copy_(original)


def _base_entries(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of the state dict that are no adapter's own."""
    kept = model.state_dict(keep_vars=True)
    for name, value in kept.items():
        if any(mark in name for mark in (*_ADAPTER_MARKS, ".original_module.")):
            continue
        yield name, value


def _plain_name(name: str) -> str:
    name = name.replace(_COMPILED, "").removeprefix("base_model.model.").replace(".base_layer", "")
    before, mark, after = name.partition(".modules_to_save.")
    return f"{before}.{after.partition('.')[2]}" if mark else name

"""The LoRA adapters of a PEFT model, for an engine that applies them itself."""

import sys
from typing import Any, NoReturn

from torch import Tensor, nn

from torchrl_modules.weights.adapter_weights import AdapterWeights
from torchrl_modules.weights.expected_weights import UpdateRefused
from torchrl_modules.weights.quantized_weights import quantized_layers

from .merged_adapters import AdapterNames, has_adapters, tuner_layers, whole
from .plain_weights import unwrapped_module


def adapter_weights(source: nn.Module) -> AdapterWeights:
    """The adapters that act in a model, their scales multiplied in.

    Raises:
        UpdateRefused: it has none, or changes something that is no pair of low-rank factors.
    """
    model = unwrapped_module(source)
    if not has_adapters(model):
        _refuse(f"{type(model).__name__} has no adapters")
    if quantized_layers(model):
        _refuse("the model's own weights have 4 bits, and those of the engine are others")
    layers = tuner_layers(model)
    names = AdapterNames(model, layers)
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in layers.items():
        if pair := _factors(name, layer):
            factors[names.plain(name)] = pair
    others: Any = sys.modules["peft.utils.other"]
    for name, module in model.named_modules():
        if isinstance(module, others.ModulesToSaveWrapper | others.TrainableTokensWrapper):
            _refuse(f"{name} is trained whole")
    for name, value in model.named_parameters():
        if value.requires_grad and ".lora_A." not in name and ".lora_B." not in name:
            _refuse(f"{name} is trained, too")
    return AdapterWeights(factors)


def _factors(name: str, layer: Any) -> tuple[Tensor, Tensor] | None:
    peft: Any = sys.modules["peft"]
    if not isinstance(layer, peft.tuners.lora.LoraLayer) or layer.merged:
        _refuse(f"{name} is {'merged' if layer.merged else 'of ' + type(layer).__name__}")
    active = [one for one in layer.active_adapters if one in layer.lora_A]
    if layer.disable_adapters or not active:
        return None
    if len(active) > 1:
        _refuse(f"{name} has several adapters that act at once, {active}")
    (adapter,) = active
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    if variant is not None or layer.lora_bias.get(adapter):
        _refuse(f"{name} has a {'bias' if variant is None else type(variant).__name__}")
    down, up = (whole(part[adapter].weight) for part in (layer.lora_A, layer.lora_B))
    scale = float(layer.scaling[adapter])
    return down, up if scale == 1 else (up.float() * scale).to(up.dtype)  # rounded once


def _refuse(what: str) -> NoReturn:
    raise UpdateRefused(
        f"{what}, and the engine (vLLM with enable_lora) takes LoRA adapters alone. Train such "
        "adapters, or build the engine without enable_lora: then they are pushed merged."
    )

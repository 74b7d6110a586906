"""Weights of 4 bits, as bitsandbytes keeps them: frozen, and read by the adapters over them.

QLoRA, https://arxiv.org/abs/2305.14314: a layer computes with its weights made whole, ``W``, and
only the adapters beside it are trained.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_METHOD = "bitsandbytes"


def four_bit_config(dtype: torch.dtype) -> dict[str, Any]:
    """The ``quantization_config`` of ``from_pretrained`` for weights of 4 bits (NF4).

    Args:
        dtype: the weights are made whole in it, and products are computed in it.
    """
    name = str(dtype).removeprefix("torch.")
    return {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": name}


def quantization_of(model: nn.Module) -> str | None:
    """Name how the weights of a Transformers model are quantised; ``None`` where they are whole.

    Returns:
        ``"4bit"`` for layers of 4 bits of bitsandbytes, or else the name of the method.
    """
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if quantized_layers(model):
        return "4bit"
    if config is None:
        return None
    told = config if isinstance(config, dict) else config.to_dict()
    method = told.get("quant_method")
    return str(getattr(method, "value", method) or "an unknown method")


def quantized_layers(model: nn.Module) -> dict[str, Any]:
    """The layers whose weights have 4 bits, by name; without those of adapters around them."""
    nn_of: Any = sys.modules.get(f"{_METHOD}.nn")  # a model with such layers has imported it
    if nn_of is None:
        return {}
    return {
        name: layer for name, layer in model.named_modules() if isinstance(layer, nn_of.Linear4bit)
    }


def settle_quantized_layers(model: nn.Module) -> None:
    """Let layers of 4 bits compute alike in training and out of it.

    On CPUs with AVX512-BF16 bitsandbytes packs the weights of a layer anew once it computes in
    evaluation mode, rounds their scales to bfloat16 and multiplies in bfloat16: a token would be
    drawn from other weights than those that score it. And ``state_dict()`` (of 0.50) gives such a
    layer its scales back in the wrong order, after which it computes something else.

    Args:
        model: of Transformers, with layers of 4 bits or without.

    Raises:
        ValueError: its weights are packed already.
    """
    for name, layer in quantized_layers(model).items():
        if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            raise ValueError(
                f"{name}: bitsandbytes has packed weights of 4 bits for this CPU, because the "
                "model computed in evaluation mode. Load it again, and make a policy of it first."
            )
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


@torch.no_grad()
def whole_weight(layer: Any) -> Tensor:
    """The weight that a layer of 4 bits computes with, ``[out, in]``.

    Args:
        layer: its weights are on a device.
    """
    functional: Any = sys.modules[f"{_METHOD}.functional"]
    weight = layer.weight
    return functional.dequantize_4bit(weight.data, weight.quant_state)


@contextmanager
def declared_whole(model: Any) -> Iterator[None]:
    """Within, a model says that its weights are whole: what is saved of it are such weights.

    Args:
        model: of Transformers, quantised or not.
    """
    config, kept = vars(model.config), {}
    if "quantization_config" in config:
        kept["quantization_config"] = config.pop("quantization_config")
    about = {name: getattr(model, name, None) for name in ("hf_quantizer", "is_quantized")}
    model.hf_quantizer, model.is_quantized = None, False
    try:
        yield
    finally:
        config |= kept
        for name, value in about.items():
            setattr(model, name, value)

"""Logits as a product of hidden states and the weights of a head.

Shape legend: K target tokens, D hidden size, V vocabulary.
"""

import sys
from typing import Any, NamedTuple

import torch.distributed
from torch import Tensor, nn
from transformers import PreTrainedModel


def plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """The head, if the logits may be :func:`head_product` of the decoder's output, nothing else."""
    head: Any = model.get_output_embeddings()
    # A head inside another module comes after something else; a model may be its own base.
    is_last = any(child is head for child in model.children()) and model.base_model is not model
    peft: Any = sys.modules.get("peft")
    inside = head
    if peft is not None and type(head) is peft.utils.ModulesToSaveWrapper:
        inside = head.original_module
    elif peft is not None and _is_plain_lora(peft, head):
        inside = head.base_layer
    return head if is_last and type(inside) is nn.Linear else None


def _is_plain_lora(peft: Any, head: Any) -> bool:
    """Whether a layer adds ``B @ A @ x`` to its own product, and nothing else."""
    return (
        type(head) is peft.tuners.lora.Linear
        and not head.fan_in_fan_out
        and not head.lora_variant
        and all(type(each) is nn.Identity for each in head.lora_dropout.values())
        and not any(head.lora_bias.values())
    )


class HeadProduct(NamedTuple):
    """The factors of the logits: ``hidden @ weight.T + bias``."""

    hidden: Tensor
    """``[K, D]``, or ``[K, D + R]`` with adapters of rank R in all."""
    weight: Tensor
    """``[V, D]``, or ``[V, D + R]``."""
    bias: Tensor | None


def head_product(head: nn.Linear, hidden: Tensor) -> HeadProduct:
    """Return the factors of the logits.

    Adapters of LoRA that act on the head are further columns, so that no logits need be held:
    ``x @ W.T + s (x @ A.T) @ B.T`` is ``[x, s x @ A.T] @ [W, B].T``.

    Args:
        head: by :func:`plain_head`.
        hidden: ``[K, D]``, the decoder's output.
    """
    lora: Any = head
    peft: Any = sys.modules.get("peft")
    is_lora = peft is not None and type(head) is peft.tuners.lora.Linear
    acting = []
    if is_lora and not lora.disable_adapters and not lora.merged:
        acting = [name for name in lora.active_adapters if name in lora.lora_A]
    parts, columns = [hidden], [lora.weight]
    for name in acting:
        down, up = lora.lora_A[name].weight, lora.lora_B[name].weight
        part = nn.functional.linear(hidden.to(down.dtype), down) * lora.scaling[name]
        parts.append(part.to(hidden.dtype))
        columns.append(up.to(lora.weight.dtype))
    if not acting:
        return HeadProduct(hidden, lora.weight, lora.bias)
    return HeadProduct(torch.cat(parts, 1), torch.cat(columns, 1), lora.bias)

"""Causal attention over packed sequences, without a mask and without padding.

Registered with Transformers as the attention ``"packed_sdpa"``: on packed input each token attends
to its own sequence alone; on any other input it is Transformers' own ``"sdpa"``.

Shape legend: N packed tokens, H heads, G key-value heads, D head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from torchrl_modules.adapters import draws_dropout

from .prefix_trie import PrefixTrie
from .trie_attention import has_trie_attention, trie_attention

PACKED_SDPA: Final = "packed_sdpa"
_LAYERS: Final = {"full_attention", "sliding_attention"}
_is_packed: ContextVar[bool] = ContextVar("is_packed", default=False)


class PackedInputLost(RuntimeError):
    """A model's layers do not hand on to its attention which tokens make up the sequences."""


def packed_sdpa_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    trie: PrefixTrie | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention within the sequences of one packed row.

    Args:
        module: the attention layer.
        query: ``[1, H, N, D]``.
        key: ``[1, G, N, D]``.
        value: ``[1, G, N, D]``.
        attention_mask: used only when the input is not packed.
        dropout: probability.
        scaling: factor on the scores; 1/sqrt(D) when ``None``.
        sliding_window: a token sees at most this many tokens, itself included.
        trie: which tokens make up the sequences; ``None`` when the input is not packed. Sequences
            share tokens only where :func:`can_share` allows it.
        **kwargs: passed on when the input is not packed.

    Returns:
        ``[1, N, H, D]`` and ``None``.

    Raises:
        PackedInputLost: the input is packed, but there is no ``trie``.
    """
    if trie is None:
        if _is_packed.get():
            raise PackedInputLost(f"{type(module).__name__} is not told what its sequences are.")
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            **kwargs,
        )
    lengths = [segment.end - segment.start for segment in trie.segments]
    plain = dropout == 0.0 and (sliding_window is None or max(lengths) <= sliding_window)
    on_cpu = plain and query.device.type == "cpu" and has_trie_attention(query.device, query.dtype)
    if trie.is_shared or on_cpu:
        return trie_attention(query, key, value, trie, scale=scaling), None
    # Neighbours of one length are one batch, so sorting segments by length makes few calls.
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    totals = [length * count for length, count in runs]
    outputs = []
    for (length, count), *tensors in zip(
        runs, query.split(totals, 2), key.split(totals, 2), value.split(totals, 2), strict=True
    ):
        # [1, H, count * length, D] -> [count, H, length, D]
        q, k, v = (t[0].unflatten(1, (count, length)).transpose(0, 1) for t in tensors)
        window = _window_mask(length, sliding_window, q.device)
        attended = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=window,
            dropout_p=dropout,
            scale=scaling,
            is_causal=window is None,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None], None


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    if window is None or length <= window:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    return None if _is_packed.get() else sdpa_mask(*args, **kwargs)


@contextmanager
def packed_input() -> Iterator[None]:
    """Inside, a model with this attention builds no mask: its input is one packed row.

    An attention that is not told what the sequences are raises :class:`PackedInputLost`.
    """
    token = _is_packed.set(True)
    try:
        yield
    finally:
        _is_packed.reset(token)


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Switch a model to this attention, if it can take a registered one.

    Args:
        model: changed in place; its results on ordinary input stay the same.

    Returns:
        Whether the model now takes packed input.
    """
    if model.config._attn_implementation == PACKED_SDPA:
        return True
    if not _can_be_packed(model):
        return False
    AttentionInterface.register(PACKED_SDPA, packed_sdpa_forward)
    AttentionMaskInterface.register(PACKED_SDPA, _mask)
    model.set_attn_implementation(PACKED_SDPA)
    return True


def can_share(model: PreTrainedModel, longest: int) -> bool:
    """Whether sequences may share the tokens that they begin with.

    Args:
        model: takes packed input.
        longest: tokens of the longest sequence.

    Returns:
        ``False`` where tokens are more than plainly shared: dropout in training, a window that is
        shorter than a sequence, or a device without the kernels.
    """
    config = model.config.get_text_config()
    dropout = any(
        isinstance(value, float) and value > 0 and ("dropout" in name or "pdrop" in name)
        for name, value in config.to_dict().items()
    )
    window = getattr(config, "sliding_window", None) or longest
    return (
        not (model.training and dropout)
        and not draws_dropout(model)
        and window >= longest
        and has_trie_attention(model.device, model.dtype)
    )


def _can_be_packed(model: PreTrainedModel) -> bool:
    """Whether this attention computes what the model's own does, and nothing else joins tokens.

    Convolutions, recurrent states and chunks of attention would run on from one sequence into the
    next; attention sinks and capped scores are not part of SDPA.
    """
    config = model.config.get_text_config()
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return (
        getattr(model, "_supports_attention_backend", False)
        and getattr(model, "_supports_sdpa", False)
        and not getattr(model, "_is_stateful", False)
        and all(getattr(module, "is_causal", True) for module in model.modules())
        and set(getattr(config, "layer_types", None) or ()) <= _LAYERS
        and (not capped or config._attn_implementation == "sdpa")
    )

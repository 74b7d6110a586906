"""Causal attention over packed sequences, without a mask and without padding.

Registered with Transformers as the attention ``"packed_sdpa"``: on packed input each token attends
to its own sequence alone; on any other input it is Transformers' own ``"sdpa"``.

Shape legend: N packed tokens, H heads, G key-value heads, D head size.
"""

from collections.abc import Iterator, Sequence
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

from .prefix_trie import PrefixTrie, has_trie_attention, trie_attention
from .wrapped_models import draws_dropout

PACKED_SDPA: Final = "packed_sdpa"
_REPLACED: Final = {"sdpa", "eager"}
"""Attentions whose place this one takes; another one was chosen, and stays."""
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
    softcap: float | None = None,
    trie: PrefixTrie | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention within the sequences of one packed row."""
    # query: [1, H, N, D].
    # key: [1, G, N, D].
    # value: [1, G, N, D].
    # trie: which tokens make up the sequences; `None` when the input is not packed. Sequences share
    # tokens only where `can_share` allows it.
    # Gives [1, N, H, D] and `None`.
    query, key, value = _as_autocast(query, key, value)
    if trie is None:
        if _is_packed.get():
            raise PackedInputLost(f"{type(module).__name__} is not told what its sequences are.")
        if softcap is not None:
            mask = _causal_mask(query, key) if attention_mask is None else attention_mask
            attended = _capped_attention(query, key, value, mask, dropout, scaling, softcap)
            return attended.transpose(1, 2).contiguous(), None
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
    _refuse_more(module, attention_mask, kwargs)
    lengths = [segment.end - segment.start for segment in trie.segments]
    within = sliding_window is None or max(lengths) <= sliding_window
    plain = dropout == 0.0 and within and softcap is None
    on_cpu = plain and query.device.type == "cpu" and has_trie_attention(query.device, query.dtype)
    if trie.is_shared or on_cpu:
        return trie_attention(query, key, value, trie, scale=scaling), None
    attended = _attend_by_length(
        query, key, value, lengths, dropout, scaling, sliding_window, softcap
    )
    return attended, None


def _attend_by_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of rows that share nothing, ``[1, N, H, D]``."""
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
        if softcap is not None:
            mask = _causal_mask(q, k) if window is None else window
            attended = _capped_attention(q, k, v, mask, dropout, scaling, softcap)
        else:
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
    return torch.cat(outputs)[None]


def _as_autocast(*tensors: Tensor) -> list[Tensor]:
    """As ``torch.autocast`` hands them to SDPA; rotary positions leave them of several types."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [x.to(dtype) if x.is_floating_point() else x for x in tensors]


def _refuse_more(module: nn.Module, mask: Tensor | None, settings: dict[str, Any]) -> None:
    """A layer that makes a mask of its own, or has sinks or a bias, is not only packed."""
    more = [name for name, x in settings.items() if isinstance(x, Tensor) and x.is_floating_point()]
    more += ["attention_mask"] if mask is not None else []
    if more:
        raise PackedInputLost(f"{type(module).__name__} gives its attention {', '.join(more)}.")


def _causal_mask(query: Tensor, key: Tensor) -> Tensor:
    size, ahead = query.shape[-2], key.shape[-2] - query.shape[-2]
    everything = torch.ones(size, key.shape[-2], dtype=torch.bool, device=query.device)
    return everything.tril(ahead)


def _capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    dropout: float,
    scale: float | None,
    softcap: float,
) -> Tensor:
    """Attention with capped scores, which SDPA has not; ``[B, H, T, D]`` in and out."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    factor = (query.shape[-1] ** -0.5 if scale is None else scale) / softcap
    scores = softcap * torch.tanh(query @ key.transpose(-2, -1) * factor)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.nn.functional.dropout(weights, dropout) @ value


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
    """Inside, a model with this attention builds no mask: its input is one packed row."""
    # An attention that is not told what the sequences are raises `PackedInputLost`.
    token = _is_packed.set(True)
    try:
        yield
    finally:
        _is_packed.reset(token)


def use_packed_attention(model: PreTrainedModel) -> str | None:
    """Switch a model to this attention, if it can take a registered one."""
    # model: changed in place; its results on ordinary input stay the same, but that capped scores
    # are capped, which they are not with `"sdpa"`.
    # Gives the attention that it had, or `None` when it can't be switched.
    before = model.config._attn_implementation
    if before == PACKED_SDPA:
        return before
    if not _can_be_packed(model):
        return None
    model.set_attn_implementation(PACKED_SDPA)
    return before


def cap_attention(model: PreTrainedModel) -> None:
    """See to it that a model with capped attention scores caps them, which ``"sdpa"`` does not."""
    config = model.config.get_text_config()
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    if is_capped and config._attn_implementation == "sdpa" and use_packed_attention(model) is None:
        model.set_attn_implementation("eager")


def can_share(model: PreTrainedModel, longest: int) -> bool:
    """Whether sequences may share the tokens that they begin with."""
    # Gives `False` where tokens are more than plainly shared: dropout in training, a window that is
    # shorter than a sequence, or a device without the kernels.
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
        and getattr(config, "attn_logit_softcapping", None) is None
        and has_trie_attention(model.device, model.dtype)
    )


def _can_be_packed(model: PreTrainedModel) -> bool:
    """Whether this attention computes what the model's own does, and nothing else joins tokens."""
    # Convolutions, recurrent states and chunks of attention would run on from one sequence into the
    # next; attention sinks are not part of SDPA.
    config = model.config.get_text_config()
    return (
        getattr(model, "_supports_attention_backend", False)
        and getattr(model, "_supports_sdpa", False)
        and not getattr(model, "_is_stateful", False)
        and all(getattr(module, "is_causal", True) for module in model.modules())
        and set(getattr(config, "layer_types", None) or ()) <= _LAYERS
        and config._attn_implementation in _REPLACED
    )


# As soon as this is imported: a model that has this attention may come from another process.
AttentionInterface.register(PACKED_SDPA, packed_sdpa_forward)
AttentionMaskInterface.register(PACKED_SDPA, _mask)

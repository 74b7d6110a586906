"""Causal attention over packed sequences, without a mask and without padding.

Registered with Transformers as the attention ``"packed_rows"``: on packed input each token
attends to its own sequence alone; on any other input it is Transformers' own ``"sdpa"``.

Shape legend: N packed tokens, H heads, G key-value heads, D head size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from torchrl_modules.transformers_releases import takes_sdpa

from .context_share import gathered_heads
from .slot_attention import SlotPlan, slot_attention
from .trie_attention import (
    PrefixTrie,
    Segment,
    flash_attention,
    has_flash_attention,
    has_trie_attention,
    runs_of,
    trie_attention,
)

PACKED_SDPA: Final = "packed_rows"
"""A name without "sdpa", which Transformers refuses by for models whose scores it would not cap."""
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
    slots: SlotPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention within the sequences of one packed row."""
    # query: [1, H, N, D].
    # key: [1, G, N, D].
    # value: [1, G, N, D].
    # trie: which tokens make up the sequences; `None` when the input is not packed. Sequences share
    # tokens only where `can_share` allows it.
    # slots: where rows go on that are drawn; query is one token of each then, [A, H, 1, D], and key
    # and value are [S, G, C, D].
    # Gives [1, N, H, D], or [A, 1, H, D], and `None`.
    if torch.is_autocast_enabled(query.device.type):
        # As autocast hands them to SDPA; rotary positions leave them of several types.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    heads = (query, key, value)
    if slots is not None:
        _refuse_more(module, attention_mask, kwargs)
        if softcap is not None or dropout or sliding_window is not None:
            raise PackedInputLost(f"{type(module).__name__} wants more than plain attention.")
        attended = slot_attention(query.squeeze(2), key, value, slots, scaling)
        return attended[:, None], None
    if trie is None:
        if _is_packed_here():
            raise PackedInputLost(f"{type(module).__name__} is not told what its sequences are.")
        if softcap is not None:
            mask = _causal_mask(query, key) if attention_mask is None else attention_mask
            attended = _capped_attention(heads, mask, dropout, scaling, softcap)
            return attended.transpose(1, 2).contiguous(), None
        groups = query.shape[1] // key.shape[1]
        is_plain = kwargs.get("position_bias") is None and kwargs.get("cache") is None
        if (
            query.shape[2] == 1
            and groups > 1
            and is_plain
            and (attention_mask is None or attention_mask.shape[1] == 1)
        ):
            # A single token each: query heads that share keys are queries of one head, so that no
            # key and no value has to be repeated.
            folded = query.reshape(*key.shape[:2], groups, -1)
            attended = scaled_dot_product_attention(
                folded, key, value, attention_mask, dropout, scale=scaling
            )
            return attended.reshape(len(query), 1, query.shape[1], -1), None
        options = {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, **options, **kwargs
        )
    _refuse_more(module, attention_mask, kwargs)
    is_apart = query.device.type in _APART or trie.context is not None
    if torch.compiler.is_compiling() and is_apart:
        return _attend_apart(heads, trie, dropout, scaling, sliding_window, softcap), None
    return _attend_packed(heads, trie, dropout, scaling, sliding_window, softcap), None


def _refuse_more(module: nn.Module, mask: Tensor | None, given: dict[str, Any]) -> None:
    """A layer that makes a mask of its own, or has sinks or a bias, has not only plain rows."""
    more = [name for name, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()]
    more += ["attention_mask"] if mask is not None and mask.numel() else []
    if more:
        raise PackedInputLost(f"{type(module).__name__} gives its attention {', '.join(more)}.")


_APART: Final = {"cuda"}
"""Devices on which compiled layers call the attention of packed rows, which is compiled by itself
or a kernel as it is: inside, each batch would compile all of it again."""


def _attend_packed(
    heads: tuple[Tensor, Tensor, Tensor],
    trie: PrefixTrie,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention within the sequences of one packed row, ``[1, N, H, D]``."""
    query = heads[0]
    lengths = [segment.end - segment.start for segment in trie.segments]
    within = sliding_window is None or max(lengths) <= sliding_window
    plain = dropout == 0.0 and within and softcap is None
    if trie.context is not None and not plain:
        return _attend_by_range(heads, trie, dropout, scaling, sliding_window, softcap)
    on_cpu = plain and query.device.type == "cpu" and has_trie_attention(query.device, query.dtype)
    is_shared = any(segment.subtree_end > segment.end for segment in trie.segments)
    if on_cpu or is_shared or trie.context is not None:
        return trie_attention(*heads, trie, scale=scaling)
    if dropout == 0.0 and softcap is None and has_flash_attention(*heads):
        window = None if within else sliding_window
        return flash_attention(*heads, trie.varlen_plan, scaling, window)
    return _attend_by_length(heads, trie.segments, dropout, scaling, sliding_window, softcap)


_attend_apart: Any = torch.compiler.disable(_attend_packed)


def _attend_by_length(
    heads: tuple[Tensor, Tensor, Tensor],
    segments: Sequence[Segment],
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of rows that share nothing, ``[1, N, H, D]``."""
    # Neighbours of one length are one batch, so sorting segments by length makes few calls.
    runs = [(length, (at.stop - at.start) // length) for at, length in runs_of(segments)]
    totals = [length * count for length, count in runs]
    is_grouped, outputs = heads[0].shape[1] != heads[1].shape[1], []
    for (length, count), *tensors in zip(runs, *(x.split(totals, 2) for x in heads), strict=True):
        # [1, H, count * length, D] -> [count, H, length, D]
        q, k, v = (t[0].unflatten(1, (count, length)).transpose(0, 1) for t in tensors)
        is_windowed = sliding_window is not None and length > sliding_window
        window = sliding_window if is_windowed else None
        if softcap is not None:
            mask = _causal_mask(q, k, window)
            attended = _capped_attention((q, k, v), mask, dropout, scaling, softcap)
        else:
            mask = None if window is None else _causal_mask(q, k, window)
            attended = scaled_dot_product_attention(
                q, k, v, mask, dropout, window is None, scale=scaling, enable_gqa=is_grouped
            )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None]


def _attend_by_range(
    heads: tuple[Tensor, Tensor, Tensor],
    trie: PrefixTrie,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of rows that share nothing, of this rank's part of each, ``[1, N, H, D]``."""
    context = trie.context
    assert context is not None
    query = heads[0]
    key, value = gathered_heads(*heads[1:], context)
    is_grouped, outputs = query.shape[1] != key.shape[1], []
    for segment in trie.segments:
        for low, high in context.ranges:
            first, end = max(segment.start, low), min(segment.end, high)
            if first >= end:
                continue
            seen = segment.start
            if sliding_window is not None:
                seen = max(seen, first - sliding_window + 1)
            q = query[:, :, context.count_before(first) : context.count_before(end)]
            k, v = (x[:, :, seen:end] for x in (key, value))
            mask = _causal_mask(q, k, sliding_window)
            if softcap is not None:
                outputs.append(_capped_attention((q, k, v), mask, dropout, scaling, softcap))
            else:
                outputs.append(
                    scaled_dot_product_attention(
                        q, k, v, mask, dropout, scale=scaling, enable_gqa=is_grouped
                    )
                )
    return torch.cat(outputs, 2).transpose(1, 2)


def _causal_mask(query: Tensor, key: Tensor, window: int | None = None) -> Tensor:
    """The tokens that each sees, bool ``[queries, keys]``: itself and those before, in a window."""
    size, ahead = query.shape[-2], key.shape[-2] - query.shape[-2]
    mask = torch.ones(size, key.shape[-2], dtype=torch.bool, device=query.device).tril(ahead)
    return mask if window is None else mask.triu(ahead + 1 - window)


def _capped_attention(
    heads: Sequence[Tensor], mask: Tensor, dropout: float, scale: float | None, softcap: float
) -> Tensor:
    """Attention with capped scores, which SDPA has not; ``[B, H, T, D]`` in and out."""
    query, key, value = heads
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


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    return None if _is_packed_here() else sdpa_mask(*args, **kwargs)


def _is_packed_here() -> bool:
    # A compiler can't read what is true of a thread. What it has compiled is told of the sequences
    # or not as its caller was: a model that loses them gives other log-probs, which its trial sees.
    return not torch.compiler.is_compiling() and _is_packed.get()


def no_mask(device: torch.device) -> Tensor | None:
    """What a model is given in the place of a mask where its input is packed."""
    # Without any, Transformers reads the positions to see whether rows are packed, and a host would
    # wait for that. A mask of four dimensions is handed on as it is; this one is empty.
    return (
        None if device.type == "cpu" else torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)
    )


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
    # It has to compute what the model's own does, and nothing else may join tokens: convolutions,
    # recurrent states and chunks of attention would run on from one sequence into the next;
    # attention sinks are not part of SDPA.
    layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if (
        not getattr(model, "_supports_attention_backend", False)
        or not takes_sdpa(model)
        or getattr(model, "_is_stateful", False)
        or not all(getattr(module, "is_causal", True) for module in model.modules())
        or not layers <= _LAYERS
        or model.config.get_text_config()._attn_implementation not in _REPLACED
    ):
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
    window = getattr(config, "sliding_window", None) or longest
    return (
        not drops_out(model)
        and window >= longest
        and getattr(config, "attn_logit_softcapping", None) is None
        and has_trie_attention(model.device, model.dtype)
    )


def drops_out(model: PreTrainedModel) -> bool:
    """Whether passes of the model draw what they leave out (dropout in training)."""
    dropout = any(
        isinstance(value, float) and value > 0 and ("dropout" in name or "pdrop" in name)
        for name, value in model.config.get_text_config().to_dict().items()
    )
    draws = any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
        for module in model.modules()
    )
    return (model.training and dropout) or draws


# As soon as this is imported: a model that has this attention may come from another process.
AttentionInterface.register(PACKED_SDPA, packed_sdpa_forward)
AttentionMaskInterface.register(PACKED_SDPA, _mask)

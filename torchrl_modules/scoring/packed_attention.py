"""Rows that share prompts are read in one sequence.

The trie of their prefixes and its attention.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from torchrl_data.devices import on_device
from torchrl_modules.compilation import Compiled
from torchrl_modules.transformers_releases import takes_sdpa

# Packed sequences as a trie: what they begin with in common is there once, attention included.
#
# The tokens of the trie lie in depth-first order, so the descendants of a segment follow it, and a
# token at ``q`` sees one at ``k`` if and only if ``k <= q < subtree_end[k]``.
#
# On a CPU :func:`trie_attention` is made of pieces of plain attention: each segment with itself,
# and each segment that has descendants with all of them, joined by their log-sum-exps. No mask is
# built, nothing is computed twice, and no keys are copied. On a GPU it is flex attention with the
# trie as the mask.
#
# Shape legend: N packed tokens, B sequences, M tokens of the trie, H heads, G key-value heads, D
# head size of queries and keys, E of values.

_WORTH: Final = 32
"""A shared token saves a pass through the model; a token behind it pays about 1/32 of one, for a
second piece of attention."""
_BLOCK: Final = 128
"""Tokens of a block of flex attention's mask."""
_FLEX_OPTIONS: Final[Any] = {"FORCE_USE_FLEX_ATTENTION": True}
"""Below 128 queries PyTorch takes its kernel for decoding, which has none for some of them."""


class Segment(NamedTuple):
    """Neighbouring tokens of the trie that the same sequences share."""

    start: int
    end: int
    subtree_end: int
    """Where the tokens of its descendants end; ``end`` when it has none."""


@dataclass(frozen=True)
class PrefixTrie:
    """What the model reads, and where the packed tokens are in it."""

    ids: Tensor
    """int64 ``[M]``."""
    positions: Tensor
    """int64 ``[M]``, of each token in its sequence."""
    node: Tensor
    """int64 ``[N]``, on the host: where each packed token is in the trie; -1 where nobody needs
    it."""
    segments: tuple[Segment, ...]
    """In depth-first order; they cover ``[0, M)``."""

    @cached_property
    def subtree_end(self) -> Tensor:
        """int64 ``[M]``: the token is seen by those from itself up to here, and no others."""
        ends = torch.tensor([s.subtree_end for s in self.segments])
        sizes = torch.tensor([s.end - s.start for s in self.segments])
        return on_device(ends.repeat_interleave(sizes), self.ids.device)

    @cached_property
    def block_mask(self) -> Any:
        """The mask of the trie for flex attention, in memory O((M / 128)^2); layers share it."""
        from torch.nn.attention.flex_attention import BlockMask

        ends, size = self.subtree_end, len(self.ids)

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
            return (k <= q) & (q < ends[k])

        # Of a block of keys, the least and the largest end tell which later blocks of queries see
        # all of it, or any of it.
        least, most = pad(ends, (0, -size % _BLOCK), value=size).view(-1, _BLOCK).aminmax(dim=1)
        key = torch.arange(0, size, _BLOCK, device=ends.device)
        query = key[:, None]
        whole = (key < query) & (query + _BLOCK <= least)
        partial = (key <= query) & (query < most) & ~whole
        counts = [
            x[None, None].to(torch.int32)
            for some in (partial, whole)
            for x in (some.sum(1), some.argsort(dim=1, descending=True, stable=True))
        ]
        return BlockMask.from_kv_blocks(
            *counts, BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(size, size)
        )


def build_trie(
    ids: Tensor, lengths: Tensor, ends: Tensor, *, share: bool, device: torch.device | None = None
) -> PrefixTrie:
    """Lay packed sequences out as a trie."""
    # ids: int64 [N], on the host, as all that follows.
    # lengths: int64 [B], summing to N.
    # ends: int64 [B]: only this many tokens of each sequence are needed; at most its length.
    # share: put what sequences begin with in common there once, where it saves more than it costs;
    # `False` keeps every sequence for itself.
    # device: where the model reads it; the host when not given.
    # Segments beside each other without descendants are sorted by length.
    values, device = ids.numpy(), device or ids.device
    sizes, needed = lengths.tolist(), ends.tolist()
    starts = np.concatenate([[0], np.cumsum(sizes)])[:-1].tolist()
    rows = [
        _Row(start, values[start : start + end])
        for start, end in zip(starts, needed, strict=True)
        if end
    ]
    if share:
        nodes = _shared_nodes(rows)
    else:
        by_length = sorted(rows, key=lambda row: len(row.ids))
        nodes = [_Node([row], 0, len(row.ids), 0) for row in by_length]
    node_of = np.full(len(values), -1)
    tokens, positions = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    segments: list[list[int]] = []
    path: list[int] = []  # from the root to a node
    start = 0
    for node in nodes:
        end = start + node.last - node.first
        for row in node.rows:
            node_of[row.start + node.first : row.start + node.last] = np.arange(start, end)
        tokens.append(node.rows[0].ids[node.first : node.last])
        positions.append(np.arange(node.first, node.last))
        path = [*path[: node.depth], len(segments)]
        segments.append([start, end, end])
        for above in path:
            segments[above][2] = end
        start = end
    return PrefixTrie(
        ids=on_device(torch.from_numpy(np.concatenate(tokens)), device),
        positions=on_device(torch.from_numpy(np.concatenate(positions)), device),
        node=torch.from_numpy(node_of),
        segments=tuple(Segment(*segment) for segment in segments),
    )


class _Row(NamedTuple):
    start: int
    """In the packed tokens."""
    ids: np.ndarray


class _Node(NamedTuple):
    rows: Sequence[_Row]
    """Those that share it."""
    first: int
    """It holds tokens from here ..."""
    last: int
    """... to before here of its rows."""
    depth: int
    """How many ancestors it has."""


def _shared_nodes(rows: Sequence[_Row]) -> list[_Node]:
    """Nodes in depth-first order."""
    # As bytes, most significant first, token ids sort as numbers do.
    ordered = sorted(rows, key=lambda row: row.ids.astype(">i8").tobytes())
    common = []  # tokens that neighbours begin with alike
    for a, b in pairwise(row.ids for row in ordered):
        size = min(len(a), len(b))
        differ = (a[:size] != b[:size]).nonzero()[0]
        common.append(int(differ[0]) if len(differ) else size)
    nodes: list[_Node] = []
    # Ranges of rows that agree up to `first`, of which the nodes above hold all.
    waiting = [(0, len(ordered), 0, 0)] if ordered else []
    while waiting:
        low, high, first, depth = waiting.pop()
        some = ordered[low:high]
        last = min(common[low : high - 1], default=len(some[0].ids))
        # Runs of rows that agree in more than their first `last` tokens.
        ends = [i + 1 for i in range(low, high - 1) if common[i] == last]
        parts = list(pairwise([low, *ends, high]))
        num_saved = (last - first) * (len(parts) - 1)
        num_behind = sum(len(row.ids) - last for row in some)
        if last > first and (len(parts) == 1 or _WORTH * num_saved >= num_behind):
            nodes.append(_Node(some, first, last, depth))
            first, depth = last, depth + 1
            parts = [(a, b) for a, b in parts if len(ordered[b - 1].ids) > last]
        # Single rows last and by length, so that those of one length are beside each other.
        parts.sort(key=lambda p: (p[1] - p[0] == 1, len(ordered[p[0]].ids)), reverse=True)
        waiting += [(a, b, first, depth) for a, b in parts]
    return nodes


def has_trie_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this PyTorch has what :func:`trie_attention` is made of."""
    if device.type == "cpu":
        name = "_scaled_dot_product_flash_attention_for_cpu_backward"
        known = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        return dtype in known and hasattr(torch.ops.aten, name)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def trie_attention(
    query: Tensor, key: Tensor, value: Tensor, trie: PrefixTrie, *, scale: float | None = None
) -> Tensor:
    """Attention of every token over its ancestors in the trie and itself."""
    # query: [1, H, M, D]; key: [1, G, M, D]; G divides H; value: [1, G, M, E].
    # Gives [1, M, H, E], differentiable.
    if query.device.type != "cpu":
        is_grouped = query.shape[1] != key.shape[1]
        out = _compiled_flex()(
            *(query, key, value),
            **{"block_mask": trie.block_mask, "scale": scale, "enable_gqa": is_grouped},
            kernel_options=_FLEX_OPTIONS,
        )
        return out.transpose(1, 2)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # The kernel wants one size; zeros add nothing to a score, nor to what is kept of a value.
    size = max(x.shape[-1] for x in (query, key, value))
    heads = [
        x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in (query, key, value)
    ]
    out: Any = _PiecewiseAttention.apply(*heads, trie.segments, scale)
    return out[..., : value.shape[-1]]


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    slow = "it holds the whole matrix of scores in memory"
    return Compiled(flex_attention, "flex attention", slow=slow)


def _runs(segments: Sequence[Segment]) -> Iterator[tuple[slice, int]]:
    """Neighbouring segments of one length, a batch of plain attention: their tokens, the length."""
    # Written out, for `torch.compile` knows no `groupby`.
    first = 0
    for i, (start, end, _) in enumerate(segments):
        following = segments[i + 1] if i + 1 < len(segments) else None
        if following is None or following.end - following.start != end - start:
            yield slice(segments[first].start, end), end - start
            first = i + 1


def _batch(x: Tensor, tokens: slice, length: int) -> Tensor:
    """``[M, H, ...]`` to ``[count, H, length, ...]``, without a copy."""
    return x[tokens].unflatten(0, (-1, length)).transpose(1, 2)


def _one(x: Tensor, tokens: slice) -> Tensor:
    """``[M, H, ...]`` to ``[1, H, tokens, ...]``, without a copy."""
    return x[tokens].transpose(0, 1)[None]


class _PiecewiseAttention(Function):
    """The pieces, forward and backward."""

    # With the output and the log-sum-exp of the whole row of scores, the backward pass of a piece
    # gives exactly its part of the gradients.

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Sequence[Segment],
        scale: float,
    ) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(q.shape[:2], dtype=torch.float64 if q.dtype.itemsize == 8 else None)
        for run in _runs(segments):
            piece = attend(*(_batch(x, *run) for x in (q, k, v)), 0.0, True, scale=scale)
            _batch(out, *run).copy_(piece[0])
            _batch(lse, *run).copy_(piece[1])
        for start, end, subtree_end in segments:
            if subtree_end > end:
                below, above = slice(end, subtree_end), slice(start, end)
                piece = attend(_one(q, below), _one(k, above), _one(v, above), scale=scale)
                ahead = piece[1][0].transpose(0, 1)
                share = torch.sigmoid(ahead - lse[below]).to(out.dtype)[..., None]
                out[below] = torch.lerp(out[below], piece[0][0].transpose(0, 1), share)
                lse[below] = torch.logaddexp(lse[below], ahead)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out[None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        *inputs, out, lse = ctx.saved_tensors
        q, k, v = (x[0].transpose(0, 1) for x in inputs)
        totals = [torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v)]
        saved = (grads[0][0], q, k, v, out, lse)
        for run in _runs(ctx.segments):
            pieces = differentiate(*(_batch(x, *run) for x in saved), 0.0, True, scale=ctx.scale)
            for total, piece in zip(totals, pieces, strict=True):
                _batch(total, *run).copy_(piece)
        for start, end, subtree_end in ctx.segments:
            if subtree_end > end:
                below, above = slice(end, subtree_end), slice(start, end)
                whose = (below, below, above, above, below, below)
                pieces = differentiate(*map(_one, saved, whose), 0.0, False, scale=ctx.scale)
                for total, piece, tokens in zip(totals, pieces, (below, above, above), strict=True):
                    total[tokens] += piece[0].transpose(0, 1)
        return (*(x.transpose(0, 1)[None] for x in totals), None, None)


# Causal attention over packed sequences, without a mask and without padding.
#
# Registered with Transformers as the attention ``"packed_rows"``: on packed input each token
# attends to its own sequence alone; on any other input it is Transformers' own ``"sdpa"``.
#
# Shape legend: N packed tokens, H heads, G key-value heads, D head size.

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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention within the sequences of one packed row."""
    # query: [1, H, N, D].
    # key: [1, G, N, D].
    # value: [1, G, N, D].
    # trie: which tokens make up the sequences; `None` when the input is not packed. Sequences share
    # tokens only where `can_share` allows it.
    # Gives [1, N, H, D] and `None`.
    if torch.is_autocast_enabled(query.device.type):
        # As autocast hands them to SDPA; rotary positions leave them of several types.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    heads = (query, key, value)
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
    # A layer that makes a mask of its own, or has sinks or a bias, is not only packed.
    more = [name for name, x in kwargs.items() if isinstance(x, Tensor) and x.is_floating_point()]
    more += ["attention_mask"] if attention_mask is not None and attention_mask.numel() else []
    if more:
        raise PackedInputLost(f"{type(module).__name__} gives its attention {', '.join(more)}.")
    lengths = [segment.end - segment.start for segment in trie.segments]
    within = sliding_window is None or max(lengths) <= sliding_window
    plain = dropout == 0.0 and within and softcap is None
    on_cpu = plain and query.device.type == "cpu" and has_trie_attention(query.device, query.dtype)
    if on_cpu or any(segment.subtree_end > segment.end for segment in trie.segments):
        return trie_attention(*heads, trie, scale=scaling), None
    return _attend_by_length(heads, trie.segments, dropout, scaling, sliding_window, softcap), None


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
    runs = [(length, (at.stop - at.start) // length) for at, length in _runs(segments)]
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


def _causal_mask(query: Tensor, key: Tensor, window: int | None = None) -> Tensor:
    """What tokens see, bool ``[queries, keys]``: themselves and those before, in a window."""
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
    dropout = any(
        isinstance(value, float) and value > 0 and ("dropout" in name or "pdrop" in name)
        for name, value in config.to_dict().items()
    )
    draws = any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
        for module in model.modules()
    )
    window = getattr(config, "sliding_window", None) or longest
    return (
        not (model.training and dropout)
        and not draws
        and window >= longest
        and getattr(config, "attn_logit_softcapping", None) is None
        and has_trie_attention(model.device, model.dtype)
    )


# As soon as this is imported: a model that has this attention may come from another process.
AttentionInterface.register(PACKED_SDPA, packed_sdpa_forward)
AttentionMaskInterface.register(PACKED_SDPA, _mask)

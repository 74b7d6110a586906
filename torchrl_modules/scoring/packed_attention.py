"""Rows that share prompts are read in one sequence.

The trie of their prefixes and its attention.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
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
# :func:`trie_attention` is made of pieces of plain attention: each segment with itself, and each
# segment that has descendants with all of them, joined by their log-sum-exps. No mask is built and
# nothing is computed twice. On a CPU no keys are copied either; on a GPU the pieces of one depth
# are one call of flash attention for rows of many lengths. What that kernel does not take (float32,
# large heads) is flex attention with the trie as the mask.
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
    def varlen_plan(self) -> "VarlenPlan":
        """The pieces of its attention as calls of a kernel for rows of many lengths."""
        return _varlen_plan(self.segments, self.ids.device)

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
    if has_flash_attention(query, key, value):
        return _flash_attention(query, key, value, trie.varlen_plan, scale)
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


class Level(NamedTuple):
    """Segments of one depth that have descendants: these are the queries, and those the keys."""

    below: Tensor
    """int64: where the descendants are in the trie."""
    above: Tensor
    """int64: where the segments are."""
    cumulative: tuple[Tensor, Tensor]
    """int32: where each segment's descendants begin among the former, and it among the latter."""
    longest: tuple[int, int]


class VarlenPlan(NamedTuple):
    """Attention over a trie, a call for all segments and one for each depth."""

    starts: Tensor
    """int32: where each segment begins, and behind the last."""
    longest: int
    """Tokens of the longest segment."""
    levels: tuple[Level, ...]


def _varlen_plan(segments: Sequence[Segment], device: torch.device) -> VarlenPlan:
    def cumulative(sizes: Sequence[int]) -> Tensor:
        return on_device([0, *accumulate(sizes)], device, torch.int32)

    def joined(ranges: Sequence[tuple[int, int]]) -> Tensor:
        return on_device(torch.cat([torch.arange(*each) for each in ranges]), device)

    by_depth: dict[int, list[Segment]] = {}
    above: list[Segment] = []  # from the root to a segment
    for segment in segments:
        while above and segment.start >= above[-1].subtree_end:
            above.pop()
        if segment.subtree_end > segment.end:
            by_depth.setdefault(len(above), []).append(segment)
        above.append(segment)
    levels = []
    for some in by_depth.values():
        queries = [(one.end, one.subtree_end) for one in some]
        keys = [(one.start, one.end) for one in some]
        sizes = [[end - start for start, end in each] for each in (queries, keys)]
        levels.append(
            Level(
                joined(queries),
                joined(keys),
                (cumulative(sizes[0]), cumulative(sizes[1])),
                (max(_FEWEST, *sizes[0]), max(sizes[1])),
            )
        )
    lengths = [one.end - one.start for one in segments]
    longest = max(_FEWEST, *lengths) if lengths else _FEWEST
    return VarlenPlan(cumulative(lengths), longest, tuple(levels))


_FEWEST: Final = 2
"""Queries of a row, at least as the kernel is told: one alone takes another way, without a
gradient."""


_FLASH_TYPES: Final = (torch.bfloat16, torch.float16)
_FLASH_GAP: Final = 0.05
"""Of the check against plain attention, relative: bfloat16 leaves about 0.01."""


def has_flash_attention(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether flash attention for rows of many lengths takes these heads, and is right."""
    # Their shapes are [1, H, M, D] and [1, G, M, D].
    size = query.shape[-1]
    if (
        query.device.type != "cuda"
        or query.dtype not in _FLASH_TYPES
        or size % 8
        or size > 256
        or value.shape[-1] != size
        or torch.compiler.is_compiling()
    ):
        return False
    return _flash_is_right(query.device, query.dtype, query.shape[1] // key.shape[1], size)


@cache
def _flash_is_right(device: torch.device, dtype: torch.dtype, groups: int, size: int) -> bool:
    """Try it once on a small trie; where it is wrong or fails, that is told, and flex is used."""
    segments = (Segment(0, 9, 40), Segment(9, 14, 31), Segment(14, 21, 21), Segment(21, 31, 31))
    segments = (*segments, Segment(31, 40, 40), Segment(40, 47, 47))
    ends = torch.tensor([s.subtree_end for s in segments for _ in range(s.end - s.start)])
    at = torch.arange(len(ends))
    sees = on_device((at <= at[:, None]) & (at[:, None] < ends), device)
    draw = torch.Generator().manual_seed(0)
    heads = [torch.randn(1, n, len(ends), size, generator=draw) for n in (2 * groups, 2, 2)]
    slope = on_device(torch.randn(1, len(ends), 2 * groups, size, generator=draw), device)
    results = []
    try:
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            for kind in (dtype, torch.float32):
                leaves = [on_device(x, device).to(kind).requires_grad_() for x in heads]
                if kind is dtype:
                    plan = _varlen_plan(segments, device)
                    out = _flash_attention(leaves[0], leaves[1], leaves[2], plan, None)
                else:
                    q = leaves[0]
                    k, v = (x.repeat_interleave(groups, 1) for x in leaves[1:])
                    scores = (q @ k.transpose(-2, -1)) * size**-0.5
                    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
                    out = (weights @ v).transpose(1, 2)
                slopes = torch.autograd.grad((out * slope.to(out.dtype)).sum(), leaves)
                results.append([out.detach().float(), *(x.float() for x in slopes)])
        gaps = [((a - b).norm() / b.norm()).item() for a, b in zip(*results, strict=True)]
        reason = "" if max(gaps) < _FLASH_GAP else f"it is off by {max(gaps):.2g}"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of this PyTorch or this card: it is told, and flex is used
        reason = f"{type(error).__name__}: {str(error)[:200]}"
    if reason:
        warnings.warn(
            f"Flash attention for rows of many lengths is not used on {device} for {dtype}, heads "
            f"of {size}, {groups} to a key: {reason}. Flex attention, which is slower, takes its "
            "place.",
            stacklevel=2,
        )
    return not reason


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: VarlenPlan,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Attention over a trie, ``[1, M, H, D]``; with a window no segment may have descendants."""
    # query: [1, H, M, D]; key and value: [1, G, M, D].
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    heads = [x[0].transpose(0, 1) for x in (query, key, value)]
    out: Any = _FlashAttention.apply(*heads, plan, scale, window)
    return out[None]


def _varlen_forward(
    heads: Sequence[Tensor],
    cumulative: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float,
    *,
    causal: bool,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output ``[queries, H, D]`` and log-sum-exps ``[H, queries]``."""
    attended = torch.ops.aten._flash_attention_forward(
        *heads,
        *cumulative,
        *longest,
        *(0.0, causal, False),
        scale=scale,
        **_window_options(window),
    )
    return attended[0], attended[1]


def _varlen_backward(
    grad: Tensor,
    heads: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    cumulative: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float,
    *,
    causal: bool,
    window: int | None = None,
) -> Sequence[Tensor]:
    """Gradients of queries, keys and values."""
    unused = torch.empty(2, dtype=torch.uint64, device=grad.device)  # of dropout
    return torch.ops.aten._flash_attention_backward(
        grad,
        *heads,
        *(out, lse),
        *cumulative,
        *longest,
        *(0.0, causal, unused, unused),
        scale=scale,
        **_window_options(window),
    )


def _window_options(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


class _FlashAttention(Function):
    """The pieces, forward and backward, on a GPU."""

    # As below: with the output and the log-sum-exp of the whole row of scores, the backward pass of
    # a piece gives exactly its part of the gradients.

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: VarlenPlan,
        scale: float,
        window: int | None,
    ) -> Tensor:
        own, longest = (plan.starts, plan.starts), (plan.longest, plan.longest)
        heads = (query, key, value)
        out, lse = _varlen_forward(heads, own, longest, scale, causal=True, window=window)
        for level in plan.levels:
            some = (query[level.below], key[level.above], value[level.above])
            piece, ahead = _varlen_forward(
                some, level.cumulative, level.longest, scale, causal=False
            )
            before = lse[:, level.below]
            share = torch.sigmoid(ahead - before).transpose(0, 1)[..., None].to(out.dtype)
            out[level.below] = torch.lerp(out[level.below], piece, share)
            lse[:, level.below] = torch.logaddexp(before, ahead)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.scale, ctx.window = plan, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *heads, out, lse = ctx.saved_tensors
        plan, scale, grad = ctx.plan, ctx.scale, grads[0].contiguous()
        own, longest = (plan.starts, plan.starts), (plan.longest, plan.longest)
        totals = _varlen_backward(
            grad, heads, out, lse, own, longest, scale, causal=True, window=ctx.window
        )
        query, key, value = heads
        for level in plan.levels:
            below, above = level.below, level.above
            pieces = _varlen_backward(
                grad[below],
                (query[below], key[above], value[above]),
                out[below],
                lse[:, below].contiguous(),
                level.cumulative,
                level.longest,
                scale,
                causal=False,
            )
            for total, piece, at in zip(totals, pieces, (below, above, above), strict=True):
                total[at] += piece
        return (*totals, None, None, None)


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
    if torch.compiler.is_compiling() and query.device.type in _APART:
        return _attend_apart(heads, trie, dropout, scaling, sliding_window, softcap), None
    return _attend_packed(heads, trie, dropout, scaling, sliding_window, softcap), None


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
    on_cpu = plain and query.device.type == "cpu" and has_trie_attention(query.device, query.dtype)
    if on_cpu or any(segment.subtree_end > segment.end for segment in trie.segments):
        return trie_attention(*heads, trie, scale=scaling)
    if dropout == 0.0 and softcap is None and has_flash_attention(*heads):
        window = None if within else sliding_window
        return _flash_attention(*heads, trie.varlen_plan, scaling, window)
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

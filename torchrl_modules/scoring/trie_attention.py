"""Packed sequences as a trie: what they begin with in common is there once, attention included.

The tokens of the trie lie in depth-first order, so the descendants of a segment follow it, and a
token at ``q`` sees one at ``k`` if and only if ``k <= q < subtree_end[k]``.

:func:`trie_attention` is made of pieces of plain attention: each segment with itself, and each
segment that has descendants with all of them, joined by their log-sum-exps. No mask is built and
nothing is computed twice. On a CPU no keys are copied either; on a GPU the pieces of one depth
are one call of flash attention for rows of many lengths. What that kernel does not take (float32,
large heads) is flex attention with the trie as the mask. Where ranks share out the tokens, a
segment that begins elsewhere has one more piece, with what lies before in it.

Shape legend: N packed tokens, B sequences, M tokens of the trie, m those of them that this rank
reads (M without others), H heads, G key-value heads, D head size of queries and keys, E of values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from torchrl_data.devices import on_device
from torchrl_modules.compilation import Compiled

from .context_share import ContextShare
from .flash_kernel import is_taken, passes_trial, varlen_forward, window_options

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
    """int64 ``[m]``."""
    positions: Tensor
    """int64 ``[m]``, of each token in its sequence."""
    node: Tensor
    """int64 ``[N]``, on the host: where each packed token is in the trie; -1 where nobody needs
    it."""
    segments: tuple[Segment, ...]
    """In depth-first order; they cover ``[0, M)``."""
    context: ContextShare | None = None
    """Which of the tokens this rank reads, where ranks share them out."""

    @cached_property
    def pieces(self) -> "Pieces":
        """Its attention in pieces of plain attention."""
        return pieces_of(self.segments, self.context)

    @cached_property
    def subtree_end(self) -> Tensor:
        """int64 ``[M]``: the token is seen by those from itself up to here, and no others."""
        ends = torch.tensor([s.subtree_end for s in self.segments])
        sizes = torch.tensor([s.end - s.start for s in self.segments])
        return on_device(ends.repeat_interleave(sizes), self.ids.device)

    @cached_property
    def varlen_plan(self) -> "VarlenPlan":
        """The pieces of its attention as calls of a kernel for rows of many lengths."""
        return _varlen_plan(self.pieces, self.ids.device)

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


def share_out(trie: PrefixTrie, context: ContextShare) -> PrefixTrie:
    """A trie of which this rank reads some tokens, others the rest; as many of them each."""
    # Tokens that belong to no sequence fill the last chunk; they are a segment of their own.
    size, end = len(trie.ids), context.num_tokens
    positions = torch.arange(end - size, device=trie.ids.device)
    return replace(
        trie,
        ids=context.own(torch.cat([trie.ids, torch.zeros_like(positions)])),
        positions=context.own(torch.cat([trie.positions, positions])),
        segments=(*trie.segments, *([Segment(size, end, end)] if size < end else [])),
        context=context,
    )


class Piece(NamedTuple):
    """Queries that see all of some keys which lie before them."""

    queries: tuple[int, int]
    """From where to where among the m tokens that are read here."""
    keys: tuple[int, int]
    """From where to where among the M tokens."""
    level: int
    """Pieces of one level have no queries and no keys in common."""


class Pieces(NamedTuple):
    """Attention over a trie: what is read here of each segment with itself, and pieces before."""

    own: tuple[Segment, ...]
    """In order; they cover ``[0, m)``, and have no descendants."""
    across: tuple[Piece, ...]


def pieces_of(segments: Sequence[Segment], context: ContextShare | None = None) -> Pieces:
    """The pieces of attention over a trie, of the tokens that this rank reads."""
    size = segments[-1].end if segments else 0
    ranges = ((0, size),) if context is None else context.ranges

    def local(token: int) -> int:
        return token if context is None else context.count_before(token)

    own, across = [], []
    above: list[Segment] = []  # from the root to a segment
    for segment in segments:
        while above and segment.start >= above[-1].subtree_end:
            above.pop()
        for number, (low, high) in enumerate(ranges):
            first, end = max(segment.start, low), min(segment.end, high)
            if first < end:
                here = (local(first), local(end))
                own.append(Segment(*here, here[1]))
                if first > segment.start:  # the rest of it was read by others
                    across.append(Piece(here, (segment.start, first), -1 - number))
        below = (local(segment.end), local(segment.subtree_end))
        if below[0] < below[1]:
            across.append(Piece(below, (segment.start, segment.end), len(above)))
        above.append(segment)
    return Pieces(tuple(own), tuple(across))


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
    # query: [1, H, m, D]; key: [1, G, m, D]; G divides H; value: [1, G, m, E].
    # Gives [1, m, H, E], differentiable.
    if has_flash_attention(query, key, value):
        return flash_attention(query, key, value, trie.varlen_plan, scale, context=trie.context)
    if query.device.type != "cpu":
        if trie.context is not None:
            raise ValueError(
                "Ranks share out the tokens of rows by flash attention, which is not for heads of "
                f"{query.shape[-1]} in {query.dtype} on {query.device}. Compute in bfloat16 "
                "(autocast_dtype=torch.bfloat16), or leave context_group out."
            )
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
    out: Any = _PiecewiseAttention.apply(*heads, trie.pieces, trie.context, scale)
    return out[..., : value.shape[-1]]


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    slow = "it holds the whole matrix of scores in memory"
    return Compiled(flex_attention, "flex attention", slow=slow)


class Level(NamedTuple):
    """The pieces of a level: of segments of one depth the queries are their descendants."""

    below: Tensor
    """int64: the queries, among the m tokens."""
    above: Tensor
    """int64: the keys, among the M tokens."""
    cumulative: tuple[Tensor, Tensor]
    """int32: where the queries of each piece begin among the former, its keys among the latter."""
    longest: tuple[int, int]


class VarlenPlan(NamedTuple):
    """Attention over a trie, a call for all segments and one for each level."""

    starts: Tensor
    """int32: where each segment begins, and behind the last, as far as it is read here."""
    longest: int
    """Tokens of the longest one."""
    levels: tuple[Level, ...]


def _varlen_plan(pieces: Pieces, device: torch.device) -> VarlenPlan:
    def cumulative(sizes: Sequence[int]) -> Tensor:
        return on_device([0, *accumulate(sizes)], device, torch.int32)

    def joined(ranges: Sequence[tuple[int, int]]) -> Tensor:
        return on_device(torch.cat([torch.arange(*each) for each in ranges]), device)

    by_level: dict[int, list[Piece]] = {}
    for piece in pieces.across:
        by_level.setdefault(piece.level, []).append(piece)
    levels = []
    for some in by_level.values():
        queries, keys = [one.queries for one in some], [one.keys for one in some]
        sizes = [[end - start for start, end in each] for each in (queries, keys)]
        levels.append(
            Level(
                joined(queries),
                joined(keys),
                (cumulative(sizes[0]), cumulative(sizes[1])),
                (max(_FEWEST, *sizes[0]), max(sizes[1])),
            )
        )
    lengths = [one.end - one.start for one in pieces.own]
    longest = max(_FEWEST, *lengths) if lengths else _FEWEST
    return VarlenPlan(cumulative(lengths), longest, tuple(levels))


_FEWEST: Final = 2
"""Queries of a row, at least as the kernel is told: one alone takes another way, without a
gradient."""


def has_flash_attention(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether flash attention for rows of many lengths takes these heads, and is right."""
    # Their shapes are [1, H, M, D] and [1, G, M, D].
    size = query.shape[-1]
    if (
        query.device.type != "cuda"
        or not is_taken(query)
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

    def results(kind: torch.dtype) -> list[Tensor]:
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            leaves = [on_device(x, device).to(kind).requires_grad_() for x in heads]
            if kind is dtype:
                plan = _varlen_plan(pieces_of(segments), device)
                out = flash_attention(leaves[0], leaves[1], leaves[2], plan, None)
            else:
                q = leaves[0]
                k, v = (x.repeat_interleave(groups, 1) for x in leaves[1:])
                scores = (q @ k.transpose(-2, -1)) * size**-0.5
                weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
                out = (weights @ v).transpose(1, 2)
            slopes = torch.autograd.grad((out * slope.to(out.dtype)).sum(), leaves)
            return [out.detach(), *slopes]

    tried = (device, dtype, groups, size)
    return passes_trial(results, tried, "for rows of many lengths", "Flex attention")


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: VarlenPlan,
    scale: float | None,
    window: int | None = None,
    context: ContextShare | None = None,
) -> Tensor:
    """Attention over a trie, ``[1, m, H, D]``; with a window no segment may have descendants."""
    # query: [1, H, m, D]; key and value: [1, G, m, D].
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    heads = [x[0].transpose(0, 1) for x in (query, key, value)]
    out: Any = _FlashAttention.apply(*heads, plan, scale, window, context)
    return out[None]


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
        **window_options(window),
    )


class _FlashAttention(Function):
    """The pieces, forward and backward, on a GPU."""

    # As below: with the output and the log-sum-exp of the whole row of scores, the backward pass of
    # a piece gives exactly its part of the gradients. Keys and values of other ranks are not kept
    # for it but gathered again.

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: VarlenPlan,
        scale: float,
        window: int | None,
        context: ContextShare | None,
    ) -> Tensor:
        own, longest = (plan.starts, plan.starts), (plan.longest, plan.longest)
        heads = (query, key, value)
        out, lse = varlen_forward(heads, own, longest, scale, causal=True, window=window)
        keys, values = (key, value) if context is None else context.gather_heads(key, value)
        for level in plan.levels:
            some = (query[level.below], keys[level.above], values[level.above])
            piece, ahead = varlen_forward(
                some, level.cumulative, level.longest, scale, causal=False
            )
            before = lse[:, level.below]
            share = torch.sigmoid(ahead - before).transpose(0, 1)[..., None].to(out.dtype)
            out[level.below] = torch.lerp(out[level.below], piece, share)
            lse[:, level.below] = torch.logaddexp(before, ahead)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.scale, ctx.window, ctx.context = plan, scale, window, context
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        plan, scale, context, grad = ctx.plan, ctx.scale, ctx.context, grads[0].contiguous()
        own, longest = (plan.starts, plan.starts), (plan.longest, plan.longest)
        heads = (query, key, value)
        totals = _varlen_backward(
            grad, heads, out, lse, own, longest, scale, causal=True, window=ctx.window
        )
        keys, values = (key, value) if context is None else context.gather_heads(key, value)
        sums = totals[1:] if context is None else [torch.zeros_like(x) for x in (keys, values)]
        for level in plan.levels:
            below, above = level.below, level.above
            pieces = _varlen_backward(
                grad[below],
                (query[below], keys[above], values[above]),
                out[below],
                lse[:, below].contiguous(),
                level.cumulative,
                level.longest,
                scale,
                causal=False,
            )
            for total, piece, at in zip(
                (totals[0], *sums), pieces, (below, above, above), strict=True
            ):
                total[at] += piece
        if context is not None:
            for total, more in zip(totals[1:], context.sum_heads(*sums), strict=True):
                total += more
        return (*totals, None, None, None, None)


def runs_of(segments: Sequence[Segment]) -> Iterator[tuple[slice, int]]:
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
        pieces: Pieces,
        context: ContextShare | None,
        scale: float,
    ) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = torch.empty(q.shape, dtype=q.dtype)
        lse = torch.empty(q.shape[:2], dtype=torch.float64 if q.dtype.itemsize == 8 else None)
        for run in runs_of(pieces.own):
            piece = attend(*(_batch(x, *run) for x in (q, k, v)), 0.0, True, scale=scale)
            _batch(out, *run).copy_(piece[0])
            _batch(lse, *run).copy_(piece[1])
        keys, values = (k, v) if context is None else context.gather_heads(k, v)
        for queries, seen, _ in pieces.across:
            below, above = slice(*queries), slice(*seen)
            piece = attend(_one(q, below), _one(keys, above), _one(values, above), scale=scale)
            ahead = piece[1][0].transpose(0, 1)
            share = torch.sigmoid(ahead - lse[below]).to(out.dtype)[..., None]
            out[below] = torch.lerp(out[below], piece[0][0].transpose(0, 1), share)
            lse[below] = torch.logaddexp(lse[below], ahead)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.pieces, ctx.context, ctx.scale = pieces, context, scale
        return out[None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        *inputs, out, lse = ctx.saved_tensors
        context: ContextShare | None = ctx.context
        q, k, v = (x[0].transpose(0, 1) for x in inputs)
        totals = [torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v)]
        grad = grads[0][0]
        for run in runs_of(ctx.pieces.own):
            some = (_batch(x, *run) for x in (grad, q, k, v, out, lse))
            pieces = differentiate(*some, 0.0, True, scale=ctx.scale)
            for total, piece in zip(totals, pieces, strict=True):
                _batch(total, *run).copy_(piece)
        keys, values = (k, v) if context is None else context.gather_heads(k, v)
        sums = totals[1:] if context is None else [torch.zeros_like(x) for x in (keys, values)]
        saved = (grad, q, keys, values, out, lse)
        for queries, seen, _ in ctx.pieces.across:
            below, above = slice(*queries), slice(*seen)
            whose = (below, below, above, above, below, below)
            pieces = differentiate(*map(_one, saved, whose), 0.0, False, scale=ctx.scale)
            each = zip((totals[0], *sums), pieces, (below, above, above), strict=True)
            for total, piece, tokens in each:
                total[tokens] += piece[0].transpose(0, 1)
        if context is not None:
            for total, more in zip(totals[1:], context.sum_heads(*sums), strict=True):
                total += more
        return (*(x.transpose(0, 1)[None] for x in totals), None, None, None)

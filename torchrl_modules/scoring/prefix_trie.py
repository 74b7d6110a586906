"""Packed sequences as a trie: what they begin with in common is there once, attention included.

The tokens of the trie lie in depth-first order, so the descendants of a segment follow it, and a
token at ``q`` sees one at ``k`` if and only if ``k <= q < subtree_end[k]``.

On a CPU :func:`trie_attention` is made of pieces of plain attention: each segment with itself, and
each segment that has descendants with all of them, joined by their log-sum-exps. No mask is built,
nothing is computed twice, and no keys are copied. On a GPU it is flex attention with the trie as
the mask.

Shape legend: N packed tokens, B sequences, M tokens of the trie, H heads, G key-value heads, D head
size of queries and keys, E of values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

_WORTH: Final = 32
"""A shared token saves a pass through the model; a token behind it pays about 1/32 of one, for a
second piece of attention."""


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
    """int64 ``[N]``: where each packed token is in the trie; -1 where nobody needs it."""
    segments: tuple[Segment, ...]
    """In depth-first order; they cover ``[0, M)``."""

    @property
    def is_shared(self) -> bool:
        """Whether any segment has descendants."""
        return any(segment.subtree_end > segment.end for segment in self.segments)

    @cached_property
    def subtree_end(self) -> Tensor:
        """int64 ``[M]``: the token is seen by those from itself up to here, and no others."""
        ends = torch.tensor([s.subtree_end for s in self.segments], device=self.ids.device)
        sizes = torch.tensor([s.end - s.start for s in self.segments], device=self.ids.device)
        return ends.repeat_interleave(sizes)

    @cached_property
    def block_mask(self) -> Any:
        """The mask of the trie for flex attention; all layers share it."""
        from torch.nn.attention.flex_attention import create_block_mask

        ends, size = self.subtree_end, len(self.ids)

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
            return (k <= q) & (q < ends[k])

        return create_block_mask(sees, None, None, size, size, device=str(self.ids.device))


def build_trie(ids: Tensor, lengths: Tensor, ends: Tensor, *, share: bool) -> PrefixTrie:
    """Lay packed sequences out as a trie."""
    # ids: int64 [N].
    # lengths: int64 [B], summing to N.
    # ends: int64 [B]: only this many tokens of each sequence are needed; at most its length.
    # share: put what sequences begin with in common there once, where it saves more than it costs;
    # `False` keeps every sequence for itself.
    # Gives the trie, on the device of `ids`. Segments beside each other without descendants are
    # sorted by length.
    values = ids.cpu().numpy()
    sizes, needed = lengths.tolist(), ends.tolist()
    starts = np.concatenate([[0], np.cumsum(sizes)])[:-1].tolist()
    rows = [
        _Row(start, values[start : start + end])
        for start, end in zip(starts, needed, strict=True)
        if end
    ]
    nodes = _shared_nodes(rows) if share else _own_nodes(rows)
    node_of = np.full(len(values), -1)
    tokens, positions, segments = [], [], []
    start = 0
    for node in nodes:
        end = start + node.last - node.first
        for row in node.rows:
            node_of[row.start + node.first : row.start + node.last] = np.arange(start, end)
        tokens.append(node.rows[0].ids[node.first : node.last])
        positions.append(np.arange(node.first, node.last))
        segments.append((start, end))
        start = end
    ends_of = _subtree_ends(nodes, segments)
    device = ids.device
    return PrefixTrie(
        ids=_join(tokens, device),
        positions=_join(positions, device),
        node=torch.from_numpy(node_of).to(device),
        segments=tuple(Segment(s[0], s[1], end) for s, end in zip(segments, ends_of, strict=True)),
    )


def _join(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    joined = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return torch.from_numpy(joined).to(device)


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


def _subtree_ends(nodes: Sequence[_Node], segments: Sequence[tuple[int, int]]) -> list[int]:
    ends = [end for _, end in segments]
    for i, node in enumerate(nodes):
        if i + 1 < len(nodes) and nodes[i + 1].depth > node.depth:
            behind = (j for j in range(i + 1, len(nodes)) if nodes[j].depth <= node.depth)
            ends[i] = segments[next(behind, len(nodes)) - 1][1]
    return ends


def _own_nodes(rows: Sequence[_Row]) -> list[_Node]:
    by_length = sorted(rows, key=lambda row: len(row.ids))
    return [_Node([row], 0, len(row.ids), 0) for row in by_length]


def _shared_nodes(rows: Sequence[_Row]) -> list[_Node]:
    """Nodes in depth-first order."""
    # As bytes, most significant first, token ids sort as numbers do.
    ordered = sorted(rows, key=lambda row: row.ids.astype(">i8").tobytes())
    common = [_common_length(a.ids, b.ids) for a, b in pairwise(ordered)]
    nodes: list[_Node] = []
    # Ranges of rows that agree up to `first`, of which the node before holds all.
    waiting = [_Range(0, len(ordered), 0, 0)] if ordered else []
    while waiting:
        here = waiting.pop()
        last = min(common[here.low : here.high - 1], default=len(ordered[here.low].ids))
        parts = list(_split(here, common, last))
        some = ordered[here.low : here.high]
        if last == here.first or not _is_worth_it(some, here.first, last, len(parts)):
            below = [_Range(low, high, here.first, here.depth) for low, high in parts]
        else:
            nodes.append(_Node(some, here.first, last, here.depth))
            below = [
                _Range(low, high, last, here.depth + 1)
                for low, high in parts
                if len(ordered[high - 1].ids) > last
            ]
        # Single rows last and by length, so that those of one length are beside each other.
        below.sort(key=lambda r: (r.high - r.low == 1, len(ordered[r.low].ids)), reverse=True)
        waiting += below
    return nodes


class _Range(NamedTuple):
    low: int
    high: int
    first: int
    depth: int


def _split(here: _Range, common: Sequence[int], last: int) -> Iterator[tuple[int, int]]:
    """Runs of rows that agree in more than their first ``last`` tokens."""
    low = here.low
    for i in range(here.low, here.high - 1):
        if common[i] == last:
            yield low, i + 1
            low = i + 1
    yield low, here.high


def _is_worth_it(rows: Sequence[_Row], first: int, last: int, num_parts: int) -> bool:
    if num_parts == 1 or all(len(row.ids) == last for row in rows):
        return True
    behind = sum(len(row.ids) - last for row in rows)
    return _WORTH * (last - first) * (num_parts - 1) >= behind


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    differ = (a[:size] != b[:size]).nonzero()[0]
    return int(differ[0]) if len(differ) else size


def has_trie_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this PyTorch has what :func:`trie_attention` is made of."""
    if device.type == "cpu":
        return hasattr(
            torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward"
        ) and dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def trie_attention(
    query: Tensor, key: Tensor, value: Tensor, trie: PrefixTrie, *, scale: float | None = None
) -> Tensor:
    """Attention of every token over its ancestors in the trie and itself."""
    # query: [1, H, M, D]; key: [1, G, M, D]; G divides H; value: [1, G, M, E].
    # Gives [1, M, H, E], differentiable.
    if query.device.type == "cpu":
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        width = value.shape[-1]
        # The kernel wants one size; zeros add nothing to a score, nor to what is kept of a value.
        heads = _of_one_size(query, key, value)
        out: Any = _PiecewiseAttention.apply(*heads, trie.segments, scale)
        return out[..., :width]
    return _flex_attention(query, key, value, trie, scale)


def _of_one_size(*heads: Tensor) -> list[Tensor]:
    size = max(x.shape[-1] for x in heads)
    return [x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1])) for x in heads]


class _Run(NamedTuple):
    """Neighbouring segments of one length: one batch of plain causal attention."""

    tokens: slice
    size: int
    length: int


def _runs(segments: Sequence[Segment]) -> Iterator[_Run]:
    for length, group in groupby(segments, lambda segment: segment.end - segment.start):
        members = list(group)
        yield _Run(slice(members[0].start, members[-1].end), len(members), length)


def _batch(x: Tensor, run: _Run) -> Tensor:
    """``[M, H, D]`` to ``[count, H, length, D]``, without a copy."""
    return x[run.tokens].unflatten(0, (run.size, run.length)).transpose(1, 2)


def _one(x: Tensor, tokens: slice) -> Tensor:
    """``[M, H, D]`` to ``[1, H, tokens, D]``, without a copy."""
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
            piece = attend(_batch(q, run), _batch(k, run), _batch(v, run), 0.0, True, scale=scale)
            _batch(out, run).copy_(piece[0])
            own = lse[run.tokens].unflatten(0, (run.size, run.length))
            own.copy_(piece[1].transpose(1, 2))
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
        grad = grads[0][0]
        grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
        for run in _runs(ctx.segments):
            own = lse[run.tokens].unflatten(0, (run.size, run.length)).transpose(1, 2)
            pieces = differentiate(
                *(_batch(x, run) for x in (grad, q, k, v, out)), own, 0.0, True, scale=ctx.scale
            )
            for total, piece in zip((grad_q, grad_k, grad_v), pieces, strict=True):
                _batch(total, run).copy_(piece)
        for start, end, subtree_end in ctx.segments:
            if subtree_end > end:
                below, above = slice(end, subtree_end), slice(start, end)
                pieces = differentiate(
                    _one(grad, below),
                    _one(q, below),
                    _one(k, above),
                    _one(v, above),
                    _one(out, below),
                    lse[below].transpose(0, 1)[None],
                    0.0,
                    False,
                    scale=ctx.scale,
                )
                for total, piece, tokens in zip(
                    (grad_q, grad_k, grad_v), pieces, (below, above, above), strict=True
                ):
                    total[tokens] += piece[0].transpose(0, 1)
        grads_back = (x.transpose(0, 1)[None] for x in (grad_q, grad_k, grad_v))
        return (*grads_back, None, None)


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _flex_attention(
    query: Tensor, key: Tensor, value: Tensor, trie: PrefixTrie, scale: float | None
) -> Tensor:
    out = _compiled_flex()(
        query,
        key,
        value,
        block_mask=trie.block_mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)

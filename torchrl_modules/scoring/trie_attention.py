"""Causal attention over a trie of tokens, where each token sees its ancestors and itself.

On a CPU it is made of pieces of plain attention: each segment with itself, and each segment that
has descendants with all of them, joined by their log-sum-exps. No mask is built, nothing is
computed twice, and no keys are copied. On a GPU it is flex attention with the trie as the mask.

Shape legend: M tokens of the trie, H heads, G key-value heads, D head size of
queries and keys, E of values.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from .prefix_trie import PrefixTrie, Segment


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

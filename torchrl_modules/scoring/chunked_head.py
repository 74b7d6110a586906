"""Log-probabilities of chosen tokens without ever holding ``[tokens, vocabulary]`` logits.

Shape legend: K target tokens, D hidden size, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

_CPU_TILE: Final = (256, 1024)
"""Tokens and vocabulary of a tile: 1 MB of float32 logits stays in the cache of a core."""
_GPU_TILE: Final = (4096, 8192)


class HeadScores(NamedTuple):
    """What :func:`chunked_log_prob` gives, in nats, ``[K]`` each."""

    log_prob: Tensor
    entropy: Tensor | None
    """Only when asked for."""


def chunked_log_prob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> HeadScores:
    """Log-probability of each target under ``softmax(hidden @ weight.T / temperature)``.

    The logits are computed tile by tile, some tokens and part of the vocabulary at a time, and
    again in the backward pass, so the memory is that of one tile instead of K x V.

    Args:
        hidden: ``[K, D]``.
        weight: ``[V, D]``.
        targets: int64 ``[K]``.
        bias: ``[V]`` or ``None``.
        temperature: positive.
        entropy: also give the entropy of each distribution.
        compute_dtype: of the products, such as float32 for weights of bfloat16, which are then
            converted tile by tile; ``None`` for that of ``hidden``, or of ``torch.autocast``.

    Returns:
        Log-probabilities and entropies, float32 (float64 for such inputs), differentiable.

    Raises:
        ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"chunked_log_prob: temperature must be positive, got {temperature!r}.")
    kind = hidden.device.type
    if compute_dtype is None and torch.is_autocast_enabled(kind):
        compute_dtype = torch.get_autocast_dtype(kind)
    hidden = hidden.to(compute_dtype or hidden.dtype)
    # The tiles convert the weights themselves: forward and backward alike.
    with torch.autocast(kind, enabled=False):
        log_prob, entropies = _ChunkedLogProb.apply(  # type: ignore[misc]
            hidden, weight, bias, targets, temperature, entropy
        )
    return HeadScores(log_prob, entropies if entropy else None)


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, start + step) for start in range(0, size, step))


def _tile_shape(device: torch.device) -> tuple[int, int]:
    return _CPU_TILE if device.type == "cpu" else _GPU_TILE


def _full_precision(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """One tile: the product in the type of the hidden states, what follows in full precision."""
    bias = None if bias is None else bias.to(hidden.dtype)
    logits = torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias)
    logits = logits.to(_full_precision(hidden.dtype))
    return logits if scale == 1.0 else logits.mul_(scale)


class _ChunkedLogProb(Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        num_rows, num_columns = _tile_shape(hidden.device)
        dtype = _full_precision(hidden.dtype)
        lse = torch.full((len(hidden),), -torch.inf, dtype=dtype, device=hidden.device)
        mean, log_prob = torch.zeros_like(lse), torch.zeros_like(lse)
        for rows in _slices(len(hidden), num_rows):
            for columns in _slices(len(weight), num_columns):
                part = None if bias is None else bias[columns]
                tile = _logits(hidden[rows], weight[columns], part, 1 / temperature)
                at = targets[rows, None] - columns.start
                inside = (at >= 0) & (at < tile.shape[1])
                log_prob[rows] += tile.gather(1, at.where(inside, 0)).where(inside, 0.0).squeeze(1)
                top = tile.amax(1).clamp_(min=torch.finfo(dtype).min)
                logits = tile.clone() if with_entropy else None
                tile.sub_(top[:, None]).exp_()
                total = tile.sum(1)
                both = torch.logaddexp(lse[rows], total.log() + top)
                if logits is not None:
                    # The mean logit so far, weighted by what each part of the vocabulary holds;
                    # a part in which every token is forbidden holds nothing (0 x inf).
                    tile.mul_(logits.masked_fill_(tile == 0, 0.0))
                    mean[rows] *= (lse[rows] - both).exp_().nan_to_num_()
                    mean[rows] += (tile.sum(1) * (top - both).exp_()).nan_to_num_()
                lse[rows] = both
        log_prob -= lse
        entropy = lse - mean if with_entropy else mean
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)  # type: ignore[arg-type]
        ctx.temperature = temperature  # type: ignore[attr-defined]
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grads[0].device.type, enabled=False):
            return _gradients(ctx, *grads)


def _gradients(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
    grad_hidden = torch.zeros_like(hidden)
    grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
    grad_bias = torch.zeros_like(bias) if bias is not None else None
    has_grad = grad_log_prob != 0
    use_entropy = bool((grad_entropy != 0).any())
    if use_entropy:
        has_grad |= grad_entropy != 0
    # A token without gradient (a clipped one, say) costs nothing.
    live = has_grad.nonzero().squeeze(1)
    if len(live) == 0:
        return grad_hidden, grad_weight, grad_bias, None, None, None
    some = _Live(
        hidden[live],
        lse[live],
        grad_log_prob[live] / ctx.temperature,
        grad_entropy[live] / ctx.temperature if use_entropy else None,
        entropy[live],
    )
    found = _softmax_part(some, weight, bias, ctx.temperature, grad_weight, grad_bias)
    at = targets[live]
    g = some.grad_log_prob.to(hidden.dtype)
    own = weight[at].to(found.dtype)
    grad_hidden[live] = found.addcmul_(own, g[:, None].to(found.dtype)).to(hidden.dtype)
    if grad_weight is not None:
        grad_weight.index_add_(0, at, (some.hidden * g[:, None]).to(grad_weight.dtype))
    if grad_bias is not None:
        grad_bias.index_add_(0, at, g.to(grad_bias.dtype))
    return grad_hidden, grad_weight, grad_bias, None, None, None


class _Live(NamedTuple):
    """The tokens that have a gradient."""

    hidden: Tensor
    lse: Tensor
    grad_log_prob: Tensor
    grad_entropy: Tensor | None
    entropy: Tensor


def _softmax_part(
    some: _Live,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> Tensor:
    """The gradient but for what comes from the target's own logit; ``[K, D]`` of the hidden states.

    What belongs to the head is added to ``grad_weight`` and ``grad_bias``.
    """
    num_rows, num_columns = _tile_shape(weight.device)
    dtype = _full_precision(some.hidden.dtype)
    grad_hidden = torch.zeros_like(some.hidden, dtype=dtype)
    for columns in _slices(len(weight), num_columns):
        part = None if bias is None else bias[columns]
        total = torch.zeros_like(weight[columns], dtype=dtype) if grad_weight is not None else None
        for rows in _slices(len(some.hidden), num_rows):
            tile = _logits(some.hidden[rows], weight[columns], part, 1 / temperature)
            tile.sub_(some.lse[rows, None])
            if some.grad_entropy is None:
                grad = tile.exp_().mul_(-some.grad_log_prob[rows, None])
            else:
                p = tile.exp()
                # A forbidden token has log p = -inf and takes no part.
                tile.masked_fill_(p == 0, 0.0).add_(some.entropy[rows, None])
                tile.mul_(some.grad_entropy[rows, None]).add_(some.grad_log_prob[rows, None])
                grad = p.mul_(tile).neg_()
            if grad_bias is not None:
                grad_bias[columns] += grad.sum(0).to(grad_bias.dtype)
            grad = grad.to(some.hidden.dtype)
            _add_product(grad_hidden[rows], grad, weight[columns].to(grad.dtype))
            if total is not None:
                _add_product(total, grad.T, some.hidden[rows])
        if grad_weight is not None and total is not None:
            grad_weight[columns] = total
    return grad_hidden


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, where the total may be of a higher precision."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b

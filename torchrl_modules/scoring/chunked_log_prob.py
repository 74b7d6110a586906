"""Log-probabilities of chosen tokens without ever holding ``[tokens, vocabulary]`` logits.

Shape legend: K target tokens, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from torchrl_data.checks import POSITIVE, check_numbers
from torchrl_modules.compilation import Compiled

from .split_head import head_part, sum_gradient

_CPU_TILE: Final = (256, 1024)
"""Tokens and vocabulary of a tile: 1 MB of float32 logits stays in the cache of a core."""
_GPU_TILE: Final = (8192, 16384)
"""Of bfloat16 256 MB: a tile's product takes longer than its few kernels take to be launched."""


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
        weight: ``[V, D]``; of a ``DTensor`` in equal parts of rows each rank computes its part of
            the logits, and all have the same ``hidden`` and ``targets``.
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
    check_numbers("chunked_log_prob", POSITIVE, temperature=temperature)
    kind = hidden.device.type
    if compute_dtype is None and torch.is_autocast_enabled(kind):
        compute_dtype = torch.get_autocast_dtype(kind)
    hidden = hidden.to(compute_dtype or hidden.dtype)
    part, at = head_part(weight, bias), targets
    if part is not None:  # of the vocabulary, and so of the gradient of the hidden states
        hidden, at = sum_gradient(hidden, part.group), targets - part.first
        weight, bias = part.weight, part.bias
    # The tiles convert the weights themselves: forward and backward alike.
    with torch.autocast(kind, enabled=False):
        log_prob, entropies, lse = _ChunkedLogProb.apply(  # type: ignore[misc]
            hidden, weight, bias, at, temperature, entropy
        )
    if part is not None:
        log_prob, entropies = part.join(targets, log_prob, entropies, lse)
    return HeadScores(log_prob, entropies if entropy else None)


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, start + step) for start in range(0, size, step))


def _tiling(hidden: Tensor) -> tuple[int, int, torch.dtype]:
    """Tokens and vocabulary of a tile, and the type of its sums: float32 at least."""
    num_rows, num_columns = _CPU_TILE if hidden.device.type == "cpu" else _GPU_TILE
    return num_rows, num_columns, torch.promote_types(hidden.dtype, torch.float32)


def _sums_of_tile(
    product: Tensor, at: Tensor, scale: float, with_entropy: bool
) -> tuple[Tensor, ...]:
    """Logits at ``at`` or 0, the largest, sums of ``exp(logit - largest)`` and of it x logit."""
    tile = _logits(product, scale)
    inside = (at >= 0) & (at < tile.shape[1])
    own = tile.gather(1, at.where(inside, 0)).where(inside, 0.0).squeeze(1)
    top = tile.amax(1).clamp_(min=torch.finfo(tile.dtype).min)
    logits = tile.clone() if with_entropy else None
    total = tile.sub_(top[:, None]).exp_().sum(1)
    if logits is None:
        return own, top, total, total
    # A part in which every token is forbidden holds nothing (0 x inf).
    return own, top, total, tile.mul_(logits.masked_fill_(tile == 0, 0.0)).sum(1)


def _gradient_of_tile(
    product: Tensor,
    lse: Tensor,
    g: Tensor,
    entropy: Tensor,
    g_entropy: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """Of the logits, without what the target's own logit adds; computed in full precision."""
    tile = _logits(product, scale).sub_(lse[:, None])
    if g_entropy is None:
        return tile.exp_().mul_(-g[:, None]).to(dtype)
    p = tile.exp()
    # A forbidden token has log p = -inf and takes no part.
    tile.masked_fill_(p == 0, 0.0).add_(entropy[:, None])
    tile.mul_(g_entropy[:, None]).add_(g[:, None])
    return p.mul_(tile).neg_().to(dtype)


def _logits(product: Tensor, scale: float) -> Tensor:
    logits = product.to(torch.promote_types(product.dtype, torch.float32))
    return logits if scale == 1.0 else logits.mul_(scale)


_FUSED: Final = {"cuda"}
"""Devices on which what follows a product reads its tile once, in a kernel that is compiled: about
eight passes over float32 become one over the type of the product."""


@cache
def _kernel(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    if kind not in _FUSED:
        return function
    name = f"the head's {function.__name__.strip('_').replace('_', ' ')}"
    slow = "each tile of logits is read about eight times"
    return Compiled(function, name, slow=slow, dynamic=True)


class _ChunkedLogProb(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows, num_columns, dtype = _tiling(hidden)
        sums = _kernel(_sums_of_tile, hidden.device.type)
        lse = torch.full((len(hidden),), -torch.inf, dtype=dtype, device=hidden.device)
        mean, log_prob = torch.zeros_like(lse), torch.zeros_like(lse)
        for rows in _slices(len(hidden), num_rows):
            for columns in _slices(len(weight), num_columns):
                part = None if bias is None else bias[columns].to(hidden.dtype)
                tile = linear(hidden[rows], weight[columns].to(hidden.dtype), part)
                at = targets[rows, None] - columns.start
                own, top, total, weighted = sums(tile, at, 1 / temperature, with_entropy)
                log_prob[rows] += own
                both = torch.logaddexp(lse[rows], total.log() + top)
                if with_entropy:
                    # The mean logit so far, weighted by what each part of the vocabulary holds.
                    mean[rows] *= (lse[rows] - both).exp_().nan_to_num_()
                    mean[rows] += (weighted * (top - both).exp_()).nan_to_num_()
                lse[rows] = both
        log_prob -= lse
        entropy = lse - mean if with_entropy else mean
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            return _gradients(ctx, *grads)


def _gradients(
    ctx: Any,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
    grad_hidden = torch.zeros_like(hidden)
    grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
    grad_bias = torch.zeros_like(bias) if bias is not None else None
    live = _live(grad_log_prob, grad_entropy, grad_lse)
    if len(live) == 0:
        return grad_hidden, grad_weight, grad_bias, None, None, None
    some, at, lse, entropy = hidden[live], targets[live], lse[live], entropy[live]
    of_own = torch.zeros_like(lse) if grad_log_prob is None else grad_log_prob[live]
    of_own = of_own / ctx.temperature
    g = of_own if grad_lse is None else of_own - grad_lse[live] / ctx.temperature
    g_entropy = None if grad_entropy is None else grad_entropy[live] / ctx.temperature
    gradient = _kernel(_gradient_of_tile, hidden.device.type)
    num_rows, num_columns, dtype = _tiling(hidden)
    # What comes from the target's own logit is added at the end.
    found = torch.zeros_like(some, dtype=dtype)
    for columns in _slices(len(weight), num_columns):
        part = None if bias is None else bias[columns].to(some.dtype)
        total = None if grad_weight is None else torch.zeros_like(weight[columns], dtype=dtype)
        for rows in _slices(len(some), num_rows):
            tile = linear(some[rows], weight[columns].to(some.dtype), part)
            of_entropy = None if g_entropy is None else g_entropy[rows]
            grad = gradient(
                *(tile, lse[rows], g[rows], entropy[rows], of_entropy, 1 / ctx.temperature),
                dtype if grad_bias is not None else hidden.dtype,
            )
            if grad_bias is not None:
                grad_bias[columns] += grad.sum(0).to(grad_bias.dtype)
                grad = grad.to(hidden.dtype)
            _add_product(found[rows], grad, weight[columns].to(grad.dtype))
            if total is not None:
                _add_product(total, grad.T, some[rows])
        if grad_weight is not None and total is not None:
            grad_weight[columns] = total
    # A target in another rank's part of the vocabulary has no logit here, and no gradient of it.
    g, at = of_own.to(hidden.dtype), at.clamp(0, len(weight) - 1)
    own = weight[at].to(found.dtype)
    grad_hidden[live] = found.addcmul_(own, g[:, None].to(found.dtype)).to(hidden.dtype)
    if grad_weight is not None:
        grad_weight.index_add_(0, at, (some * g[:, None]).to(grad_weight.dtype))
    if grad_bias is not None:
        grad_bias.index_add_(0, at, g.to(grad_bias.dtype))
    return grad_hidden, grad_weight, grad_bias, None, None, None


def _live(*grads: Tensor | None) -> Tensor:
    """Tokens with a gradient, int64: one without (a clipped one, say) costs nothing."""
    # What no gradient comes from at all is None, so that nobody has to look for it.
    live = [grad != 0 for grad in grads if grad is not None]
    return torch.stack(live).any(0).nonzero().squeeze(1)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, where the total may be of a higher precision."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b

"""Log-probabilities of chosen tokens without ever holding ``[tokens, vocabulary]`` logits.

Shape legend: K target tokens, D hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

_TILE_BYTES = 32 << 20


def chunked_log_prob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under ``softmax(hidden @ weight.T / temperature)``.

    The logits are computed tile by tile, and again in the backward pass, so the memory is that of
    one tile of about 32 MB instead of K x V.

    Args:
        hidden: ``[K, D]``.
        weight: ``[V, D]``.
        targets: int64 ``[K]``.
        bias: ``[V]`` or ``None``.
        temperature: positive.

    Returns:
        Log-probabilities and entropies in nats, float32 ``[K]`` each, both differentiable.

    Raises:
        ValueError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"chunked_log_prob: temperature must be positive, got {temperature!r}.")
    return _ChunkedLogProb.apply(hidden, weight, bias, targets, temperature)  # type: ignore[return-value]


def _tile_rows(vocabulary: int) -> int:
    return max(1, _TILE_BYTES // (4 * vocabulary))


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return torch.log_softmax(logits / temperature if temperature != 1.0 else logits, -1)


class _ChunkedLogProb(Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        log_prob = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.empty_like(log_prob)
        rows = _tile_rows(len(weight))
        for start in range(0, len(hidden), rows):
            tile = slice(start, start + rows)
            log_p = _log_softmax(hidden[tile], weight, bias, temperature)
            log_prob[tile] = log_p.gather(1, targets[tile, None]).squeeze(1)
            entropy[tile] = torch.special.entr(log_p.exp()).sum(1)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)  # type: ignore[arg-type]
        ctx.temperature = temperature  # type: ignore[attr-defined]
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_prob, grad_entropy = grads
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        # A token without gradient (a clipped one, say) costs nothing.
        live = ((grad_log_prob != 0) | (grad_entropy != 0)).nonzero().squeeze(1)
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None else None
        use_entropy = bool((grad_entropy != 0).any())
        for index in live.split(_tile_rows(len(weight))):
            tile = hidden[index]
            log_p = _log_softmax(tile, weight, bias, ctx.temperature)
            p = log_p.exp()
            g = grad_log_prob[index, None]
            grad = p * -g
            grad.scatter_add_(1, targets[index, None], g)
            if use_entropy:
                shifted = torch.where(p > 0, log_p, 0.0) + entropy[index, None]
                grad -= p * shifted * grad_entropy[index, None]
            grad = (grad / ctx.temperature).to(tile.dtype)
            grad_hidden[index] = grad @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, tile)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None

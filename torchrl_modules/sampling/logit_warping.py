"""Temperature, min-p, top-k and top-p: the distribution that tokens are drawn from.

They are applied in this order, which is vLLM's, each to what the one before has left.

Shape legend: K positions, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .params import SamplingParameters

_TILE_BYTES = 32 << 20


def logits_warpers(params: SamplingParameters) -> list[LogitsProcessor]:
    """What turns a model's logits into those that are sampled from.

    Args:
        params: the distribution; temperature 0 stands for 1.

    Returns:
        Processors of Transformers; none for the model's own softmax.
    """
    warpers: list[LogitsProcessor] = []
    if params.temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers


def warped_log_softmax(
    logits: Tensor, params: SamplingParameters, targets: Tensor | None = None
) -> Tensor:
    """Log-probabilities of the distribution that is sampled from.

    Args:
        logits: of the model, ``[K, V]``, in full precision.
        params: the distribution.
        targets: int64 ``[K]``: tokens that are kept whatever their probability. They were drawn,
            so they were kept then; the weights may have moved since, and a log-prob of minus
            infinity would have no gradient to bring them back.

    Returns:
        ``[K, V]``, minus infinity where a token is left out; which ones is never differentiated.
    """
    temperature = params.temperature or 1.0
    tempered = logits / temperature if temperature != 1.0 else logits
    if not params.truncates:
        return torch.log_softmax(tempered, -1)
    with torch.no_grad():
        warped = logits
        for warper in logits_warpers(params):
            warped = warper(None, warped)  # type: ignore[arg-type]
        left_out = warped == -torch.inf
        if targets is not None:
            left_out.scatter_(1, targets[:, None], False)
    return torch.log_softmax(tempered.masked_fill(left_out, -torch.inf), -1)


def warped_log_prob(
    logits: Tensor, targets: Tensor, params: SamplingParameters
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target under the distribution that is sampled from, and its entropy.

    Args:
        logits: ``[K, V]``.
        targets: int64 ``[K]``.
        params: the distribution.

    Returns:
        ``[K]`` each, in nats, differentiable.
    """
    log_p = warped_log_softmax(logits, params, targets)
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    entropy = -(log_p.exp() * finite).sum(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


def truncated_head_log_prob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    params: SamplingParameters,
    *,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`warped_log_prob` of ``hidden @ weight.T``, a tile of about 32 MB of logits at a time.

    A truncation needs a position's whole vocabulary at once, sorted: slower than the plain head.

    Args:
        hidden: ``[K, D]``.
        weight: ``[V, D]``.
        targets: int64 ``[K]``.
        params: the distribution.
        bias: ``[V]`` or ``None``.

    Returns:
        Log-probs and entropies, ``[K]`` each.
    """
    num_rows = max(1, _TILE_BYTES // (4 * len(weight)))
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32

    def tile(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden, weight, bias).to(dtype)
        return warped_log_prob(logits, targets, params)

    parts: list[Any] = [
        checkpoint(tile, some, weight, at, use_reentrant=False)
        for some, at in zip(hidden.split(num_rows), targets.split(num_rows), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

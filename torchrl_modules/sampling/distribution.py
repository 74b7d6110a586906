"""The distribution that tokens are drawn from: penalties, temperature, min-p, top-k and top-p.

They are applied in this order, which is vLLM's, each to what the one before has left.

Shape legend: K positions, V vocabulary.
"""

from collections.abc import Callable
from contextlib import nullcontext
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

from torchrl_data.devices import on_device
from torchrl_data.sampling_masks import SamplingMasks

from .parameters import SamplingParameters
from .token_history import TargetHistory, TokenHistory, changed_logits, too_early

_TILE_BYTES = 32 << 20


def logits_warpers(params: SamplingParameters) -> list[LogitsProcessor]:
    """Processors of Transformers for the temperature (0 stands for 1), min-p, top-k and top-p."""
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
    logits: Tensor,
    params: SamplingParameters,
    targets: Tensor | None = None,
    history: TokenHistory | None = None,
    masks: SamplingMasks | None = None,
) -> Tensor:
    """Log-probabilities of the distribution that is sampled from."""
    # logits: of the model, [K, V], in full precision.
    # targets: int64 [K]: tokens that are kept whatever their probability. They were drawn, so they
    # were kept then; the weights may have moved since, and a log-prob of minus infinity would have
    # no gradient to bring them back.
    # masks: K recorded sets; a token with one is left what it says, the others what params say.
    # Gives [K, V], minus infinity where a token is left out; which ones is never differentiated.
    left_out = None
    if masks is not None and bool(masks.recorded.all()):
        if history is not None and params.changes_logits:
            logits = changed_logits(logits, params, history)
        left_out = ~masks.kept(logits.shape[1], logits.device)
        tempered = logits / (params.temperature or 1.0)
        return torch.log_softmax(tempered.masked_fill(left_out, -torch.inf), -1)
    if history is not None and params.changes_logits:
        logits = changed_logits(logits, params, history)
        left_out = too_early(logits, params, history)
    temperature = params.temperature or 1.0
    tempered = logits / temperature if temperature != 1.0 else logits
    if not params.truncates and left_out is None and masks is None:
        return torch.log_softmax(tempered, -1)
    with torch.no_grad():
        warped = logits if left_out is None else logits.masked_fill(left_out, -torch.inf)
        for warper in logits_warpers(params):
            warped = warper(None, warped)  # type: ignore[arg-type]
        left_out = warped == -torch.inf
        if targets is not None:
            left_out.scatter_(1, targets[:, None], False)
        if masks is not None:
            recorded = on_device(masks.recorded, logits.device)
            own = ~masks.kept(logits.shape[1], logits.device)
            left_out = torch.where(recorded[:, None], own, left_out)
    return torch.log_softmax(tempered.masked_fill(left_out, -torch.inf), -1)


def warped_log_prob(
    logits: Tensor,
    targets: Tensor,
    params: SamplingParameters,
    history: TokenHistory | None = None,
    masks: SamplingMasks | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target under :func:`warped_log_softmax`, and the entropy, ``[K]`` each."""
    log_p = warped_log_softmax(logits, params, targets, history, masks)
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    entropy = -(log_p.exp() * finite).sum(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


def warped_head_log_prob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    params: SamplingParameters,
    *,
    bias: Tensor | None = None,
    history: TargetHistory | None = None,
    masks: SamplingMasks | None = None,
    compute_dtype: torch.dtype | None = None,
    linear: Callable[..., Tensor] = torch.nn.functional.linear,
) -> tuple[Tensor, Tensor]:
    """:func:`warped_log_prob` of ``hidden @ weight.T``, a tile of about 32 MB of logits at a time.

    A truncation needs a position's whole vocabulary at once, sorted, and a penalty its history:
    slower than the plain head. Recorded sets need no order. Hidden states are ``[K, D]``, the
    weight ``[V, D]``; the products are computed in ``compute_dtype``, if one is given, and by
    ``linear``.
    """
    num_rows = max(1, _TILE_BYTES // (4 * len(weight)))
    if history is not None and params.penalises:
        num_rows = max(1, min(num_rows, _TILE_BYTES // (8 * max(1, history.longest))))
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32

    def tile(start: int, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if compute_dtype is not None:
            hidden, weight = hidden.to(compute_dtype), weight.to(compute_dtype)
        own_bias = bias if bias is None or compute_dtype is None else bias.to(compute_dtype)
        with torch.autocast(hidden.device.type, enabled=False) if compute_dtype else nullcontext():
            logits = linear(hidden, weight, own_bias).to(dtype)
        part = slice(start, start + len(hidden))
        some = history and history.part(part)
        tokens = some and some.read(len(weight), params, logits.device)
        own = masks and masks.take(part)
        return warped_log_prob(logits, targets, params, tokens, own)

    pairs = zip(hidden.split(num_rows), targets.split(num_rows), strict=True)
    parts: list[Any] = [
        checkpoint(tile, i * num_rows, some, weight, at, use_reentrant=False)
        for i, (some, at) in enumerate(pairs)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

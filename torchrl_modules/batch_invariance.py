"""Batch invariance: a row has the same logits to the bit, whatever is computed beside it.

A matrix product adds up the terms of a sum in an order that depends on how many rows it has, so in
floating point a token's logits depend on the batch. Here products are computed in tiles of a fixed
number of rows, and attention over tiles of a fixed number of queries and of keys, from the first
key of a row on; what is left of a tile is zeros. Norms, softmax and the functions of an element
give each row the same on a CPU already, as was measured (``benchmarks/batch_invariance.py``).
The reason and the remedy are those of He et al., "Defeating Nondeterminism in LLM Inference"
(Thinking Machines Lab, 2025).

Shape legend: B rows, H heads, G key-value heads, Q queries, K keys, D head size, E of values,
N tokens.
"""

from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedModel

from .transformers_releases import with_cache

_ROWS: Final = 16
"""Of a tile of a matrix product, and queries of a tile of attention."""
_WIDTH: Final = 4
"""Rows have a multiple of so many numbers, or are filled up with zeros: with AVX2 the product of
others with 2 to 11 outputs depends on the place of a row in its tile."""
_KEYS: Final = 32
"""Of a tile of attention."""
_VECTOR: Final = 32
"""Numbers that a function of an element takes at once (two vectors of AVX-512); what is left takes
another way."""
_SUMS: Final = frozenset(
    {
        *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addbmm", "baddbmm"),
        *("einsum", "tensordot", "conv1d", "conv2d", "conv3d", "grouped_mm", "_grouped_mm"),
    }
)
_OF_ELEMENTS: Final = frozenset({"silu", "gelu", "sigmoid", "softplus", "logsigmoid", "mish"})


class BatchInvariance(TorchFunctionMode):
    """Computes each row as if it were alone, while it is entered.

    It replaces the linear layers and the scaled dot-product attention of PyTorch, on a CPU.

    Raises:
        ValueError: as a model computes, for a product of another kind, or attention in which a
            token does not see all of its row before it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let everything be computed, but for products, attention and the ends of vectors."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "linear":
            return invariant_linear(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return invariant_attention(*args, **kwargs)
        if name in _OF_ELEMENTS:
            return _whole_vectors(func, args, kwargs)
        # A product over one number has no sum.
        if name in _SUMS and not (name.endswith(("matmul", "bmm")) and args[0].shape[-1] == 1):
            raise ValueError(
                f"batch_invariant: the model multiplies with torch's {name}, whose sums depend on "
                "the batch; linear layers and scaled_dot_product_attention are replaced. Load it "
                "with attn_implementation=sdpa, and a mixture of experts with "
                "experts_implementation=eager, or leave batch_invariant out."
            )
        return func(*args, **kwargs)


def invariant_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`torch.nn.functional.linear` a tile of rows at a time, all of one size.

    Args:
        input: ``[..., D]``.
        weight: ``[E, D]``.
        bias: ``[E]``.

    Returns:
        ``[..., E]``, differentiable.
    """
    rows = input.reshape(-1, input.shape[-1])
    if odd := -rows.shape[-1] % _WIDTH:
        rows, weight = F.pad(rows, (0, odd)), F.pad(weight, (0, odd))
    padded = F.pad(rows, (0, 0, 0, -len(rows) % _ROWS)) if len(rows) % _ROWS else rows
    tiles = [F.linear(tile, weight, bias) for tile in padded.split(_ROWS)]
    if not tiles:
        return F.linear(input, weight, bias)
    out = torch.cat(tiles) if len(tiles) > 1 else tiles[0]
    return out[: len(rows)].reshape(*input.shape[:-1], len(weight))


def _whole_vectors(func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Any) -> Tensor:
    """A function of each element, none of which is at the odd end of a vector."""
    x, *rest = args
    flat = x.reshape(-1)
    # Threads take equal parts, each of whole pairs of vectors.
    missing = -len(flat) % (_VECTOR * torch.get_num_threads())
    result = func(F.pad(flat, (0, missing)) if missing else flat, *rest, **kwargs)
    return result[: len(flat)].reshape(x.shape)


def invariant_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute :func:`torch.nn.functional.scaled_dot_product_attention` in tiles of one size.

    The keys of a row are taken from the first one on that is seen, ``_KEYS`` at a time, with the
    running maximum of flash attention; tiles that a query does not see add zeros.

    Args:
        query: ``[B, H, Q, D]``.
        key: ``[B, G, K, D]``; G divides H.
        value: ``[B, G, K, E]``.
        attn_mask: which keys are seen, bool, or 0 where they are, and minus infinity or the least
            number where not; ``[B, 1, Q, K]``, or what broadcasts to it.
        dropout_p: 0.
        is_causal: a query sees the keys up to its own number.
        scale: of the scores; D to the power of -1/2 when not given.
        enable_gqa: G may be smaller than H; it is allowed in any case.

    Returns:
        ``[B, H, Q, E]``, 0 of a query that sees nothing; differentiable.

    Raises:
        ValueError: there is dropout, the mask adds numbers or differs from head to head, or a query
            does not see all keys of its row before the last that it sees.
    """
    del enable_gqa
    if dropout_p:
        raise ValueError("batch_invariant: attention with dropout is not computed in tiles.")
    num_rows, num_heads, num_queries, size = query.shape
    factor = size**-0.5 if scale is None else scale
    seen = _seen(query, key, attn_mask, is_causal=is_causal)
    key, value, num_seen = _in_order(key, value, seen)
    groups = num_heads // key.shape[1]
    missing = -num_queries % _ROWS
    if missing:
        query, num_seen = F.pad(query, (0, 0, 0, missing)), F.pad(num_seen, (0, missing))
    tiles = query.shape[2] // _ROWS
    q = query.reshape(num_rows * num_heads * tiles, _ROWS, size)
    limits = num_seen.view(num_rows, 1, tiles, _ROWS, 1)
    limits = limits.expand(-1, num_heads, -1, -1, -1).reshape(len(q), _ROWS, 1)

    def of_tiles(states: Tensor, start: int) -> Tensor:
        """Some keys or values for each tile of queries, ``[B * H * tiles, _KEYS, D]``."""
        part = states[:, :, start : start + _KEYS].repeat_interleave(groups, 1)
        return part[:, :, None].expand(-1, -1, tiles, -1, -1).reshape(len(q), _KEYS, -1)

    most = q.new_full((len(q), _ROWS, 1), -torch.inf)
    total = q.new_zeros(len(q), _ROWS, 1)
    out = q.new_zeros(len(q), _ROWS, value.shape[-1])
    for start in range(0, key.shape[2], _KEYS):
        scores = torch.bmm(q, of_tiles(key, start).mT) * factor
        is_seen = torch.arange(start, start + _KEYS, device=q.device) < limits
        scores = scores.masked_fill(~is_seen, -torch.inf)
        highest = torch.maximum(most, scores.detach().amax(-1, keepdim=True))
        finite = highest.masked_fill(highest == -torch.inf, 0.0)
        weights, fade = (scores - finite).exp(), (most - finite).exp()
        total = total * fade + weights.sum(-1, keepdim=True)
        out = out * fade + torch.bmm(weights, of_tiles(value, start))
        most = highest
    out = out / total.masked_fill(total == 0, 1.0)
    return out.view(num_rows, num_heads, tiles * _ROWS, -1)[:, :, :num_queries]


def _seen(query: Tensor, key: Tensor, mask: Tensor | None, *, is_causal: bool) -> Tensor:
    """Keys that each query sees, bool ``[B, Q, K]``."""
    shape = (len(query), query.shape[2], key.shape[2])
    if mask is None:
        seen = torch.ones(shape, dtype=torch.bool, device=query.device)
        return seen.tril() if is_causal else seen
    if mask.ndim == 4 and mask.shape[1] != 1:
        raise ValueError("batch_invariant: a mask of attention differs from head to head.")
    mask = mask.squeeze(1) if mask.ndim == 4 else mask
    if mask.dtype != torch.bool:
        is_plain = (mask == 0) | (mask <= torch.finfo(mask.dtype).min)
        if not bool(is_plain.all()):
            raise ValueError(
                "batch_invariant: a mask of attention adds numbers to scores (a bias of positions, "
                "say), which the tiles do not. Leave batch_invariant out."
            )
        mask = mask == 0
    return mask.expand(shape)


def _in_order(key: Tensor, value: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values that are seen, from the first place on, and how many each query sees.

    Args:
        key: ``[B, G, K, D]``.
        value: ``[B, G, K, E]``.
        seen: bool ``[B, Q, K]``.

    Returns:
        Keys and values in whole tiles, and int64 ``[B, Q]``.
    """
    used, num_seen = seen.any(1), seen.sum(-1)
    is_whole = bool(used.all())
    order = (~used).long().argsort(dim=1, stable=True)
    width = max(1, int(used.sum(1).max()))
    size = width + -width % _KEYS
    order = order[:, :size]
    missing = size - order.shape[1]
    own = seen.gather(2, order[:, None].expand(-1, seen.shape[1], -1))
    if not torch.equal(own, torch.arange(own.shape[2], device=own.device) < num_seen[..., None]):
        raise ValueError(
            "batch_invariant: a token does not see all of its row before it (a sliding window, "
            "say), and is not computed in tiles. Leave batch_invariant out."
        )
    parts = []
    for states in (key, value):
        own_states = states
        if not is_whole:
            at = order[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
            # What nobody sees may be anything, and 0 times infinity is not 0.
            unused = ~used.gather(1, order)[:, None, :, None]
            own_states = states.gather(2, at).masked_fill(unused, 0.0)
        parts.append(F.pad(own_states, (0, 0, 0, missing)) if missing else own_states)
    return parts[0], parts[1], num_seen


def refuse_beside_invariance(**given: Any) -> None:
    """Refuse what would take other kernels than those that are batch invariant.

    Args:
        **given: arguments by name; those that are set are refused.

    Raises:
        ValueError: names one that is set.
    """
    for name, value in given.items():
        if value:
            raise ValueError(
                f"batch_invariant goes without {name}, got {value!r}: its kernels are others than "
                "those that are the same whatever stands beside a row. Leave one of them out."
            )


_checked: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()
"""Models that were tried, with their attention."""


@torch.no_grad()
def check_batch_invariance(model: PreTrainedModel) -> None:
    """Try a model on some rows, once: alone, beside others, and a token at a time.

    Args:
        model: whose parameters are in memory.

    Raises:
        ValueError: it is not in float32 on a CPU; or its logits differ in a bit, of which the
            message names the first module whose result does.
    """
    kind, dtype = model.device.type, model.dtype
    attention = str(model.config._attn_implementation)
    if _checked.get(model) == attention:
        return
    if kind != "cpu" or dtype != torch.float32:
        raise ValueError(
            f"batch_invariant: {type(model).__name__} computes in {dtype} on {kind}, and this was "
            "made and measured for float32 on a CPU. Leave it out."
        )
    size = model.config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, size, (n,), generator=draw) for n in (37, 21, 50)]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(padded.shape[1]) < lengths[:, None]).long()
    whole = rows[0][None]

    def alone() -> Any:
        return model(input_ids=whole)

    def beside() -> Any:
        return model(input_ids=padded, attention_mask=mask)

    def stepwise() -> Any:
        given = with_cache(model, DynamicCache(config=model.config))
        first = model(input_ids=whole[:, :-1], **given)
        given = with_cache(model, first.past_key_values)
        return model(input_ids=whole[:, -1:], **given)

    with BatchInvariance():
        expected = _last_results(model, alone, len(rows[0]))
        for way, words in ((beside, "beside other rows"), (stepwise, "a token at a time")):
            found = _last_results(model, way, len(rows[0]))
            for name, result in expected.items():
                if name in found and not torch.equal(result, found[name]):
                    raise ValueError(
                        f"batch_invariant: {type(model).__name__} gives a row other bits {words} "
                        f"than alone; the first that differs is {name or 'its forward'}. Leave "
                        "batch_invariant out."
                    )
    _checked[model] = attention


def _last_results(model: nn.Module, run: Callable[[], Any], num_tokens: int) -> dict[str, Tensor]:
    """Results of each module for the last token of the first row, in the order of computation."""
    found: dict[str, Tensor] = {}
    modes = [(module, module.training) for module in model.modules()]

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, result: Any) -> None:
            first = result[0] if isinstance(result, tuple) else result
            first = first if isinstance(first, Tensor) else getattr(first, "logits", None)
            if isinstance(first, Tensor) and first.ndim == 3 and first.is_floating_point():
                own = first[0, :num_tokens] if first.shape[1] > 1 else first[0]
                found[name] = own[-1].clone()

        return hook

    handles = [m.register_forward_hook(keep(name)) for name, m in model.named_modules()]
    model.eval()
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    return found

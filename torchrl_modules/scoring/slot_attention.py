"""Attention of one new token of each row over what its slot of a cache holds of the row.

A slot is as long as the longest row may become. On a GPU flash attention for rows of many lengths
reads of each no more than its row has, without a mask, and rows of other lengths change no shape:
so a step is the same for all lengths, compiled or captured.

Shape legend: A rows, S slots, C columns of a slot, H heads, G key-value heads, D head size.
"""

import warnings
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from torchrl_data.devices import on_device

_TYPES: Final = (torch.bfloat16, torch.float16)
_LARGEST: Final = 256
"""Head size that the kernel takes, at most."""
_GAP: Final = 0.05
"""Of the check against plain attention, relative: bfloat16 leaves about 0.01."""


class SlotPlan(NamedTuple):
    """What each row reads of its slot, on the device."""

    lengths: Tensor
    """int32 ``[A]``: its first columns, the new token's included."""
    queries: Tensor
    """int32 ``[A + 1]``: where each row's query begins, and the last one ends."""
    starts: Tensor
    """int32 ``[A + 1]``: where each slot begins among the columns of all, and the last one ends."""
    longest: int
    """No row has more columns."""


def has_slot_attention(keys: Tensor, values: Tensor, num_heads: int) -> bool:
    """Whether there is a kernel for a cache on this device, of this type and head size.

    It is tried once; where it is wrong or fails, that is told.

    Args:
        keys: of a layer, ``[S, G, C, D]``.
        values: the same.
        num_heads: H.
    """
    size = keys.shape[-1]
    if not _is_taken(keys, size) or values.dtype != keys.dtype or values.shape[-1] != size:
        return False
    return _is_right(keys.device, keys.dtype, num_heads // keys.shape[1], size)


def slot_attention(
    query: Tensor, keys: Tensor, values: Tensor, plan: SlotPlan, scale: float | None
) -> Tensor:
    """Attention of one token of each row over its slot, ``[A, H, D]``.

    Args:
        query: ``[A, H, D]``.
        keys: ``[S, G, C, D]``; G divides H. Row ``i`` has slot ``i``, and the columns of a slot lie
            one behind the other, so that it is a view of ``[S, C, G, D]``.
        values: the same.
        plan: of these rows.
        scale: of the scores; ``D ** -0.5`` when not given.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (keys, values)]
    return _attend(query, *flat, plan.lengths, plan.queries, plan.starts, plan.longest, scale)


@torch.library.custom_op("torchrl_agents::slot_attention", mutates_args=())
def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    queries: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
) -> Tensor:
    """The same over the columns of all slots, ``[S * C, G, D]``."""
    # An operator of its own: a compiler need not know how the kernel lays out what it returns.
    if not _is_taken(keys, query.shape[-1]):
        return _attend_by_mask(query, keys, values, lengths, starts, longest, scale)
    attended = torch.ops.aten._flash_attention_forward(
        *(query, keys, values, queries, starts, 1, longest),
        *(0.0, False, False),
        scale=scale,
        seqused_k=lengths,
    )
    return attended[0].reshape(query.shape).contiguous()


@_attend.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape)


def _attend_by_mask(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
) -> Tensor:
    """The same without the kernel: slots are copied."""
    at = torch.arange(longest, device=keys.device)
    seen = at < lengths[:, None]
    rows = (starts[:-1, None].long() + at).clamp(max=len(keys) - 1)
    k, v = (x[rows].transpose(1, 2) for x in (keys, values))  # [A, G, longest, D]
    folded = query.unflatten(1, (keys.shape[1], -1))  # heads that share keys are queries of one
    attended = scaled_dot_product_attention(folded, k, v, seen[:, None, None], scale=scale)
    return attended.flatten(1, 2)


def _is_taken(keys: Tensor, size: int) -> bool:
    """Whether the kernel is for such keys."""
    return (
        keys.device.type == "cuda"
        and keys.dtype in _TYPES
        and size % 8 == 0
        and size <= _LARGEST
        and torch.cuda.get_device_capability(keys.device) >= (8, 0)
    )


@cache
def _is_right(device: torch.device, dtype: torch.dtype, groups: int, size: int) -> bool:
    """Try the kernel once beside plain attention."""
    draw = torch.Generator().manual_seed(0)
    lengths, num_slots, num_columns = [1, 9, 200], 5, 256
    num_rows = len(lengths)
    heads = [
        torch.randn(num_rows, 2 * groups, size, generator=draw),
        *(torch.randn(num_slots, num_columns, 2, size, generator=draw) for _ in range(2)),
    ]
    numbers = torch.arange(num_rows + 1, dtype=torch.int32)
    plan = SlotPlan(
        on_device(lengths, device, torch.int32),
        on_device(numbers, device),
        on_device(num_columns * numbers, device),
        num_columns,
    )
    results = []
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for kind in (dtype, torch.float32):
                query, *cache = (on_device(x, device).to(kind) for x in heads)
                keys, values = (x.transpose(1, 2) for x in cache)
                results.append(slot_attention(query, keys, values, plan, None).float())
        gap = ((results[0] - results[1]).norm() / results[1].norm()).item()
        reason = "" if gap < _GAP else f"it is off by {gap:.2g}"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of this PyTorch or this card: it is told, and masks are used
        reason = f"{type(error).__name__}: {str(error)[:200]}"
    if reason:
        warnings.warn(
            f"Flash attention over slots of a cache is not used on {device} for {dtype}, heads of "
            f"{size}, {groups} to a key: {reason}. Attention with a mask, which is slower, takes "
            "its place.",
            stacklevel=2,
        )
    return not reason

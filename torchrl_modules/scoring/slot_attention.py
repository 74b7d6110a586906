"""Attention of one new token of each row over what its slot of a cache holds of the row.

A slot is as long as the longest row may become. On a GPU flash attention for rows of many lengths
reads of each no more than its row has, without a mask, and rows of other lengths change no shape:
so a step is the same for all lengths, compiled or captured. What rows begin with alike is there
once, outside of their slots, and is read once for all of them: the queries of all these rows are
those of one row. On a CPU the slots are one batch with a mask, and each prefix is another piece.

Shape legend: A rows, S slots, C columns of a slot, H heads, G key-value heads, D head size, P
prefixes, N queries.
"""

from functools import cache
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from torchrl_data.devices import on_device

from .flash_kernel import is_taken, passes_trial, varlen_forward

_CPU_TYPES: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class PrefixPlan(NamedTuple):
    """Prefixes of rows, on the device; the last has no token, for rows that share nothing."""

    order: Tensor
    """int64 ``[A]``: the rows, those of one prefix beside each other."""
    inverse: Tensor
    """int64 ``[A]``: where each row is in this order."""
    has_any: Tensor
    """bool ``[A]``: the row shares something."""
    queries: Tensor
    """int32 ``[P + 1]``: where the rows of each prefix begin in the order, and the last end."""
    starts: Tensor
    """int32 ``[P + 1]``: where each begins among the columns of all slots; one more, unused."""
    lengths: Tensor
    """int32 ``[P]``: tokens of each."""


class SlotPlan(NamedTuple):
    """The columns that each row reads of its slot, on the device."""

    lengths: Tensor
    """int32 ``[A]``: its first columns, the new token's included."""
    queries: Tensor
    """int32 ``[A + 1]``: where each row's query begins, and the last one ends."""
    starts: Tensor
    """int32 ``[A + 1]``: where each slot begins among the columns of all, and the last one ends."""
    longest: int
    """No row has more columns, nor has a prefix."""
    prefixes: PrefixPlan | None = None
    mask: Tensor | None = None
    """The :func:`length_mask` of the rows, on a CPU."""


def length_mask(lengths: Tensor) -> Tensor | None:
    """The mask by which a CPU reads of each slot the columns that its row has.

    Args:
        lengths: int32 ``[A]``, on a CPU.

    Returns:
        float32 ``[A, 1, 1, C]``, as wide as the longest row: 0 where a row has a column, and minus
        infinity behind; ``None`` where all rows have equally many.
    """
    least, most = (int(x) for x in lengths.aminmax())
    if least == most:
        return None
    unused = torch.arange(most) >= lengths[:, None, None, None]
    return torch.zeros(unused.shape).masked_fill_(unused, -torch.inf)


def has_slot_attention(
    keys: Tensor, values: Tensor, num_heads: int, *, without_kernel: bool = False
) -> bool:
    """Say if there is attention over slots for a cache on this device, of this type and head size.

    A GPU's kernel is tried once; where it is wrong or fails, that is told.

    Args:
        keys: of a layer, ``[S, G, C, D]``.
        values: the same.
        num_heads: H.
        without_kernel: the slow form that needs none will do.
    """
    size = keys.shape[-1]
    if values.dtype != keys.dtype or values.shape[-1] != size:
        return False
    if without_kernel or _has_cpu_kernel(keys):
        return True
    return _has_gpu_kernel(keys) and _is_right(
        keys.device, keys.dtype, num_heads // keys.shape[1], size
    )


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
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    if _has_cpu_kernel(keys) and not torch.compiler.is_compiling():
        return _attend_on_cpu(query, keys, values, plan, factor)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (keys, values)]
    own, shared, longest = (plan.lengths, plan.queries, plan.starts), plan.prefixes, plan.longest
    if shared is None:
        return _attend(query, *flat, *own, 1, longest, factor)[0]
    groups = query.shape[1] // keys.shape[1]
    those = (shared.lengths, shared.queries, shared.starts)
    out, lse = _piece(query, flat, own, groups, longest, factor)
    most = len(query) * groups
    ahead, lse_ahead = _piece(query[shared.order], flat, those, most, longest, factor)
    share = torch.sigmoid(lse_ahead[shared.inverse] - lse)
    share = (share * shared.has_any[:, None])[..., None]
    return torch.lerp(out.float(), ahead[shared.inverse].float(), share).to(query.dtype)


def _attend_on_cpu(
    query: Tensor, keys: Tensor, values: Tensor, plan: SlotPlan, scale: float
) -> Tensor:
    """The same by PyTorch's flash attention for CPUs: all slots in one call, each prefix in one."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    # Heads that share keys are queries of one head, and so are rows that share a prefix.
    shape = (len(query), keys.shape[1], query.shape[1] // keys.shape[1], query.shape[2])
    folded = query.reshape(shape)
    longest = int(plan.lengths[0]) if plan.mask is None else plan.mask.shape[-1]
    mask = None if plan.mask is None else plan.mask.to(query.dtype)
    own = (x[: shape[0], :, :longest] for x in (keys, values))
    out, lse = attend(folded, *own, attn_mask=mask, scale=scale)
    if plan.prefixes is None:
        return out.reshape(query.shape)
    order, ends = plan.prefixes.order.tolist(), plan.prefixes.queries.tolist()
    num_sharing = ends[-2]
    some: Any = slice(num_sharing)
    if order[:num_sharing] != [*range(num_sharing)]:
        some = plan.prefixes.order[:num_sharing]
    # [1, G, A * H / G, D] and [1, G, S * C, D]
    sharing, flat_keys, flat_values = (
        x.transpose(0, 1).flatten(1, 2)[None] for x in (folded[some], keys, values)
    )
    pieces = []
    columns = zip(plan.prefixes.starts.tolist(), plan.prefixes.lengths.tolist(), strict=False)
    for (first, end), (start, length) in zip(pairwise(ends[:-1]), columns, strict=False):
        if first < end:
            queries = sharing.narrow(2, shape[2] * first, shape[2] * (end - first))
            heads = (x.narrow(2, start, length) for x in (flat_keys, flat_values))
            pieces.append(attend(queries, *heads, scale=scale))
    ahead, lse_ahead = (
        torch.cat(x, 2).reshape(shape[1], num_sharing, shape[2], -1).transpose(0, 1)
        for x in zip(*pieces, strict=True)
    )
    share = torch.sigmoid(lse_ahead - lse[some][..., None])
    joined = torch.lerp(out[some].to(share.dtype), ahead.to(share.dtype), share)
    out[some] = joined.to(out.dtype)
    return out.reshape(query.shape)


def _piece(
    query: Tensor,
    flat: list[Tensor],
    plan: tuple[Tensor, Tensor, Tensor],
    most: int,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention ``[A, H, D]`` of each segment of rows, and its log-sum-exps ``[A, H]``."""
    # Heads that share keys are queries of one head, so that keys are read once.
    lengths, queries, starts = plan
    num_rows, num_heads, size = query.shape
    shape = (num_rows, flat[0].shape[1], num_heads // flat[0].shape[1], size)
    folded = query.reshape(shape).transpose(1, 2).flatten(0, 1)
    # One query alone takes another way.
    out, lse = _attend(
        folded, *flat, lengths, shape[2] * queries, starts, max(2, most), longest, scale
    )
    out = out.reshape(num_rows, shape[2], shape[1], size).transpose(1, 2).flatten(1, 2)
    return out, lse.reshape(shape[1], num_rows, shape[2]).transpose(0, 1).flatten(1, 2)


@torch.library.custom_op("torchrl_agents::slot_attention", mutates_args=())
def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    queries: Tensor,
    starts: Tensor,
    most: int,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention ``[N, H, D]`` of segments of queries, and its log-sum-exps ``[H, N]``.

    Keys and values are the columns of all slots, ``[S * C, G, D]``. A segment without keys gives
    what nobody may use.
    """
    # An operator of its own: a compiler need not know how the kernel lays out what it returns.
    if not _has_gpu_kernel(keys):
        return _attend_by_loop(query, keys, values, lengths, queries, starts, most, longest, scale)
    out, lse = varlen_forward(
        *((query, keys, values), (queries, starts), (most, longest), scale),
        causal=False,
        lengths=lengths,
    )
    return out.reshape(query.shape).contiguous(), lse.contiguous()


@_attend.register_fake
def _(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    lse = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    return query.new_empty(query.shape), lse


def _attend_by_loop(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    queries: Tensor,
    starts: Tensor,
    most: int,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The same without the kernel, for a trial."""
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    lse = query.new_full((query.shape[1], query.shape[0]), torch.inf, dtype=torch.float32)
    ends, groups = queries.tolist(), query.shape[1] // keys.shape[1]
    if int(queries.diff().max()) > most or int(lengths.max()) > longest:
        raise ValueError("slot_attention: a segment has more queries or keys than is said.")
    precise = torch.promote_types(query.dtype, torch.float32)
    for at, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist())):  # noqa: B905
        some, those = slice(ends[at], ends[at + 1]), slice(start, start + length)
        if length and some.start < some.stop:
            heads = (query[some], keys[those], values[those])
            q, k, v = (x.transpose(0, 1).to(precise) for x in heads)
            k, v = (x.repeat_interleave(groups, 0) for x in (k, v))
            scores = q @ k.transpose(1, 2) * scale
            out[some] = (scores.softmax(-1) @ v).transpose(0, 1).to(out.dtype)
            lse[:, some] = scores.logsumexp(-1)
    return out, lse


def _has_cpu_kernel(keys: Tensor) -> bool:
    """Say if the kernel for CPUs is for such keys, and this PyTorch has it."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    is_of_type = keys.device.type == "cpu" and keys.dtype in _CPU_TYPES
    return is_of_type and hasattr(torch.ops.aten, name)


def _has_gpu_kernel(keys: Tensor) -> bool:
    """Say if the kernel for GPUs is for such keys, and this card has it."""
    return is_taken(keys) and torch.cuda.get_device_capability(keys.device) >= (8, 0)


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
    shared = PrefixPlan(
        order=on_device([0, 2, 1], device),
        inverse=on_device([0, 2, 1], device),
        has_any=on_device([True, False, True], device),
        queries=on_device([0, 2, 3], device, torch.int32),
        starts=on_device([(num_slots - 1) * num_columns + 7, 0, 0], device, torch.int32),
        lengths=on_device([150, 0], device, torch.int32),
    )

    @torch.no_grad()
    def results(kind: torch.dtype) -> list[Tensor]:
        query, *cache = (on_device(x, device).to(kind) for x in heads)
        keys, values = (x.transpose(1, 2) for x in cache)
        plans = (plan, plan._replace(prefixes=shared))
        with torch.autocast(device.type, enabled=False):
            return [slot_attention(query, keys, values, one, None) for one in plans]

    tried = (device, dtype, groups, size)
    return passes_trial(results, tried, "over slots of a cache", "Attention with a mask")

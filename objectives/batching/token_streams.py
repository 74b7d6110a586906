"""Token streams: which tokens of a batch each of several losses trains, and how much.

Shape legend: B rows, T tokens of one, K trained tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack
from torch import Tensor

from torchrl_data.checks import check_numbers, one_of
from torchrl_data.missing_entry import MissingEntryError
from torchrl_data.ragged.packed import read_rows

from .loss_keys import TokenKeys
from .packed_batch import Entries, PackedBatch, check_batch, pack_batch, rows_with

STREAMS: Final = "streams"
"""Where the weights are: ``("streams", name)``, float32 ``[T]``, 0 where a token takes no part."""
StreamTokens = Literal["assistant", "observation", "all"]
STREAM_TOKENS: Final[tuple[StreamTokens, ...]] = ("assistant", "observation", "all")


def write_streams(
    rows: TensorDictBase | Iterable[TensorDictBase],
    *,
    read: TokenKeys | None = None,
    **streams: StreamTokens | str | tuple[StreamTokens | str, float],
) -> None:
    """Say which tokens of rows take part in which streams of a :class:`~objectives.MixedLoss`.

    Args:
        rows: a lazy stack ``[B]`` or single rows; ``("streams", name)`` is written into each,
            float32 ``[T]``.
        read: entry names.
        **streams: by the stream's name: ``"assistant"``, what the policy sampled;
            ``"observation"``, what others wrote after its first token; or ``"all"``; with another
            weight than 1 a pair, ``ce=("observation", 0.05)``.

    Raises:
        ValueError: tokens of another name, or a weight that is 0 or not finite.
        MissingEntryError: a row has no assistant mask.

    Example:
        >>> row = TensorDict({("tokens", "full"): torch.arange(4)})
        >>> row["masks", "all_assistant_mask"] = torch.tensor([False, True, False, True])
        >>> write_streams(row, rl="assistant", ce=("observation", 0.5))
        >>> row["streams", "rl"]
        tensor([0., 1., 0., 1.])
        >>> row["streams", "ce"]
        tensor([0.0000, 0.0000, 0.5000, 0.0000])
    """
    read = read or TokenKeys()
    chosen: dict[str, tuple[StreamTokens, float]] = {}
    for name, given in streams.items():
        tokens, weight = (given, 1.0) if isinstance(given, str) else given
        check_numbers("write_streams", **{f"weight of {name!r}": weight})
        if not weight:
            raise ValueError(f"write_streams: weight of {name!r} is 0: leave the stream out.")
        chosen[name] = (one_of(name, tokens, STREAM_TOKENS, who="write_streams"), float(weight))
    single = rows.unbind(0) if isinstance(rows, TensorDictBase) and rows.ndim else rows
    for row in [single] if isinstance(single, TensorDictBase) else single:
        mask = row.get(read.assistant_mask, None)
        if mask is None:
            raise MissingEntryError(
                f"write_streams reads {read.assistant_mask!r}, which a row lacks. The row holds "
                f"{sorted(map(str, row.keys()))}."
            )
        mask = mask.bool()
        observed = ~mask & (mask.cumsum(-1) > 0)
        kinds = {"assistant": mask, "observation": observed, "all": torch.ones_like(mask)}
        for name, (tokens, weight) in chosen.items():
            row.set((STREAMS, name), weight * kinds[tokens].to(torch.float32))


def pack_streams(
    batch: TensorDictBase,
    read: TokenKeys,
    streams: Mapping[str, Entries],
    *,
    who: str,
) -> PackedBatch:
    """Pack the tokens of all streams; the entries are ``"stream.field"``, ``"stream.weight"``."""
    check_batch(batch, who=who)
    # A row need not have the entries of a stream in which it takes no part: 0 stands for them.
    by_token: dict[str, NestedKey] = {f"{name}.weight": (STREAMS, name) for name in streams}
    by_row: dict[str, NestedKey] = {}
    flags: dict[str, NestedKey] = {}
    for name, entries in streams.items():
        by_token |= {f"{name}.{field}": key for field, key in entries.tokens.items()}
        by_row |= {f"{name}.{field}": key for field, key in entries.rows.items()}
        flags |= {f"{name}.{field}": key for field, key in entries.flags.items()}
    rows = batch.unbind(0) if batch.ndim == 1 else []
    whole = [_completed(row, i, read, streams, who) for i, row in enumerate(rows)]
    packed = pack_batch(
        lazy_stack(whole) if whole else batch,
        read,
        "all",
        Entries(by_token, by_row, flags=flags),
        who=who,
    )
    takes_part = torch.zeros_like(packed.sampled)
    for name in streams:
        weight = packed.entries[f"{name}.weight"]
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{who}: weights of the stream {name!r} are NaN or infinite.")
        takes_part = takes_part | (weight != 0)
    return packed.keep_targets(takes_part)


def _completed(
    row: TensorDictBase, number: int, read: TokenKeys, streams: Mapping[str, Entries], who: str
) -> TensorDictBase:
    """A row with every entry of every stream."""
    tokens = row.get(read.tokens, None)
    if tokens is None:
        raise MissingEntryError(f"{who} reads {read.tokens!r}, which row {number} lacks.")
    like = torch.zeros(tokens.shape[-1], device=tokens.device)
    missing: dict[NestedKey, Tensor] = {}
    for name, entries in streams.items():
        weight = row.get((STREAMS, name), None)
        needed = [*entries.required.values()]
        absent = [key for key in needed if read_rows(row, key) is None]
        if weight is None:
            missing[STREAMS, name] = like
        elif absent and bool((weight != 0).any()):
            raise MissingEntryError(
                f"{who}: row {number} takes part in the stream {name!r}, which reads "
                f"{absent[0]!r}, and lacks it. The row holds {sorted(map(str, row.keys()))}."
            )
        missing |= dict.fromkeys(absent, like)
    if read_rows(row, read.assistant_mask) is None:
        missing[read.assistant_mask] = like.bool()
    if not missing:
        return row
    row = row.copy()
    for key, value in missing.items():
        row.set(key, value)
    return row


class StreamPart(NamedTuple):
    """The tokens of one stream of a packed batch."""

    batch: PackedBatch
    """The rows that take part, with the weights of their tokens."""
    positions: Tensor
    """int64: which of the trained tokens of the whole batch these are."""


def stream_part(packed: PackedBatch, name: str) -> StreamPart:
    """Take a stream's tokens out of what :func:`pack_streams` gave."""
    # A weight that is NaN stands for a token of a row that is left out: the row still counts.
    weights = packed.entries[f"{name}.weight"]
    part = weights != 0
    prefix = f"{name}."
    entries = {k.removeprefix(prefix): v for k, v in packed.entries.items() if k.startswith(prefix)}
    batch = replace(packed, entries=entries, weights=weights).keep_targets(part)
    batch = batch.take_rows(batch.target_lengths > 0)
    assert batch.weights is not None
    unfit = rows_with(batch.weights.isnan(), batch)
    return StreamPart(batch.leave_out(unfit), (part & ~weights.isnan()).nonzero().squeeze(1))


def leave_out_of_stream(packed: PackedBatch, name: str, unfit: Tensor) -> PackedBatch:
    """Train nothing of some of the rows of a stream, bool of those that take part in it."""
    key = f"{name}.weight"
    weights = packed.entries[key].clone()
    part = stream_part(packed, name)
    weights[part.positions[unfit.repeat_interleave(part.batch.target_lengths)]] = torch.nan
    return replace(packed, entries={**packed.entries, key: weights})

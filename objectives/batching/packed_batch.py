"""From a batch of rows to packed tokens, once, before the loss.

Shape legend: B rows, T tokens of one (ragged or padded), N real tokens of all of them, K trained
tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor

from torchrl_data.devices import on_device, on_host
from torchrl_data.missing_entry import MissingEntryError, require_entries
from torchrl_data.ragged.packed import (
    Rows,
    first_entries,
    read_agents,
    read_experts,
    read_images,
    read_rows,
    read_sampling_masks,
    sequence_index,
)
from torchrl_data.sampling_masks import SamplingMasks

from .loss_keys import TokenKeys
from .masking_strategy import MaskingStrategy


@dataclass(frozen=True)
class PackedBatch:
    """The rows of a batch one after the other, without padding, on the host.

    Which tokens are trained, and where rows begin, decides shapes: on a device each look at them
    would wait for it. A loss brings there what it computes with.

    Example:
        >>> from tensordict import lazy_stack
        >>> from objectives import SFTLoss
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> rows = [TensorDict({("tokens", "full"): torch.arange(65, 65 + n)}) for n in (3, 2)]
        >>> for row in rows:
        ...     row["masks", "all_assistant_mask"] = row["tokens", "full"] > 65
        >>> policy = TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer)
        >>> packed = SFTLoss(policy).pack(lazy_stack(rows))
        >>> packed.ids, packed.lengths
        (tensor([65, 66, 67, 65, 66]), tensor([3, 2]))
        >>> packed.target_mask, packed.num_targets
        (tensor([False,  True,  True, False,  True]), 3)
    """

    ids: Tensor
    """int64 ``[N]``."""
    lengths: Tensor
    """int64 ``[B]``, summing to N."""
    target_mask: Tensor
    """bool ``[N]``: the tokens to train."""
    target_lengths: Tensor
    """int64 ``[B]``, trained tokens of each row, summing to K."""
    sampled: Tensor
    """bool ``[K]``: the policy sampled the token, so it has a behaviour log-prob."""
    entries: Mapping[str, Tensor]
    """What else was read, ``[K]`` each, by the field of the keys."""
    left_out: Tensor
    """bool ``[B]``: the row was unfit to be trained, and has no trained token any more."""
    weights: Tensor | None = None
    """float32 ``[K]``: what each token's terms are multiplied by; None for 1."""
    images: Sequence[Sequence[str]] | None = None
    """Of each row in order, in base 64; None where no row has any."""
    agents: Sequence[str] | None = None
    """The author of each row, where an agent of a program wrote any; else None."""
    sampling_masks: SamplingMasks | None = None
    """The sets that the K trained tokens were drawn from; None where none was recorded."""
    routed_experts: Tensor | None = None
    """uint8 or int16 ``[N, L, S]``: where each token was sent; None where it was not recorded."""
    rows_together: int = 1
    """So many rows that follow each other are never parted: 2 in pairs of answers."""

    @property
    def num_targets(self) -> int:
        """K, the trained tokens."""
        return len(self.sampled)

    @property
    def num_rows(self) -> int:
        """B, rows without trained tokens included."""
        return len(self.lengths)

    def row_entry(self, name: str) -> Tensor:
        """Return an entry of whole rows, each of which has a trained token, ``[B, ...]``.

        Args:
            name: of the entry, which all trained tokens of a row have alike.
        """
        return self.entries[name][self.target_lengths.cumsum(0) - self.target_lengths]

    def targets_on(self, device: torch.device) -> PackedBatch:
        """The same, with what is computed with the scores of the trained tokens on a device.

        Args:
            device: of the scores.

        Returns:
            The batch, of which ``target_lengths``, ``sampled``, ``entries`` and ``weights`` are
            there, without having waited for the device.
        """
        if device.type == self.sampled.device.type:
            return self
        return replace(
            self,
            target_lengths=on_device(self.target_lengths, device),
            sampled=on_device(self.sampled, device),
            entries={name: on_device(value, device) for name, value in self.entries.items()},
            weights=None if self.weights is None else on_device(self.weights, device),
        )

    def take_rows(self, rows: Tensor) -> PackedBatch:
        """Some of the rows, in any order.

        Args:
            rows: which: int64 indices, or bool ``[B]``.

        Returns:
            The batch of these rows.
        """
        if rows.dtype == torch.bool:
            rows = rows.nonzero().squeeze(1)
        tokens = _positions(self.lengths, rows)
        targets = _positions(self.target_lengths, rows)
        return self._part(rows, tokens, targets, rows.tolist())

    def leave_out(self, rows: Tensor) -> PackedBatch:
        """Train nothing of some rows; they still count as rows.

        Args:
            rows: which, bool ``[B]``.

        Returns:
            The batch with all of its rows.
        """
        kept = self.keep_targets(~rows.repeat_interleave(self.target_lengths))
        return replace(kept, left_out=self.left_out | rows)

    def keep_targets(self, keep: Tensor) -> PackedBatch:
        """Train some of the trained tokens only; all rows stay.

        Args:
            keep: which, bool ``[K]``.

        Returns:
            The batch with all of its rows and tokens.
        """
        return replace(
            self,
            target_mask=self.target_mask.masked_scatter(self.target_mask, keep),
            target_lengths=_count(keep, sequence_index(self.target_lengths), self.lengths),
            sampled=self.sampled[keep],
            entries={name: value[keep] for name, value in self.entries.items()},
            weights=None if self.weights is None else self.weights[keep],
            sampling_masks=self.sampling_masks and self.sampling_masks.take(keep),
        )

    def micro_batches(
        self,
        *,
        max_tokens: int | None = None,
        num_rows: int | None = None,
        count_shared_once: bool = False,
    ) -> Iterator[PackedBatch]:
        """Split into runs of whole rows, in order, without copying. Give one of the two limits.

        Rows of a group that lie together stay together as far as the limit allows, so that their
        prompt can be shared, and those of a pair always do.

        Args:
            max_tokens: most tokens of a part; a longer row, or pair, is a part of its own.
            num_rows: rows of a part.
            count_shared_once: count tokens that a row begins with as another row of the part does
                once, as a policy reads them whose scorer shares prefixes: a part may then have more
                than ``max_tokens`` tokens, and the model still reads about so many.

        Returns:
            Parts that hold every row once.

        Raises:
            ValueError: not exactly one limit is given, or it is not positive; or
                ``count_shared_once`` is given without ``max_tokens``.
        """
        limit = max_tokens if num_rows is None else num_rows
        if (max_tokens is None) == (num_rows is None) or limit is None or limit < 1:
            raise ValueError(
                "micro_batches needs max_tokens or num_rows, a positive number; got "
                f"max_tokens={max_tokens} and num_rows={num_rows}."
            )
        if count_shared_once:
            if max_tokens is None:
                raise ValueError("micro_batches: count_shared_once=True goes with max_tokens.")
            rows = self.ids.split(self.lengths.tolist())
            ends = _unique_run_ends(rows, max_tokens, self.rows_together)
            return self._runs([0, *ends])
        lengths = self.lengths if num_rows is None else torch.ones_like(self.lengths)
        return self._runs([0, *run_ends(lengths.tolist(), limit, self.rows_together)])

    def run(self, first: int, last: int) -> PackedBatch:
        """Some rows that lie together, without copying.

        Args:
            first: the first of them.
            last: the first that is none of them; ``first`` for no rows.

        Returns:
            The batch of these rows.
        """
        return next(self._runs([first, last]))

    def _runs(self, edges: Sequence[int]) -> Iterator[PackedBatch]:
        tokens = [0, *self.lengths.cumsum(0).tolist()]
        targets = [0, *self.target_lengths.cumsum(0).tolist()]
        for first, last in pairwise(edges):
            some, trained = (slice(edge[first], edge[last]) for edge in (tokens, targets))
            yield self._part(slice(first, last), some, trained, range(first, last))

    def _part(self, rows: Any, tokens: Any, targets: Any, numbers: Sequence[int]) -> PackedBatch:
        """The batch of some rows: what to index rows, their tokens and their trained tokens by."""
        return PackedBatch(
            ids=self.ids[tokens],
            lengths=self.lengths[rows],
            target_mask=self.target_mask[tokens],
            target_lengths=self.target_lengths[rows],
            sampled=self.sampled[targets],
            entries={name: value[targets] for name, value in self.entries.items()},
            left_out=self.left_out[rows],
            weights=None if self.weights is None else self.weights[targets],
            images=self.images and [self.images[row] for row in numbers],
            agents=self.agents and [self.agents[row] for row in numbers],
            sampling_masks=self.sampling_masks and self.sampling_masks.take(targets),
            routed_experts=None if self.routed_experts is None else self.routed_experts[tokens],
            rows_together=self.rows_together,
        )


def _unique_run_ends(rows: Sequence[Tensor], bound: int, rows_together: int) -> list[int]:
    """Where runs of rows end whose tokens are at most a bound, those that rows share once."""
    ends, filled = [], 0
    ordered: list[bytes] = []  # 8 bytes a token: any order that compares tokens in turn will do

    def add(first: int) -> int:
        """Tokens that some rows, which are not parted, add to those that are there."""
        new = 0
        for tokens in rows[first : first + rows_together]:
            key = tokens.numpy().tobytes()
            # What a row shares with any other it shares with a neighbour in this order.
            at = bisect_left(ordered, key)
            beside = ordered[max(0, at - 1) : at + 1]
            new += len(tokens) - max((_common(key, x) for x in beside), default=0)
            ordered.insert(at, key)
        return new

    for first in range(0, len(rows), rows_together):
        new = add(first)
        if filled and filled + new > bound:
            ends.append(first)
            ordered.clear()
            filled, new = 0, add(first)
        filled += new
    return [*ends, len(rows)] if rows else []


def _common(a: bytes, b: bytes) -> int:
    """Tokens that two rows begin with alike."""
    size = min(len(a), len(b)) // 8
    x, y = (np.frombuffer(one, np.int64, size) for one in (a, b))
    differ = (x != y).nonzero()[0]
    return int(differ[0]) if len(differ) else size


def run_ends(sizes: Sequence[int], bound: int, rows_together: int = 1) -> list[int]:
    """Where runs of rows end that are filled up to a bound, one after the other.

    A larger row is a run of its own.

    Args:
        sizes: of the rows.
        bound: of a run.
        rows_together: so many rows that follow each other are not parted.
    """
    ends, filled = [], 0
    for row in range(0, len(sizes), rows_together):
        size = sum(sizes[row : row + rows_together])
        if filled and filled + size > bound:
            ends.append(row)
            filled = 0
        filled += size
    return [*ends, len(sizes)] if sizes else []


def _positions(lengths: Tensor, rows: Tensor) -> Tensor:
    """The places of the packed values of some rows, one row after the other."""
    starts = lengths.cumsum(0) - lengths
    taken = lengths[rows]
    index = torch.arange(int(taken.sum()), device=lengths.device)
    shift = starts[rows] - (taken.cumsum(0) - taken)
    return index + shift.repeat_interleave(taken)


class _Columns:
    """Reads entries of a batch as packed values, whatever its layout."""

    def __init__(self, batch: TensorDictBase, read: TokenKeys, who: str) -> None:
        if batch.ndim != 1:
            raise ValueError(
                f"{who} takes a batch [B] of one row per trajectory, found batch size "
                f"{tuple(batch.batch_size)}. Flatten it, or add a dimension to a single row."
            )
        self.batch, self.who = batch, who
        self.tokens_key = read.tokens
        self.read: dict[NestedKey, Rows] = {}
        self.keep: Tensor | None = None

    def require(self, keys: list[NestedKey]) -> None:
        """Read entries; a batch that lacks some is told of all of them at once."""
        missing = [key for key in keys if not self.has(key)]
        if not missing:
            return
        require_entries(first_entries(self.batch), missing, self.who)
        rows = enumerate(self.batch.unbind(0))
        index = next(i for i, row in rows if read_rows(row, missing[0]) is None)
        raise MissingEntryError(
            f"{self.who} reads {missing[0]!r}, which row {index} of the batch lacks (row 0 "
            "holds it). Give every row the same entries."
        )

    def has(self, key: NestedKey) -> bool:
        if key not in self.read and (rows := read_rows(self.batch, key)) is not None:
            self.read[key] = rows
        return key in self.read

    def bring_to_host(self) -> None:
        """Have all that was read on the host: one look at a device for everything that is there."""
        values = on_host(*(rows.values for rows in self.read.values()))
        for (key, rows), own in zip([*self.read.items()], values, strict=True):
            self.read[key] = rows._replace(values=own)

    def tokens(self, key: NestedKey) -> Tensor:
        """A per-token entry, packed ``[N]``."""
        rows, expected = self.read[key], self.read[self.tokens_key].lengths
        if not torch.equal(rows.lengths, expected):
            index = int((rows.lengths != expected).nonzero()[0])
            raise ValueError(
                f"{self.who}: {key!r} has {int(rows.lengths[index])} values in row {index}, whose "
                f"{self.tokens_key!r} has {int(expected[index])}. Entries must be aligned "
                "with the tokens."
            )
        return self._kept(rows.values)

    def tokens_or_rows(self, key: NestedKey) -> Tensor:
        """An entry of one value per row or per token, packed ``[N]``."""
        (values, lengths), expected = self.read[key], self.read[self.tokens_key].lengths
        by_row = lengths == 1
        wrong = (~by_row & (lengths != expected)).nonzero()
        if len(wrong):
            index = int(wrong[0])
            raise ValueError(
                f"{self.who}: {key!r} has {int(lengths[index])} values in row {index}; it needs "
                f"one, or one for each of the {int(expected[index])} tokens."
            )
        repeats = torch.where(by_row, expected, 1).repeat_interleave(lengths)
        return self._kept(values.repeat_interleave(repeats))

    def mask(self, key: NestedKey) -> Tensor:
        """A mask of the tokens, bool ``[N]``."""
        return self._as_flags(key, self.tokens(key))

    def flags(self, key: NestedKey) -> Tensor:
        """An entry of rows that is True or False, bool ``[N]``."""
        return self._as_flags(key, self.tokens_or_rows(key))

    def _as_flags(self, key: NestedKey, values: Tensor) -> Tensor:
        if values.dtype == torch.bool:
            return values
        strange = (values != 0) & (values != 1)
        if bool(strange.any()):
            raise ValueError(
                f"{self.who}: {key!r} has to be True or False, 1 or 0, and holds "
                f"{values[strange][0].item():g}. Of labels with -100 give labels != -100, of a "
                "mask that is added to scores mask == 0; weights of tokens are for MixedLoss."
            )
        return values.bool()

    def check_beginnings(self, pad_id: int | None) -> None:
        """Check that a padded batch without an attention mask does not begin with padding.

        Raises:
            ValueError: its rows begin with different numbers of padding ids.
        """
        rows = self.read[self.tokens_key]
        is_padded = not isinstance(self.batch, LazyStackedTensorDict) and len(rows.lengths) > 1
        if pad_id is None or not is_padded:
            return
        pads = (rows.values.view(len(rows.lengths), -1) == pad_id).long().cumprod(1).sum(1)
        if bool((pads != pads[0]).any()):
            raise ValueError(
                f"{self.who}: rows of {self.tokens_key!r} begin with different numbers of the "
                f"tokenizer's padding id {pad_id} ({pads.tolist()[:8]}), and no attention mask "
                "says that this is padding, which would be read as a part of the prompt. Give "
                "('masks', 'all_attention_mask'), False on padding; True if these tokens are real."
            )

    def _kept(self, values: Tensor) -> Tensor:
        return values if self.keep is None else values[self.keep]


def _targets(
    assistant: Tensor, lengths: Tensor, sequence: Tensor, strategy: MaskingStrategy
) -> Tensor:
    """The tokens to train, ``[N]``; the first of a row has nothing before it and is none."""
    first = torch.ones_like(assistant)
    first[1:] = sequence[1:] != sequence[:-1]
    if strategy == "all":
        return ~first
    if strategy == "assistant":
        return assistant & ~first
    count = assistant.cumsum(0)
    starts = (lengths.cumsum(0) - lengths).clamp(max=max(len(count) - 1, 0))
    before = (count - assistant.to(count.dtype))[starts] if len(count) else count
    return (count > before[sequence]) & ~first


def _count(mask: Tensor, sequence: Tensor, lengths: Tensor) -> Tensor:
    """True tokens of each row, ``[B]``."""
    return torch.zeros_like(lengths).index_add(0, sequence, mask.long())


class Entries(NamedTuple):
    """Entries that a loss reads in addition to tokens and masks, by the field that names them."""

    tokens: Mapping[str, NestedKey]
    """Entries of one value per token."""
    rows: Mapping[str, NestedKey]
    """Entries of one value per row or token."""
    optional: Mapping[str, NestedKey] = MappingProxyType({})
    """The same, of which a batch may have none."""
    flags: Mapping[str, NestedKey] = MappingProxyType({})
    """Entries of one value per row or token that are True or False."""

    @property
    def required(self) -> dict[str, NestedKey]:
        """Those that every batch has."""
        return {**self.tokens, **self.rows, **self.flags}


def check_batch(batch: Any, *, who: str) -> None:
    """Check that it is a batch of rows.

    Raises:
        TypeError: it is none; the message says how rows become one.
    """
    if batch is None:
        raise TypeError(
            f"{who} got None for a batch: MCAdvantage.inv gives it while no group is complete. Its "
            "group_size has to be the number of rows with the same group_id."
        )
    if not isinstance(batch, TensorDictBase):
        raise TypeError(
            f"{who} takes a TensorDict [B] of one row per trajectory, as a collector gives it, or "
            f"what its pack() made of one; got {type(batch).__name__}: {batch!r:.80}. A list of "
            "rows becomes one with tensordict.lazy_stack(rows), conversations with "
            "encode_demonstrations and row_tensordicts."
        )


def pack_batch(
    batch: TensorDictBase,
    read: TokenKeys,
    strategy: MaskingStrategy,
    wanted: Entries,
    *,
    who: str,
    pad_id: int | None = None,
) -> PackedBatch:
    """Pack the rows of a batch ``[B]``, ragged or padded, and what a loss reads of them."""
    check_batch(batch, who=who)
    if batch.ndim == 1 and not len(batch):
        none = torch.zeros(0, dtype=torch.int64)
        entries = dict.fromkeys(wanted.required, torch.zeros(0))
        entries |= dict.fromkeys(wanted.flags, none > 0)
        return PackedBatch(none, none, none > 0, none, none > 0, entries, none > 0)
    columns = _Columns(batch, read, who)
    needed = [read.tokens, *wanted.required.values()]
    if strategy != "all":
        needed.append(read.assistant_mask)
    columns.require(needed)
    is_masked, known = columns.has(read.attention_mask), columns.has(read.assistant_mask)
    further = {name: key for name, key in wanted.optional.items() if columns.has(key)}
    columns.bring_to_host()
    ids, lengths = columns.read[read.tokens]
    sequence = sequence_index(lengths)
    if is_masked:
        real = columns.mask(read.attention_mask)
        if not bool(real.all()):
            lengths = _count(real, sequence, lengths)
            columns.keep = real
            ids, sequence = ids[real], sequence[real]
    else:
        columns.check_beginnings(pad_id)
    assistant = columns.mask(read.assistant_mask) if known else torch.zeros_like(ids) > 0
    target_mask = _targets(assistant, lengths, sequence, strategy)
    entries = {name: columns.tokens(key) for name, key in wanted.tokens.items()}
    by_row = {**wanted.rows, **further}
    entries |= {name: columns.tokens_or_rows(key) for name, key in by_row.items()}
    entries |= {name: columns.flags(key) for name, key in wanted.flags.items()}
    target_lengths = _count(target_mask, sequence, lengths)
    sizes = columns.read[read.tokens].lengths.tolist()
    experts = read_experts(batch, sizes, who=who)
    if experts is not None:
        every = torch.cat(experts)
        experts = every if columns.keep is None else every[columns.keep]
    masks = read_sampling_masks(batch, sizes, who=who)
    if masks is not None:
        masks = (masks if columns.keep is None else masks.take(columns.keep)).take(target_mask)
    return PackedBatch(
        ids=ids,
        lengths=lengths,
        target_mask=target_mask,
        target_lengths=target_lengths,
        sampled=assistant[target_mask],
        entries={name: value[target_mask] for name, value in entries.items()},
        left_out=torch.zeros_like(lengths, dtype=torch.bool),
        images=read_images(batch),
        agents=read_agents(batch),
        sampling_masks=masks,
        routed_experts=experts,
    )


def rows_with(flag: Tensor, batch: PackedBatch) -> Tensor:
    """Rows of which a trained token carries a flag ``[K]``, bool ``[B]``."""
    return _count(flag, sequence_index(batch.target_lengths), batch.lengths) > 0

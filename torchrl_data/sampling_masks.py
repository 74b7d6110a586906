"""Sampling masks: the tokens among which each token was drawn, in few bytes.

With top-k, top-p or min-p a sampler draws from some tokens of the vocabulary, whose probabilities
it makes to add up to 1. They are recorded beside the token that was drawn, so that the same
distribution is trained whatever the weights are by then.

Shape legend: K tokens that were drawn, V vocabulary, S bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from .devices import on_device

LENGTHS: Final = "lengths"
"""``("sampling_mask", "lengths")``: int32 ``[T]``, bytes of each token, 0 where there is no set."""
BYTES: Final = "bytes"
"""``("sampling_mask", "bytes")``: uint8 ``[S]``, the bytes of all tokens of a row."""

_BITS: Final = 1
"""The first byte of a set that is a bit for each token of the vocabulary, the lowest bit first; in
a set of ids it is the number of bytes of each, 2 or 4."""
_ID_TYPES: Final = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_UNPACKED_BYTES: Final = 64 << 20


def pack_bits(kept: Tensor) -> Tensor:
    """Pack bools, eight a byte, the lowest bit first, without a look at them.

    Args:
        kept: bool ``[K, V]``.

    Returns:
        uint8 ``[K, ceil(V / 8)]``, on their device.
    """
    padded = torch.nn.functional.pad(kept.to(torch.uint8), (0, -kept.shape[1] % 8))
    places = 1 << torch.arange(8, dtype=torch.uint8, device=kept.device)
    return (padded.unflatten(1, (-1, 8)) * places).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, vocab_size: int) -> Tensor:
    """Undo :func:`pack_bits`.

    Args:
        bits: uint8 ``[K, ceil(V / 8)]``.
        vocab_size: V.

    Returns:
        bool ``[K, V]``.
    """
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, :, None] >> places) & 1).flatten(1)[:, :vocab_size].bool()


def encode_sets(bits: Tensor, vocab_size: int) -> list[bytes]:
    """Write each set as ids or as bits, whichever takes fewer bytes.

    Args:
        bits: uint8 ``[K, ceil(V / 8)]``, see :func:`pack_bits`.
        vocab_size: V.

    Returns:
        K sets: a byte that says how, and then 2 bytes for each id (4 where V is above 65,536), or a
        bit for each token of the vocabulary.
    """
    size = 2 if vocab_size <= 1 << 16 else 4
    out: list[bytes] = []
    for some in bits.split(max(1, _UNPACKED_BYTES // vocab_size)):
        kept = unpack_bits(some, vocab_size)
        counts = kept.sum(-1)
        are_ids = counts * size < some.shape[1]
        ids = kept[are_ids].nonzero()[:, 1].cpu().numpy().astype(_ID_TYPES[size])
        rest = iter(some[~are_ids].cpu().numpy())
        starts = iter([0, *counts[are_ids].cumsum(0).tolist()])
        begin = next(starts)
        for is_list in are_ids.tolist():
            if is_list:
                end = next(starts)
                out.append(bytes([size]) + ids[begin:end].tobytes())
                begin = end
            else:
                out.append(bytes([_BITS]) + next(rest).tobytes())
    return out


class SamplingMasks(NamedTuple):
    """The sets of tokens among which some tokens were drawn; on the host.

    Example:
        >>> masks = SamplingMasks.from_ids([[3, 1], [], [0]], vocab_size=4)
        >>> masks.kept(4)
        tensor([[False,  True, False,  True],
                [False, False, False, False],
                [ True, False, False, False]])
        >>> masks.recorded
        tensor([ True, False,  True])
    """

    data: Tensor
    """uint8 ``[S]``."""
    lengths: Tensor
    """int64 ``[K]``, bytes of each set, summing to S; 0 where none was recorded."""

    @classmethod
    def of(cls, sets: Iterable[bytes]) -> SamplingMasks:
        """Put sets behind each other.

        Args:
            sets: K, as :func:`encode_sets` gives them; empty where none was recorded.
        """
        each = list(sets)
        data = np.frombuffer(b"".join(each), np.uint8).copy()
        return cls(torch.from_numpy(data), torch.tensor([len(x) for x in each], dtype=torch.int64))

    @classmethod
    def from_ids(cls, rows: Iterable[Sequence[int]], vocab_size: int) -> SamplingMasks:
        """Make sets of token ids.

        Args:
            rows: K lists of ids in any order; an empty one where no set was recorded.
            vocab_size: V.

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        return cls.of(sets_of_ids(rows, vocab_size))

    @property
    def recorded(self) -> Tensor:
        """The tokens that have a set, bool ``[K]``."""
        return self.lengths > 0

    @property
    def num_tokens(self) -> int:
        """K."""
        return len(self.lengths)

    def take(self, index: Tensor | slice) -> SamplingMasks:
        """Some of the sets.

        Args:
            index: int64, bool ``[K]``, or a slice.
        """
        ends = self.lengths.cumsum(0)
        lengths = self.lengths[index]
        starts = (ends - self.lengths)[index]
        shift = starts - (lengths.cumsum(0) - lengths)
        at = torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)
        return SamplingMasks(self.data[at], lengths)

    def check_targets(self, targets: Tensor) -> None:
        """Check that each token is in the set that it was drawn from.

        Args:
            targets: int64 ``[K]``, the tokens, on the host.

        Raises:
            ValueError: there are not K sets, or one lacks its token, which the message names.
        """
        if len(targets) != self.num_tokens:
            raise ValueError(
                f"There are {len(targets)} tokens and {self.num_tokens} sampling masks. Give each "
                "token one, an empty one where none was recorded."
            )
        has_own = ~self.recorded
        for kind, rows, values in self._kinds():
            own = targets[rows]
            if kind == _BITS:
                at = (own // 8).clamp(max=values.shape[1] - 1)
                is_inside = own < 8 * values.shape[1]
                byte = values.gather(1, at[:, None]).squeeze(1).long()
                has_own[rows] = is_inside & ((byte >> (own % 8)) & 1).bool()
            else:
                has_own[rows[own == values]] = True
        if not bool(has_own.all()):
            at = int((~has_own).nonzero()[0])
            raise ValueError(
                f"Token {at} of those that were sampled, {int(targets[at])}, is not in its "
                "sampling mask, so it can't have been drawn from it. Do the masks belong to these "
                "tokens?"
            )

    def sets(self) -> list[bytes]:
        """The sets, as bytes each."""
        whole = self.data.numpy().tobytes()
        ends = self.lengths.cumsum(0).tolist()
        return [whole[end - n : end] for end, n in zip(ends, self.lengths.tolist(), strict=True)]

    def kept(self, vocab_size: int, device: torch.device | None = None) -> Tensor:
        """Unpack the sets.

        Args:
            vocab_size: V, of the model that scores; it may be larger than that of the sampler.
            device: where to; the host when not given.

        Returns:
            bool ``[K, V]``, True on the tokens of each set; all False where none was recorded.

        Raises:
            ValueError: a set is damaged, or holds a token outside the vocabulary.
        """
        device = device or torch.device("cpu")
        kept = torch.zeros(self.num_tokens, vocab_size, dtype=torch.bool, device=device)
        for kind, rows, values in self._kinds():
            places = on_device(rows, device)
            if kind == _BITS:
                unpacked = unpack_bits(on_device(values, device), 8 * values.shape[1])
                if bool(unpacked[:, vocab_size:].any()):
                    raise _outside(vocab_size)
                kept[places, : unpacked.shape[1]] = unpacked[:, :vocab_size]
            else:
                if len(values) and int(values.max()) >= vocab_size:
                    raise _outside(vocab_size)
                kept[places, on_device(values, device)] = True
        return kept

    def counts(self) -> Tensor:
        """Tokens of each set, int64 ``[K]``; 0 where none was recorded."""
        counts = torch.zeros_like(self.lengths)
        for kind, rows, values in self._kinds():
            if kind == _BITS:
                counts[rows] = unpack_bits(values, 8 * values.shape[1]).sum(-1)
            else:
                counts.index_add_(0, rows, torch.ones_like(rows))
        return counts

    def _kinds(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The sets of each kind: rows ``[k]`` and their bits ``[k, n]``, or a row for each id."""
        rows = self.lengths.nonzero().squeeze(1)
        starts = (self.lengths.cumsum(0) - self.lengths)[rows]
        tags = self.data[starts]
        for kind in tags.unique().tolist():
            mine = rows[tags == kind]
            sizes = self.lengths[mine] - 1
            some = self.take(mine)
            first = some.lengths.cumsum(0) - some.lengths
            is_tag = torch.zeros(len(some.data), dtype=torch.bool)
            is_tag[first] = True
            body = some.data[~is_tag]
            if kind == _BITS and len(sizes.unique()) == 1:
                yield kind, mine, body.view(len(mine), -1)
            elif kind in _ID_TYPES and not bool((sizes % kind).any()):
                ids = np.frombuffer(body.numpy().tobytes(), _ID_TYPES[kind]).astype(np.int64)
                yield kind, mine.repeat_interleave(sizes // kind), torch.from_numpy(ids)
            elif kind == _BITS:  # of samplers with several vocabularies
                for row, part in zip(mine, body.split(sizes.tolist()), strict=True):
                    yield kind, row[None], part[None]
            else:
                raise ValueError(f"A sampling mask is damaged: it begins with {kind}.")


def _outside(vocab_size: int) -> ValueError:
    return ValueError(
        f"A sampling mask holds a token outside the vocabulary of {vocab_size} tokens. Was it "
        "recorded with another model?"
    )


def sets_of_ids(rows: Iterable[Sequence[int]], vocab_size: int) -> list[bytes]:
    """Write lists of token ids, as an engine returns them.

    Args:
        rows: K lists of ids in any order; an empty one where no set was recorded.
        vocab_size: V.

    Returns:
        K sets, see :func:`encode_sets`; none of an empty list.

    Raises:
        ValueError: an id is not in the vocabulary.
    """
    size = 2 if vocab_size <= 1 << 16 else 4
    out = []
    for row in rows:
        ids = np.unique(np.asarray(row, np.int64))
        if len(ids) and not 0 <= ids[0] <= ids[-1] < vocab_size:
            raise _outside(vocab_size)
        if size * len(ids) < -(-vocab_size // 8):
            out.append(bytes([size]) + ids.astype(_ID_TYPES[size]).tobytes() if len(ids) else b"")
        else:
            bits = np.zeros(vocab_size, bool)
            bits[ids] = True
            packed = np.packbits(bits, bitorder="little")
            out.append(bytes([_BITS]) + packed.tobytes())
    return out


def mask_entries(sets: Sequence[bytes]) -> TensorDict:
    """Make the group of a row, which a batch has at ``"sampling_mask"``.

    Args:
        sets: of each token of the row; empty where none was recorded.
    """
    masks = SamplingMasks.of(sets)
    entries: dict[Any, Any] = {LENGTHS: masks.lengths.int(), BYTES: masks.data}
    return TensorDict._new_unsafe(entries, batch_size=torch.Size([]))

"""Base of the losses of preferences: batches are pairs of rows, which no micro-batch parts.

Shape legend: B rows, two of each pair; P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from objectives.batching.loss_keys import PairLossKeys
from objectives.batching.packed_batch import Entries, PackedBatch

from .loss_output import Output
from .token_loss import Keys, TokenLoss


class PairLoss(TokenLoss[Keys, Output]):
    """Base of the losses that compare the two rows of a pair; see :class:`TokenLoss`."""

    def _pair_entries(self) -> Entries:
        """The entries that say which rows are pairs, by their fields."""
        read: Any = self.read
        assert isinstance(read, PairLossKeys)
        return Entries({}, {"pair_id": read.pair_id}, flags={"chosen": read.chosen})

    def pack(
        self,
        batch: TensorDictBase | PackedBatch,
        *,
        also: Sequence[TokenLoss[Any, Any]] = (),
    ) -> PackedBatch:
        """See the base class.

        Raises:
            ValueError: rows are not pairs, or one of a pair has no trained token.
        """
        packed = replace(super().pack(batch, also=also), rows_together=2)
        _check_pairs(packed, who=self._get_name())
        return packed


def pairs_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values of the better answers and of the other ones, ``[P]`` each, from ``[B]``."""
    chosen, rejected = values.view(len(values) // 2, 2).unbind(1)
    return chosen, rejected


def pair_accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The share of pairs in the right order, ``[]``; of equal values one half, of no pairs 0."""
    return share_ahead((chosen - rejected).detach())


def share_ahead(lead: Tensor) -> Tensor:
    """The share of answers that lead, ``[]``, from ``[P]``; of a lead of 0 one half, of none 0."""
    return is_ahead(lead).sum() / max(len(lead), 1)


def is_ahead(lead: Tensor) -> Tensor:
    """1 where an answer leads, one half where the lead is 0, and 0 elsewhere, ``[P]``."""
    return (lead > 0).to(lead.dtype) + 0.5 * (lead == 0).to(lead.dtype)


def _check_pairs(batch: PackedBatch, *, who: str) -> None:
    """Check that rows are pairs, the better answer first.

    Raises:
        ValueError: they are not, or one has no trained token.
    """
    make = "preference_rows(policy.encoder, pairs) of torchrl_data makes such rows"
    if batch.num_rows % 2:
        raise ValueError(
            f"{who} takes pairs, two rows each, and got {batch.num_rows} rows. {make}; a batch is "
            "cut between pairs."
        )
    empty = (batch.target_lengths == 0).nonzero()
    if len(empty):
        raise ValueError(
            f"{who}: row {int(empty[0])} has no trained token, so that its pair can't be compared. "
            "The assistant mask says which tokens are its answer; leave the pair out."
        )
    by_row = map(batch.row_entry, ("pair_id", "chosen"))
    pair, chosen = (each.view(batch.num_rows // 2, 2) for each in by_row)
    wrong = (pair[:, 0] != pair[:, 1]) | ~(chosen == torch.tensor([True, False])).all(1)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        (a, b), (x, y) = pair[at].tolist(), chosen[at].tolist()
        raise ValueError(
            f"{who}: rows {2 * at} and {2 * at + 1} are no pair: the better answer comes first, "
            f"then the other one of the same pair_id; they have pair_id {a} and {b}, chosen {x} "
            f"and {y}. {make}; shuffle pairs, not rows."
        )

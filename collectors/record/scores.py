"""The trainer's log-probs, overheard from the loss: nothing is computed twice."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from objectives.batching.packed_batch import PackedBatch
from torchrl_data.protocols import TokenScores


class RowScores(NamedTuple):
    """Scores of one row's trained tokens."""

    trained: Tensor
    """bool ``[T]``: which of its tokens."""
    log_prob: Tensor
    """float32, one for each, in nats."""
    entropy: Tensor | None
    """float32, one for each, in nats."""


class TrainerScores:
    """Keeps what a loss scored, until it is asked for.

    Rows are told apart by their tokens: those of equal tokens have equal scores. What a row was
    given first, before any update, stays.
    """

    def __init__(self) -> None:
        self._rows: dict[bytes, RowScores] = {}

    def add(self, batch: PackedBatch, scores: TokenScores) -> None:
        """Take in the scores of a part of a batch.

        Args:
            batch: what was scored.
            scores: of its trained tokens.
        """
        lengths, counts = batch.lengths.tolist(), batch.target_lengths.tolist()
        ids, masks = batch.ids.cpu().split(lengths), batch.target_mask.cpu().split(lengths)
        log_probs = scores.log_prob.float().cpu().split(counts)
        entropies: Sequence[Tensor | None] = [None] * len(counts)
        if scores.entropy is not None:
            entropies = scores.entropy.float().cpu().split(counts)
        rows = map(RowScores, masks, log_probs, entropies)
        for own_ids, row in zip(ids, rows, strict=True):
            self._rows.setdefault(_key(own_ids), row)

    def of(self, ids: Tensor) -> RowScores | None:
        """The scores of a row, if it was trained.

        Args:
            ids: its tokens, int64 ``[T]``.
        """
        return self._rows.get(_key(ids))

    def clear(self) -> None:
        """Forget all of them: the step is over."""
        self._rows.clear()


def _key(ids: Tensor) -> bytes:
    return ids.to(torch.int64).contiguous().numpy().tobytes()

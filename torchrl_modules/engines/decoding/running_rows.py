"""The rows that an asynchronous engine draws tokens for: they join and leave between two tokens.

Shape legend: A rows, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .decode_loop import PromptReader
from .prompt_readers import group_rows
from .slot_reader import SlotReader


class Row(Protocol):
    """One of them."""

    tokens: list[int]
    """The prompt, and what was drawn so far."""
    session: Hashable
    """What was read of it is kept under this key when it leaves; ``None`` for nothing."""
    is_broken: bool
    """What was read of it is not finite."""


R = TypeVar("R", bound=Row)


class RunningRows(ABC, Generic[R]):
    """Rows, in an order of their own."""

    @abstractmethod
    def join(self, rows: Sequence[R]) -> tuple[list[R], Tensor]:
        """Take rows on, and read their tokens.

        Returns:
            They, perhaps in another order, and logits of their next tokens, ``[A', V]``.
        """

    @abstractmethod
    def advance(self) -> tuple[list[R], Tensor]:
        """Read the last token of each row; all rows and logits of their next tokens, ``[A, V]``."""

    @abstractmethod
    def leave(self, rows: Collection[int]) -> None:
        """Let rows go, by the ``id`` of each."""

    @abstractmethod
    def reread(self) -> None:
        """Read again, by new weights, all that was read of each row: all but its last token."""


class MergedRows(RunningRows[R]):
    """All rows in one cache.

    Args:
        reader: without rows.
    """

    def __init__(self, reader: SlotReader) -> None:
        self.reader = reader
        self.rows: list[R] = []

    def join(self, rows: Sequence[R]) -> tuple[list[R], Tensor]:
        """See `RunningRows`."""
        logits = self.reader.join([row.tokens for row in rows])
        self.rows += rows
        return list(rows), logits

    def advance(self) -> tuple[list[R], Tensor]:
        """See `RunningRows`."""
        tokens = [row.tokens[-1] for row in self.rows]
        device = self.reader.model.device
        return list(self.rows), self.reader.advance(torch.tensor(tokens, device=device))

    def leave(self, rows: Collection[int]) -> None:
        """See `RunningRows`; the last ones take the places of those that go."""
        order = list(range(len(self.rows)))
        for at in reversed([at for at, row in enumerate(self.rows) if id(row) in rows]):
            row = self.rows[at]
            if row.is_broken:
                self.reader.wipe(at)
            elif row.session is not None:
                self.reader.leave_behind(at, row.tokens, row.session)
            last = order.pop()
            if at < len(order):
                order[at] = last
        if len(order) < len(self.rows):
            self.reader.keep(torch.tensor(order, dtype=torch.int64))
            self.rows = [self.rows[at] for at in order]

    def reread(self) -> None:
        """See `RunningRows`."""
        self.reader.reread([row.tokens[:-1] for row in self.rows])


class RowGroups(RunningRows[R]):
    """Rows that came together stay together, each group by a reader of its own.

    For what models keep that can't be put together: right for every model, and slower.

    Args:
        model: in evaluation mode.
        reader: how the model continues rows.
    """

    def __init__(self, model: PreTrainedModel, reader: type[PromptReader]) -> None:
        self._model = model
        self._reader = reader
        self._groups: list[tuple[PromptReader, list[R], set[int]]] = []

    def join(self, rows: Sequence[R]) -> tuple[list[R], Tensor]:
        """See `RunningRows`."""
        prompts = [row.tokens for row in rows]
        by_length = self._reader.needs_one_length
        read = [
            self._begin([rows[at] for at in group])
            for group in group_rows(prompts, range(len(rows)), by_length=by_length)
        ]
        return [row for one, _ in read for row in one], torch.cat([logits for _, logits in read])

    def _begin(self, rows: list[R]) -> tuple[list[R], Tensor]:
        reader = self._reader(self._model)
        logits = reader.read([row.tokens for row in rows])
        self._groups.append((reader, list(rows), set()))
        return list(rows), logits

    def advance(self) -> tuple[list[R], Tensor]:
        """See `RunningRows`."""
        rows: list[R] = []
        logits = []
        for reader, members, gone in self._groups:
            tokens = torch.tensor([row.tokens[-1] for row in members], device=self._model.device)
            own = reader.advance(tokens)
            here = [at for at, row in enumerate(members) if id(row) not in gone]
            rows += [members[at] for at in here]
            logits.append(own if not gone else own[here])
        return rows, torch.cat(logits)

    def leave(self, rows: Collection[int]) -> None:
        """See `RunningRows`; where a cache can't leave a row out, it is read on without use."""
        kept = []
        for reader, members, gone in self._groups:
            gone |= {id(row) for row in members if id(row) in rows}
            here = [at for at, row in enumerate(members) if id(row) not in gone]
            if here and gone and reader.can_drop:
                reader.keep(torch.tensor(here, device=self._model.device))
                members, gone = [members[at] for at in here], set()
            if here:
                kept.append((reader, members, gone))
        self._groups = kept

    def reread(self) -> None:
        """See `RunningRows`."""
        groups, self._groups = self._groups, []
        for _, members, gone in groups:
            left = [row for row in members if id(row) not in gone]
            reader = self._reader(self._model)
            reader.read([row.tokens[:-1] for row in left])
            self._groups.append((reader, left, set()))

"""The rows of all epochs in order, prepared here or in worker processes."""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

import torch

from .sources import SequenceSource, StreamSource

_CHUNK: Final = 8
"""Rows that a worker prepares at a time."""


class BadRow(NamedTuple):
    """A row that could not be prepared."""

    reason: str


class Item(NamedTuple):
    """A row and its place."""

    epoch: int
    place: int
    """In the order of the epoch."""
    row_id: int
    """Its number in the data set: the same in every order."""
    row: dict[str, Any] | BadRow


class PrepareRow:
    """Fetches a row and applies the user's function; can be sent to a worker process.

    Args:
        source: where rows are fetched.
        function: from row to row.
    """

    def __init__(
        self,
        source: SequenceSource | StreamSource,
        function: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
    ) -> None:
        self._fetch = source.fetch
        self._function = function

    def __call__(self, key: Any) -> dict[str, Any] | BadRow:
        """The row, or why there is none: one bad row is no reason to stop."""
        try:
            row = self._fetch(key)
            if self._function is not None:
                row = self._function(dict(row) if isinstance(row, Mapping) else row)
        except Exception as error:  # the data's reader and the user's function
            return BadRow(f"{type(error).__name__}: {error}")
        if not isinstance(row, Mapping):
            return BadRow(f"the row is a {type(row).__name__}, not a dictionary: {row!r:.80}")
        return dict(row)

    def __getitem__(self, keys: tuple[Any, ...]) -> list[dict[str, Any] | BadRow]:
        """Several rows: what a torch DataLoader asks of its data set."""
        return [self(key) for key in keys]


class RowStream:
    """An iterator over all epochs whose position can be read and set.

    The order does not depend on the number of workers.

    Args:
        source: of the rows.
        prepare: makes a row out of what the source gives.
        num_epochs: passes; ``None`` goes on for ever.
        num_workers: processes that prepare rows ahead; 0 prepares them here.
        worker_timeout_s: how long a worker may take for its next rows.
    """

    def __init__(
        self,
        source: SequenceSource | StreamSource,
        prepare: PrepareRow,
        *,
        num_epochs: int | None,
        num_workers: int,
        worker_timeout_s: float,
    ) -> None:
        self._source = source
        self._prepare = prepare
        self._num_epochs = num_epochs
        self._num_workers = num_workers
        self._worker_timeout_s = worker_timeout_s
        self.position = (0, 0)
        """Epoch and place of the next item."""
        self._items: Iterator[Item] | None = None

    def seek(self, epoch: int, place: int) -> None:
        """Go on from an item; what a stream has to read again is read at the next draw."""
        self.position = (epoch, place)
        self._items = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy reads for itself, from the same position on."""
        return {**self.__dict__, "_items": None}

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._items is None:
            self._items = self._prepared()
        try:
            item = next(self._items)
        except StopIteration:
            raise
        except BaseException:
            self._items = None  # the next call goes on from here
            raise
        self.position = (item.epoch, item.place + 1)
        return item

    def close(self) -> None:
        """Stop the workers."""
        self._items = None

    def _order(self) -> Iterator[tuple[int, int, int, Any]]:
        epoch, start = self.position
        while self._num_epochs is None or epoch < self._num_epochs:
            place = start - 1
            for place, (row_id, key) in enumerate(self._source.epoch(epoch, start=start), start):
                yield epoch, place, row_id, key
            if place < 0:
                raise RuntimeError(
                    f"DataLoadingPrimer: epoch {epoch} of the data set has no rows, though the "
                    "first one had. Its iterator does not start anew; pass a function that "
                    "returns a fresh one."
                )
            epoch, start = epoch + 1, 0

    def _prepared(self) -> Iterator[Item]:
        if not self._num_workers:
            for epoch, place, row_id, key in self._order():
                yield Item(epoch, place, row_id, self._prepare(key))
            return
        # The workers run ahead: what they were asked for waits here for what they give.
        asked: list[list[tuple[int, int, int]]] = []
        loader = torch.utils.data.DataLoader(
            self._prepare,  # type: ignore[arg-type]
            sampler=_Chunks(self._order, asked),  # type: ignore[arg-type]
            batch_size=None,
            num_workers=self._num_workers,
            timeout=self._worker_timeout_s,
            generator=torch.Generator(),  # a private one: the program's is not touched
        )
        for rows in loader:
            for where, row in zip(asked.pop(0), rows, strict=True):
                yield Item(*where, row)


class _Chunks:
    """What the workers are asked for, and a note of it."""

    def __init__(
        self,
        order: Callable[[], Iterator[tuple[int, int, int, Any]]],
        asked: list[list[tuple[int, int, int]]],
    ) -> None:
        self._order = order
        self._asked = asked

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        order = self._order()
        while items := tuple(islice(order, _CHUNK)):
            self._asked.append([item[:3] for item in items])
            yield tuple(item[3] for item in items)

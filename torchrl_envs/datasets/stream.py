"""The rows of all epochs in order, prepared here or in worker processes."""

import contextlib
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from .prepare import BadRow, PrepareRow
from .sources import SequenceSource, StreamSource
from .workers import prepared, sendable


class Item(NamedTuple):
    """A row and its place."""

    epoch: int
    place: int
    """In the order of the epoch."""
    row_id: int
    """Its number in the data set: the same in every order."""
    row: dict[str, Any] | BadRow


class RowStream:
    """An iterator over all epochs whose position can be read and set."""

    # The order does not depend on the number of workers.

    def __init__(
        self,
        source: SequenceSource | StreamSource,
        prepare: PrepareRow,
        *,
        num_epochs: int | None,
        num_workers: int,
        worker_timeout_s: float,
    ) -> None:
        if num_workers:
            sendable(prepare)
        self._source = source
        self._prepare = prepare
        self._num_epochs = num_epochs
        self._num_workers = num_workers
        self._worker_timeout_s = worker_timeout_s
        self._items: Generator[Item, None, None] | None = None
        self.position = (0, 0)
        """Epoch and place of the next item."""

    def seek(self, epoch: int, place: int) -> None:
        """Go on from an item; what a stream has to read again is read at the next draw."""
        self.position = (epoch, place)
        items, self._items = self._items, None
        if items is not None:
            items.close()

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
        self.seek(*self.position)

    def _order(self) -> Iterator[tuple[tuple[int, int, int], Any]]:
        epoch, start = self.position
        while self._num_epochs is None or epoch < self._num_epochs:
            place = start - 1
            for place, (row_id, key) in enumerate(self._source.epoch(epoch, start=start), start):
                yield (epoch, place, row_id), key
            if place < 0:
                raise RuntimeError(
                    f"DataLoadingPrimer: epoch {epoch} of the data set has no rows, though the "
                    "first one had. Its iterator does not start anew; pass a function that "
                    "returns a fresh one."
                )
            epoch, start = epoch + 1, 0

    def _prepared(self) -> Generator[Item, None, None]:
        if not self._num_workers:
            for where, key in self._order():
                yield Item(*where, self._prepare(key))
            return
        rows = prepared(
            self._order(),
            self._prepare,
            num_workers=self._num_workers,
            timeout_s=self._worker_timeout_s,
        )
        with contextlib.closing(rows):
            for where, row in rows:
                yield Item(*where, row)

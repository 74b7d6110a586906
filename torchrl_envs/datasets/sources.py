"""Where rows come from: a sequence that is indexed, or a stream that is walked through.

:class:`RowStream` gives those of all epochs in order, prepared here or in worker processes;
:class:`Frontier` knows which groups have ended: where a resumed run goes on.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from .prepare import BadRow, PrepareRow
from .workers import prepared, sendable

Place = tuple[int, int]
"""Epoch, and place in the order of the epoch."""
COUNTS: Final = ("drawn", "ended", "abandoned")


class SequenceSource:
    """Rows that can be read by their number."""

    def __init__(self, rows: Sequence[Any], *, shuffle: bool, seed: int) -> None:
        self.rows = rows
        self.num_rows = len(rows)
        self._shuffle = shuffle
        self._seed = seed

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Row ids in the order of an epoch, each with its index in ``rows``."""
        order: Iterable[int] = range(self.num_rows)
        if self._shuffle:
            permutation = np.random.default_rng([self._seed, number]).permutation(self.num_rows)
            order = permutation.tolist()
        return ((index, index) for index in order[start:])  # type: ignore[index]


class StreamSource:
    """Rows that can only be walked through, from the beginning, as often as needed."""

    # The row id is the place in the stream. Shuffling holds `buffer_size` rows and draws from them.

    num_rows = None
    rows = None
    """A row can't be read by its number: it is handed on itself."""

    def __init__(
        self,
        walk: Callable[[int], Iterator[Any]],
        *,
        shuffle: bool,
        buffer_size: int,
        seed: int,
    ) -> None:
        self._walk = walk
        self._shuffle = shuffle
        self._buffer_size = buffer_size
        self._seed = seed

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Row ids and rows, see :meth:`SequenceSource.epoch`; all are read, those left out too."""
        rows = enumerate(self._walk(number))
        order = self._from_buffer(rows, number) if self._shuffle else rows
        for place, item in enumerate(order):
            if place >= start:
                yield item

    def _from_buffer(
        self, rows: Iterator[tuple[int, Any]], number: int
    ) -> Iterator[tuple[int, Any]]:
        random = np.random.default_rng([self._seed, number])
        buffer: list[tuple[int, Any]] = []
        for row in rows:
            if len(buffer) < self._buffer_size:
                buffer.append(row)
                continue
            place = int(random.integers(len(buffer)))
            yield buffer[place]
            buffer[place] = row
        random.shuffle(buffer)  # type: ignore[arg-type]
        yield from buffer


def open_source(
    rows: Any, *, shuffle: bool, buffer_size: int, seed: int
) -> SequenceSource | StreamSource:
    """The source of a sequence, of what can be iterated again and again, or of a function."""
    if hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not isinstance(rows, Mapping):
        if len(rows) == 0:
            raise ValueError("DataLoadingPrimer: the data set has no rows.")
        return SequenceSource(rows, shuffle=shuffle, seed=seed)
    walk = _walk_of(rows, seed)
    if next(walk(0), None) is None:
        raise ValueError("DataLoadingPrimer: the data set has no rows.")
    return StreamSource(walk, shuffle=shuffle, buffer_size=buffer_size, seed=seed)


def _walk_of(rows: Any, seed: int) -> Callable[[int], Iterator[Any]]:
    if callable(rows) and not isinstance(rows, Iterable):
        return lambda epoch: _rows_of(rows(), epoch, seed)
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping | str | bytes):
        raise TypeError(
            "DataLoadingPrimer takes a data set of datasets, a sequence or an iterable of "
            f"dictionaries, a torch DataLoader, a hub id or a path, got {type(rows).__name__}."
        )
    if not hasattr(rows, "batch_size") and iter(rows) is rows:
        raise ValueError(
            f"DataLoadingPrimer: this {type(rows).__name__} can be walked through only once, so "
            "there is no second epoch and no resuming. Pass a list, an object whose __iter__ "
            "starts anew, or a function that returns a fresh iterator."
        )
    return lambda epoch: _rows_of(rows, epoch, seed)


def _rows_of(rows: Any, epoch: int, seed: int) -> Iterator[Any]:
    if hasattr(rows, "set_epoch"):
        rows.set_epoch(epoch)
    if isinstance(rows, torch.utils.data.DataLoader):
        yield from _loader_rows(rows, epoch, seed)
    elif getattr(rows, "batch_size", None):
        for batch in rows:
            yield from _taken_apart(batch)
    else:
        yield from rows


def _loader_rows(loader: torch.utils.data.DataLoader[Any], epoch: int, seed: int) -> Iterator[Any]:
    """The rows of a DataLoader; what it draws at random depends on seed and epoch only."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_mixed(seed, epoch))
        if loader.generator is not None:
            loader.generator.manual_seed(_mixed(seed, epoch))
        batches = iter(loader)
        first = next(batches, None)
    if first is None:
        return
    is_batched = loader.batch_size is not None or loader.batch_sampler is not None
    for batch in chain([first], batches):
        yield from _taken_apart(batch) if is_batched else [batch]


def _mixed(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])


def _taken_apart(batch: Any) -> Iterator[Any]:
    """The rows of a batch: a list of rows, or columns of equal length."""
    if not isinstance(batch, Mapping):
        yield from batch
        return
    columns = {
        name: column.tolist() if isinstance(column, torch.Tensor) else list(column)
        for name, column in batch.items()
    }
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


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


class Frontier:
    """Follows the groups that are under way, and counts rollouts."""

    # `drawn == ended + abandoned + in flight` holds after every event.

    def __init__(self) -> None:
        self._open: dict[Place, int] = {}
        self._ended_after: set[Place] = set()
        self._last: Place = (-1, -1)
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)

    @property
    def num_in_flight(self) -> int:
        """Rollouts that were drawn and have neither ended nor been abandoned."""
        return self.counts["drawn"] - self.counts["ended"] - self.counts["abandoned"]

    def open(self, place: Place, size: int) -> None:
        """A group was drawn, of as many rollouts."""
        self._open[place] = size
        self._last = max(self._last, place)

    def draw(self) -> None:
        """A rollout of an open group begins."""
        self.counts["drawn"] += 1

    def close(self, place: Place, how: str) -> None:
        """A rollout is over: ``"ended"``, or ``"abandoned"`` by a reset before its end."""
        self.counts[how] += 1
        self._open[place] -= 1
        if not self._open[place]:
            del self._open[place]
            self._ended_after.add(place)
            first = min(self._open, default=self._last)
            self._ended_after = {p for p in self._ended_after if p > first}

    def has_ended(self, place: Place) -> bool:
        """Whether a group after the frontier is done, here or before the state was saved."""
        return place in self._ended_after

    def state(self, next_place: Place) -> dict[str, Any]:
        """What a resumed run needs: it draws again what was under way, and nothing that ended."""
        counts = {**self.counts, "drawn": self.counts["drawn"] - self.num_in_flight}
        return {
            "next": list(min(self._open, default=next_place)),
            "ended_after": sorted(map(list, self._ended_after)),
            "counts": counts,
        }

    def load(self, state: dict[str, Any]) -> Place:
        """Take a state over; gives the place to go on from."""
        self._open = {}
        self._last = (-1, -1)
        self._ended_after = {(int(epoch), int(place)) for epoch, place in state["ended_after"]}
        self.counts = {name: int(state["counts"][name]) for name in COUNTS}
        epoch, place = state["next"]
        return int(epoch), int(place)

"""Sources of rows: a sequence that is indexed, or a stream that is walked through.

:class:`RowStream` gives those of all epochs in order, prepared here or in worker processes;
:class:`Frontier` knows which groups have ended: where a resumed run goes on.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from .options import DataOptions
from .prepare import MadeRow, prepare_row
from .prepared_rows import prepared, sendable
from .tables import TableStream, plain_row, without_nulls

Place = tuple[int, int]
"""Epoch, and place in the order of the epoch."""
COUNTS: Final = ("drawn", "ended", "abandoned")


def _rows_of(rows: Any, seed: int, epoch: int) -> Iterator[Any]:
    """The rows of a stream, or of what a function returns; batches are taken apart."""
    table = without_nulls(getattr(rows, "dataset", None))  # of a torch DataLoader
    is_table = isinstance(rows, torch.utils.data.DataLoader) and isinstance(table, TableStream)
    found = _separate_rows(rows, seed, epoch)
    return (plain_row(row, table.features) for row in found) if is_table else found


def _separate_rows(rows: Any, seed: int, epoch: int) -> Iterator[Any]:
    rows = without_nulls(rows() if callable(rows) and not isinstance(rows, Iterable) else rows)
    if hasattr(rows, "set_epoch"):
        rows.set_epoch(epoch)
    is_batched, batches = getattr(rows, "batch_size", None), rows
    if isinstance(rows, torch.utils.data.DataLoader):
        is_batched = is_batched or rows.batch_sampler is not None
        # What it draws at random depends on seed and epoch only.
        state = int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(state)
            if rows.generator is not None:
                rows.generator.manual_seed(state)
            batches = iter(rows)
            first = list(islice(batches, 1))
        batches = chain(first, batches)
    for batch in batches:
        if not is_batched:
            yield batch
        elif isinstance(batch, Mapping):
            columns = [c.tolist() if isinstance(c, torch.Tensor) else c for c in batch.values()]
            for values in zip(*columns, strict=True):
                yield dict(zip(batch, values, strict=True))
        else:
            yield from batch


class NumberedRows(list[Any]):
    """Rows of a data set, or values of them."""

    numbers: Sequence[int] = ()
    """Of each, in that data set."""
    note: str = ""
    """What has to be known of them."""


class Item(NamedTuple):
    """A row and its place."""

    epoch: int
    place: int
    """In the order of the epoch."""
    drawn_id: int
    """Its number among the rows that are drawn from: the same in every order."""
    row_id: int
    """Its number in the user's data, where other rows may have been held out of them."""
    row: MadeRow


@dataclass(eq=False)
class RowStream:
    """An iterator over the rows of all epochs, whose position can be read and set."""

    # Rows are read by their number; those of a stream, which begins anew for each epoch, can't be,
    # so that `num_rows` is None. Shuffling a stream holds `buffer_size` rows and draws from them.
    # The order does not depend on the number of workers.

    data: Any
    map_row: Callable[[dict[str, Any]], Mapping[str, Any]] | None
    options: DataOptions
    _: KW_ONLY
    shuffle: bool
    seed: int
    num_epochs: int | None
    num_workers: int
    position: Place = (0, 0)
    """Epoch and place of the next item."""

    def __post_init__(self) -> None:
        data = self.data
        is_sequence = hasattr(data, "__len__") and hasattr(data, "__getitem__")
        rows: Sequence[Any] | None = None
        if is_sequence and not isinstance(data, Mapping):
            rows = data
        elif isinstance(data, Mapping | str | bytes) or not (
            callable(data) or isinstance(data, Iterable)
        ):
            raise TypeError(
                "DataLoadingPrimer takes a data set of datasets, a sequence or an iterable of "
                f"dictionaries, a torch DataLoader, a hub id or a path, got {type(data).__name__}."
            )
        elif isinstance(data, Iterable) and not hasattr(data, "batch_size") and iter(data) is data:
            raise ValueError(
                f"DataLoadingPrimer: this {type(data).__name__} can be walked through only once, "
                "so there is no second epoch and no resuming. Pass a list, an object whose "
                "__iter__ starts anew, or a function that returns a fresh iterator."
            )
        self.num_rows = None if rows is None else len(rows)
        numbers: Sequence[int] = getattr(data, "numbers", ())
        self.number: Callable[[int], int] = numbers.__getitem__ if numbers else int
        """Gives a row's number in the user's data for that among the rows here."""
        self._walk = partial(_rows_of, data, self.seed)
        if self.num_rows == 0 or (rows is None and next(self._walk(0), None) is None):
            raise ValueError("DataLoadingPrimer: the data set has no rows.")
        self._prepare = partial(prepare_row, rows, self.map_row)
        if self.num_workers:
            sendable(self._prepare)
        self._items: Any = None

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Numbers of the rows here in the order of an epoch, each with the key of its row."""
        # Of a stream all rows are read, those before the start too.
        random = np.random.default_rng([self.seed, number])
        if self.num_rows is None:
            rows = enumerate(self._walk(number))
            return islice(self._from_buffer(rows, random) if self.shuffle else rows, start, None)
        order: Any = range(self.num_rows)
        if self.shuffle:
            order = random.permutation(self.num_rows).tolist()
        return ((index, index) for index in order[start:])

    def sample(self, count: int) -> Iterator[tuple[int, MadeRow]]:
        """Numbered rows, spread evenly over the data, prepared here; of a stream the first."""
        if self.num_rows is None:
            keys = islice(self.epoch(0), min(count, 1))
        else:
            ids = np.linspace(0, self.num_rows - 1, min(count, self.num_rows)).round()
            keys = ((row_id, row_id) for row_id in ids.astype(int).tolist())
        return ((self.number(row_id), self._prepare(key)) for row_id, key in keys)

    def _from_buffer(
        self, rows: Iterator[tuple[int, Any]], random: np.random.Generator
    ) -> Iterator[tuple[int, Any]]:
        buffer: list[tuple[int, Any]] = []
        for row in rows:
            if len(buffer) < self.options.shuffle_buffer_size:
                buffer.append(row)
                continue
            place = int(random.integers(len(buffer)))
            yield buffer[place]
            buffer[place] = row
        random.shuffle(buffer)  # type: ignore[arg-type]
        yield from buffer

    def seek(self, epoch: int, place: int) -> None:
        """Stop the workers, and go on from an item when the next one is asked for."""
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
            about = {"num_workers": self.num_workers, "timeout_s": self.options.worker_timeout_s}
            self._items = prepared(self._order(), self._prepare, **about)
        try:
            where, row = next(self._items)
        except StopIteration:
            raise
        except BaseException:
            self._items = None  # the next call goes on from here
            raise
        item = Item(*where, row_id=self.number(where[-1]), row=row)
        self.position = (item.epoch, item.place + 1)
        return item

    def _order(self) -> Iterator[tuple[tuple[int, int, int], Any]]:
        epoch, start = self.position
        while self.num_epochs is None or epoch < self.num_epochs:
            place = start - 1
            for place, (drawn_id, key) in enumerate(self.epoch(epoch, start=start), start):
                yield (epoch, place, drawn_id), key
            if place < 0:
                raise RuntimeError(
                    f"DataLoadingPrimer: epoch {epoch} of the data set has no rows, though the "
                    "first one had. Its iterator does not start anew; pass a function that "
                    "returns a fresh one."
                )
            epoch, start = epoch + 1, 0


@dataclass(eq=False)
class Frontier:
    """Follows the groups that are under way, and counts rollouts."""

    # `drawn == ended + abandoned + in flight` holds after every event.

    _open: dict[Place, int] = field(default_factory=dict)
    _ended_after: set[Place] = field(default_factory=set)
    _last: Place = (-1, -1)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))

    @property
    def num_in_flight(self) -> int:
        """Rollouts that were drawn and have neither ended nor been abandoned."""
        return self.counts["drawn"] - self.counts["ended"] - self.counts["abandoned"]

    def open(self, place: Place, size: int) -> None:
        """A group was drawn, of as many rollouts."""
        self._open[place] = size
        self._last = max(self._last, place)

    def begin(self, place: Place) -> Callable[[str], None]:
        """A rollout of an open group begins; gives what is to be called at its end."""
        self.counts["drawn"] += 1
        return partial(self.close, place)

    def close(self, place: Place, reason: str) -> None:
        """A rollout has ended, for a reason, or was abandoned by a reset, without one."""
        self.counts["ended" if reason else "abandoned"] += 1
        self._open[place] -= 1
        if not self._open[place]:
            del self._open[place]
            self._ended_after.add(place)
            first = min(self._open, default=self._last)
            self._ended_after = {p for p in self._ended_after if p > first}

    def has_ended(self, place: Place) -> bool:
        """Return whether a group after the frontier is done, here or before the state was saved."""
        return place in self._ended_after

    def state(self, next_place: Place) -> dict[str, Any]:
        """State for a resumed run: it draws again the rows under way, and none that ended."""
        counts = {**self.counts, "drawn": self.counts["drawn"] - self.num_in_flight}
        return {
            "next": list(min(self._open, default=next_place)),
            "ended_after": sorted(map(list, self._ended_after)),
            "counts": counts,
        }

    def load(self, state: dict[str, Any]) -> Place:
        """Take a state over, before the first draw; gives the place to go on from."""
        self._ended_after = {(int(epoch), int(place)) for epoch, place in state["ended_after"]}
        self.counts = {name: int(state["counts"][name]) for name in COUNTS}
        epoch, place = state["next"]
        return int(epoch), int(place)

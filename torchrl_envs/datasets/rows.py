"""Rows of data: loaded, prepared in workers, checked, and drawn in an order that can be resumed."""

import hashlib
import json
import logging
import pickle
import re
import sys
import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import cloudpickle
import numpy as np
import torch

from torchrl_data.checks import POSITIVE, check_counts, check_not_none, check_numbers
from torchrl_data.conversation import Conversations
from torchrl_data.images import images_of, with_plain_images
from torchrl_data.messages import begun_turn, check_messages
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_envs.concurrency import CallTimeoutError, DaemonThreads
from torchrl_envs.processes import ToolProcessError, WorkerPool, WorkerStartError

from . import DATA_FILES, check_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Data sets by name: a hub id or a local path.

SKIP: Final = "skip_bad_rows=True (of a recipe task.skip_bad_rows=true, of sft data.skip_bad_rows)"
"""What a message offers for rows that can't be used."""
_log = logging.getLogger(__name__)


def load_rows(
    source: Any,
    *,
    name: str | None = None,
    split: str | None = None,
    streaming: bool = False,
    load_options: Mapping[str, Any] | None = None,
    skip_bad_rows: bool = False,
) -> Any:
    """Load a data set, for :class:`~torchrl_envs.DataLoadingPrimer` or to look at.

    What Arrow adds to the rows of a table is not in them: see :class:`TableRows`.

    Args:
        source: a folder that ``save_to_disk`` wrote, another folder or a file (JSON lines, CSV,
            Parquet, Arrow, text), or else an id on the hub. Several splits by name give one of
            them; a data set of ``datasets`` gives its rows, and other data come back as they are.
        name: of the configuration.
        split: which; the only one, or ``"train"``, when not given.
        streaming: read while iterating instead of loading first.
        load_options: passed to ``datasets.load_dataset``.
        skip_bad_rows: leave out lines of a file of JSON lines that can't be read, and log them.

    Raises:
        ValueError: a file is empty or can't be read, and the message names the first bad line of
            a file of JSON lines; no split is given and there are several, none of them
            ``"train"``; or an option does not apply to the source.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "rows.jsonl")
        ...     _ = path.write_text('{"prompt": "2 + 2?", "answer": "4"}')
        ...     rows = load_rows(path)
        >>> rows[0]
        {'prompt': '2 + 2?', 'answer': '4'}
    """
    path = Path(source) if isinstance(source, str | Path) else None
    if path is None or any((path / f"dataset_{kind}.json").exists() for kind in ("info", "dict")):
        rows = source if path is None else import_module("datasets").load_from_disk(str(path))
        columns = isinstance(rows, Mapping) and any(isinstance(v, list) for v in rows.values())
        has_splits = isinstance(rows, Mapping) and not columns
        if name is not None or streaming or load_options or (not path and split and not has_splits):
            what = type(source).__name__ if path is None else f"{path}, where they do not apply"
            raise ValueError(
                "load_rows: name=, streaming= and load_options= are for a hub id or a path, and "
                f"split= is for a hub id, a path or several splits, got {what}."
            )
        return _pick_split(rows, split) if has_splits else without_nulls(rows)
    import datasets.exceptions

    options = {"name": name, "split": split, "streaming": streaming, **(load_options or {})}
    if path.is_file():
        builder = DATA_FILES.get(path.suffix)
        if builder is None:
            raise ValueError(f"{source} is no data file that is known: {sorted(DATA_FILES)}.")
        if builder == "json" and split in (None, "train") and not (streaming or load_options):
            rows = rows_of_json(path, skip_bad_rows=skip_bad_rows)
            return list(rows) if path.stat().st_size <= _HELD_BYTES else rows
        try:
            loaded = datasets.load_dataset(builder, data_files=str(path), **options)
        except (datasets.exceptions.DatasetGenerationError, ValueError, StopIteration) as error:
            why = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
            raise ValueError(f"{path} can't be read: {why}. Mend it.") from error
        return _pick_split(loaded, split)
    check_source(source, DATA_FILES)
    return _pick_split(datasets.load_dataset(str(source), **options), split)


_HELD_BYTES: Final = 1 << 26
"""Of a file of JSON; the rows of a larger one stay on the disk."""
_READ_BYTES: Final = 1 << 22
_COMMA: Final = re.compile(r"\s*,\s*")


@dataclass(eq=False, repr=False)
class LazyRows(Sequence[dict[str, Any]]):
    """Rows that are made when they are read, by any thread or process.

    Args:
        make: gives a row, from its two numbers.
        places: the numbers, int64 ``[N, 2]``.
        columns: that a row may have.
        digest: of what the rows hold and of their order, where it is known.
    """

    make: Callable[[int, int], Mapping[str, Any]]
    places: np.ndarray
    columns: Mapping[str, None]
    digest: str = ""

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        return dict(self.make(*self.places[number].tolist()))

    def select(self, numbers: Sequence[int]) -> "LazyRows":
        """Some of the rows.

        Args:
            numbers: which, in the order that they are to have.
        """
        places = self.places[list(numbers)]
        digest = hashlib.sha256(self.digest.encode() + places.tobytes()).hexdigest()
        return replace(self, places=places, digest=digest)


def rows_of_json(path: Path, *, skip_bad_rows: bool = False) -> LazyRows:
    """Rows of a file of JSON lines, or of one list, with the values that are written there.

    Only the places of the rows are held in memory, so the file must stay as it is. (The loader of
    ``datasets`` makes dates of strings that look so, numbers of some strings in a column that also
    has numbers, and 1.0 of 1 where another row has 2.5.)
    """
    path = path.resolve()
    read = partial(_parsed, path, path.stat().st_mtime_ns)
    places, columns = array("q"), dict[str, None]()
    bad, digest = list[str](), hashlib.sha256()
    with path.open("rb") as file:
        for number, (begin, line) in enumerate(_written_rows(path, file), 1):
            try:
                if text := line.decode("utf-8-sig").strip():
                    row = json.loads(text)
                    if "\\u" in text:
                        json.dumps(row, ensure_ascii=False).encode()  # no half of a character
                    if not isinstance(row, dict):
                        raise ValueError(f"{text:.40} is no object with columns")
                    columns |= dict.fromkeys(row)
                    places.extend((begin, len(line)))
                    digest.update(line.strip())
            except ValueError as error:
                bad.append(f"line {number}: {error}")
    if not places or (bad and not skip_bad_rows):
        hint = f", or leave such lines out with {SKIP}" if places else ""
        found = bad[0] if bad else "it holds no rows"
        raise ValueError(f"{path} can't be read: {found}. Mend it{hint}.")
    if bad:
        _log.warning("%s: %d lines are left out: %s", path, len(bad), "; ".join(bad[:5]))
    return LazyRows(read, np.array(places).reshape(-1, 2), columns, digest.hexdigest())


def _parsed(path: Path, written_ns: int, begin: int, size: int) -> dict[str, Any]:
    """A row of a file that has not been written to since."""
    with path.open("rb") as file:
        file.seek(begin)
        line = file.read(size)
    if path.stat().st_mtime_ns != written_ns:
        raise ValueError(f"{path} was changed after it was loaded")
    return json.loads(line.decode("utf-8-sig"))


def _written_rows(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Where each line begins, and what it says; or each element, if the file is one list."""
    text = file.read(_READ_BYTES).decode("latin-1")  # a character for each byte
    if not text.lstrip().startswith("["):
        begin = file.seek(0)
        for lines in file:
            for line in lines.splitlines(keepends=True):  # a carriage return may end one, too
                yield begin, line
                begin += len(line)
        return
    text, passed, at = text.replace("[", ",", 1), 0, 0
    while True:
        comma = _COMMA.match(text, at)
        begin = comma.end() if comma else len(text)
        try:
            _, end = json.JSONDecoder().raw_decode(text, begin)
        except ValueError as error:
            if more := file.read(max(_READ_BYTES, len(text) - at)):  # the element may go on there
                text, passed, at = text[at:] + more.decode("latin-1"), passed + at, 0
                continue
            if text[at:].strip() != "]":
                what = f"its list breaks off after byte {passed + at}: {error}"
                raise ValueError(f"{path} can't be read: {what}. Mend it.") from error
            return
        yield passed + begin, text[begin:end].encode("latin-1")
        at = end


def _pick_split(loaded: Any, split: str | None) -> Any:
    """One split of what may hold several: the one named, the only one, or ``"train"``."""
    if not isinstance(loaded, Mapping):
        return without_nulls(loaded)
    if split is None:
        split = next(iter(loaded)) if len(loaded) == 1 else "train"
    if split not in loaded:
        raise ValueError(f"There is no split {split!r}; there are {sorted(loaded)}. Name one.")
    return without_nulls(loaded[split])


# Rows of tables, without the nulls that a table adds to them.


@dataclass(eq=False, repr=False)
class TableStream(Iterable[dict[str, Any]]):
    """The rows of a streamed table of ``datasets``, without the nulls that Arrow adds.

    Attributes that it lacks are those of the table.

    Args:
        table: a ``datasets.IterableDataset``, or a ``datasets.Dataset``.
    """

    table: Any

    @property
    def columns(self) -> Sequence[str]:
        """That a row may have, as far as they are known."""
        return self.table.column_names or ()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        features = getattr(self.table, "features", None)
        return (plain_row(row, features) for row in self.table)

    def __getattr__(self, name: str) -> Any:
        if name == "table" or name.startswith("__"):  # while it is copied, it has none yet
            raise AttributeError(name)
        return getattr(self.table, name)


class TableRows(TableStream, Sequence[dict[str, Any]]):
    """The rows of a table of ``datasets``, without the nulls that Arrow adds.

    In a table each row has all columns, and each dictionary all keys that one at its place has:
    what a row lacks is null. Such columns and keys are left out, at any depth. Elements of lists
    and what is inside of a column of the type ``Json`` stay as they are. Whether somebody wrote a
    null himself can't be told in a table; in a file of JSON it can, and stays.

    Args:
        table: a ``datasets.Dataset``.

    Example:
        >>> from datasets import Dataset
        >>> calls = [{"name": "look", "arguments": {"key": "p"}}, {"arguments": {"a": 1}}]
        >>> table = Dataset.from_list([{"call": call} for call in calls])
        >>> table[0]["call"]
        {'name': 'look', 'arguments': {'key': 'p', 'a': None}}
        >>> [row["call"] for row in load_rows(table)] == calls
        True
    """

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return [row[key] for row in self]
        if isinstance(key, slice):
            return [self[number] for number in range(*key.indices(len(self)))]
        return plain_row(self.table[int(key)], self.table.features)

    def select(self, numbers: Sequence[int]) -> "TableRows":
        """Some of the rows.

        Args:
            numbers: which, in the order that they are to have.
        """
        return TableRows(self.table.select(numbers))


def without_nulls(rows: Any) -> Any:
    """The rows of a table of ``datasets`` as they were before it had them; others as they are."""
    library: Any = sys.modules.get("datasets")  # who has such a table has imported it
    if library is not None and isinstance(rows, library.Dataset):
        return TableRows(rows)
    if library is not None and isinstance(rows, library.IterableDataset):
        return TableStream(rows)
    return rows


def plain_row(row: Any, features: Mapping[str, Any] | None) -> Any:
    """A row of a table without the nulls that Arrow adds, see :class:`TableRows`.

    Args:
        row: of the table.
        features: of the table; ``None`` where they are not known: then every dictionary may be
            Arrow's.
    """
    if not isinstance(row, Mapping):
        return row  # of a table with another format, which is refused where it is used
    return {
        column: _plain(value, _ANY if features is None else features.get(column))
        for column, value in row.items()
        if value is not None
    }


_ANY: Final = object()
"""Stands for a feature that is not known."""


def _plain(value: Any, feature: Any) -> Any:
    """A value of a table without the keys that Arrow adds."""
    is_struct = feature is _ANY or isinstance(feature, Mapping)
    if is_struct and isinstance(value, Mapping):
        known = dict.fromkeys(value, _ANY) if feature is _ANY else feature
        return {k: _plain(each, known.get(k)) for k, each in value.items() if each is not None}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        inner = _ANY if feature is _ANY else inner
        return value if inner is None else [_plain(each, inner) for each in value]
    return value


def one_of(*, default: Any = None, **choices: Any) -> Any:
    """The value of the one of several names that was used; not more than one may be."""
    used = {name: value for name, value in choices.items() if value is not None}
    if len(used) > 1 or (not used and default is None):
        raise ValueError(f"DataLoadingPrimer: give one of {', '.join(choices)}, got {len(used)}.")
    return next(iter(used.values()), default)


# Settings of how data are read that most users leave as they are.


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How a :class:`~torchrl_envs.DataLoadingPrimer` reads and checks its rows.

    Args:
        shuffle_buffer_size: rows that a stream draws from when it is shuffled.
        worker_timeout_s: how long a worker may take for its next rows.
        num_checked_rows: rows of a sequence that are checked before anything runs, spread evenly
            over it if it is longer. A row that is found bad later is skipped.
        skip_bad_rows: skip bad rows that are found before anything runs, too.

    Raises:
        ValueError: a number is out of range.
    """

    shuffle_buffer_size: int = 1000
    worker_timeout_s: float = 300.0
    num_checked_rows: int = 10_000
    skip_bad_rows: bool = False

    def __post_init__(self) -> None:
        check_not_none("DataOptions", **vars(self))
        check_counts("DataOptions", shuffle_buffer_size=self.shuffle_buffer_size)
        check_counts("DataOptions", 0, num_checked_rows=self.num_checked_rows)
        check_numbers("DataOptions", POSITIVE, worker_timeout_s=self.worker_timeout_s)


# How a row is made; what worker processes import of this package, and no more.


class BadRow(NamedTuple):
    """A row that could not be prepared."""

    reason: str


MadeRow = dict[str, Any] | BadRow
Prepare = Callable[[Any], MadeRow]
"""Makes a row by its key: :func:`prepare_row` of a data set."""


def prepare_row(
    rows: Sequence[Any] | None,
    function: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
    key: Any,
) -> MadeRow:
    """The row of a key, which without rows is the row, after the user's function; or why not."""
    try:
        row = key if rows is None else rows[key]
        if function is not None:
            row = function(dict(row) if isinstance(row, Mapping) else row)
    except Exception as error:  # the data's reader and the user's function
        return BadRow(f"{type(error).__name__}: {error}")
    if not isinstance(row, Mapping):
        return BadRow(f"the row is a {type(row).__name__}, not a dictionary: {row!r:.80}")
    return dict(row)


def prepare_rows(prepare: Prepare, request: bytes) -> bytes:
    """In a worker: pickled keys to a list of rows, each pickled."""
    sent = []
    for key in pickle.loads(request):
        row = prepare(key)
        try:
            sent.append(pickle.dumps(row))
        except Exception as error:  # the code of the user's objects
            reason = f"it can't be sent from its worker process: {type(error).__name__}: {error}"
            sent.append(pickle.dumps(BadRow(reason)))
    return pickle.dumps(sent)


# Rows that worker processes prepare, some chunks ahead, in order.

_Key = TypeVar("_Key")
_CHUNK: Final = 8
"""Rows that a worker prepares at a time."""
_CHUNKS_AHEAD: Final = 2
"""For each worker."""


def prepared(
    order: Iterator[tuple[_Key, Any]], prepare: Prepare, *, num_workers: int, timeout_s: float
) -> Generator[tuple[_Key, MadeRow], None, None]:
    """Rows in their order, made here or by workers, which end with the iterator."""
    if not num_workers:
        yield from ((place, prepare(key)) for place, key in order)
        return
    # A row of which a worker dies, or which takes too long, is a bad row, and no other is.
    pool = WorkerPool(sendable(prepare), num_processes=num_workers, timeout_s=timeout_s)
    threads = DaemonThreads(num_workers)
    closed = threading.Event()
    waiting: deque[tuple[tuple[_Key, ...], Future[Any]]] = deque()
    chunks = iter(lambda: list(islice(order, _CHUNK)), [])
    try:
        while True:
            for chunk in islice(chunks, _CHUNKS_AHEAD * num_workers - len(waiting)):
                places, keys = zip(*chunk, strict=True)
                waiting.append((places, threads.submit(partial(_ask, pool, keys, closed))))
            if not waiting:
                return
            places, rows = waiting.popleft()
            yield from zip(places, rows.result(), strict=True)
    finally:
        closed.set()
        pool.close()
        threads.close()


def sendable(prepare: Prepare) -> bytes:
    """What a worker gets; functions of the program itself are sent whole, others by their name."""
    try:
        return cloudpickle.dumps(partial(prepare_rows, prepare))
    except Exception as error:  # the code of the user's objects
        raise ValueError(
            "DataLoadingPrimer: with num_workers, the data and map_row are sent to worker "
            f"processes, and these can't be: {type(error).__name__}: {error}. Use num_workers=0, "
            "or open what they hold inside map_row."
        ) from error


def _ask(
    pool: WorkerPool, keys: Sequence[Any], closed: threading.Event, *, alone: bool = False
) -> list[MadeRow]:
    """The rows of some keys; where that fails, each is tried alone, and may fail alone."""
    if alone and closed.is_set():
        return [BadRow("the workers were closed")]
    try:
        return [pickle.loads(row) for row in pickle.loads(pool.ask(pickle.dumps(keys)))]
    except WorkerStartError:
        raise
    except (ToolProcessError, CallTimeoutError) as error:
        if alone:
            return [BadRow(f"a worker process could not prepare it: {error}")]
        return [row for key in keys for row in _ask(pool, [key], closed, alone=True)]


# Where rows come from: a sequence that is indexed, or a stream that is walked through.
#
# :class:`RowStream` gives those of all epochs in order, prepared here or in worker processes;
# :class:`Frontier` knows which groups have ended: where a resumed run goes on.

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
    row_id: int
    """Its number in the data set: the same in every order."""
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
        """How a row is called in messages: its number in the user's data."""
        self._walk = partial(_rows_of, data, self.seed)
        if self.num_rows == 0 or (rows is None and next(self._walk(0), None) is None):
            raise ValueError("DataLoadingPrimer: the data set has no rows.")
        self._prepare = partial(prepare_row, rows, self.map_row)
        if self.num_workers:
            sendable(self._prepare)
        self._items: Any = None

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Row ids in the order of an epoch, each with the key of its row."""
        # The id is the number of the row in the data. Of a stream all rows are read, those before
        # the start too.
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
        item = Item(*where, row=row)
        self.position = (item.epoch, item.place + 1)
        return item

    def _order(self) -> Iterator[tuple[tuple[int, int, int], Any]]:
        epoch, start = self.position
        while self.num_epochs is None or epoch < self.num_epochs:
            place = start - 1
            for place, (row_id, key) in enumerate(self.epoch(epoch, start=start), start):
                yield (epoch, place, row_id), key
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
        """Take a state over, before the first draw; gives the place to go on from."""
        self._ended_after = {(int(epoch), int(place)) for epoch, place in state["ended_after"]}
        self.counts = {name: int(state["counts"][name]) for name in COUNTS}
        epoch, place = state["next"]
        return int(epoch), int(place)


# What a row must be to begin an episode, and what to say of one that is not.

RowCheck = Callable[[Mapping[str, Any]], str]
"""What is wrong with a row; ``""`` if nothing is."""

PROMPT_COLUMNS: Final = ("prompt", "query", "question", "messages", "text")
"""Where the prompt is looked for when no column is named."""
MAX_SKIPPED: Final = 1000
"""Skipped rows that are remembered one by one."""


class SkippedRow(NamedTuple):
    """A row that was not used."""

    epoch: int
    row_id: int
    reason: str


@dataclass
class SkippedRows:
    """The rows that were not used: the last ones, and how many there were by kind of reason."""

    rows: deque[SkippedRow] = field(default_factory=partial(deque, maxlen=MAX_SKIPPED))
    counts: Counter[str] = field(default_factory=Counter)


def columns_of(
    first: Iterable[tuple[int, MadeRow]], others: Iterable[Any], declared: Iterable[str]
) -> tuple[str, ...]:
    """The columns that rows have, those of the first row that can be read first.

    Args:
        first: rows until one can be read.
        others: further rows; what is none is left out.
        declared: columns that the data are known to have.
    """
    reason = ""
    for row_id, row in first:
        if not isinstance(row, BadRow):
            more = [column for each in others if isinstance(each, Mapping) for column in each]
            return tuple(dict.fromkeys([*row, *declared, *more]))
        reason = reason or f"row {row_id}: {row.reason}"
    raise ValueError(f"DataLoadingPrimer: none of the rows can be read; {reason}.")


def find_prompt_column(columns: Sequence[str], asked: str | None) -> str:
    """The column that holds the prompt."""
    candidates = PROMPT_COLUMNS if asked is None else (asked,)
    for column in candidates:
        if column in columns:
            return column
    wanted = " or ".join(map(repr, candidates))
    raise ValueError(
        f"DataLoadingPrimer: the data set has no prompt column {wanted}; its columns are "
        f"{list(columns)}. Name the one that holds the prompt with prompt_column=."
    )


def prompt_error(row: Mapping[str, Any], column: str) -> str:
    """What is wrong with a row's prompt: it is a string or a list of messages, and is text."""
    if column not in row:
        return f"it has no column {column!r}; it has {sorted(map(str, row))}"
    value = row[column]
    if isinstance(value, list) and value:
        try:
            check_messages(value)
            images_of(value)
            if value[-1]["role"] == "assistant" and not begun_turn(value):
                return (
                    f"column {column!r}: it ends with a message of the assistant in which the "
                    "policy can't go on, for it has no text, or calls tools. Leave that message out"
                )
        except (TypeError, ValueError) as error:
            return f"column {column!r}: {error}"
    elif not isinstance(value, str):
        found = f"{type(value).__name__}: {value!r:.80}"
        return f"column {column!r} must hold strings or lists of messages, got {found}"
    return "" if is_text(value) else f"column {column!r} is not text: it can't be encoded as UTF-8"


def column_error(
    who: str,
    columns: Sequence[str],
    of: Callable[[Mapping[str, Any]], bool] | None,
    row: Mapping[str, Any],
) -> str:
    """That a row lacks columns which somebody needs, or ``""``."""
    missing = [column for column in columns if column not in row]
    if not missing or not (of is None or of(row)):
        return ""
    return f"it lacks {missing}, which {who} needs"


def with_plain_prompt(row: Any, column: str) -> dict[str, Any]:
    """A row whose prompt holds images as plain values: read once for all rollouts of a group."""
    if isinstance(row[column], str):
        return row
    return {**row, column: [with_plain_images(message) for message in row[column]]}


def is_text(value: Any) -> bool:
    """Whether all strings in a value can be encoded; what JSON can't hold is not looked into."""
    try:
        json.dumps(value, ensure_ascii=False, default=lambda _: None, skipkeys=True).encode()
    except UnicodeEncodeError:
        return False
    return True


def row_error(row: MadeRow, checks: Iterable[RowCheck]) -> str:
    """The first thing that is wrong with a row, or ``""``."""
    if isinstance(row, BadRow):
        return row.reason
    return next(filter(None, (check(row) for check in checks)), "")


@dataclass(eq=False, repr=False)
class PromptLimit:
    """Most tokens that a prompt may have, as the conversation that it opens.

    The system prompt and the chat template count, schemas of tools do not.

    Args:
        max_tokens: rows with a longer prompt are skipped.
        tokenizer: counts.
        chat_template_name: with which built-in template; the tokenizer's own when not given.

    Raises:
        ValueError: ``max_tokens`` is no positive number, or there is no such template.

    Example:
        >>> rows = [{"prompt": "2 + 2?"}, {"prompt": "2 + 2? " * 100}]
        >>> data = DataLoadingPrimer(rows, prompt_limit=PromptLimit(64, tokenizer))
        >>> batch = ChatEnv(batch_size=(2,)).append_transform(data).reset()
        >>> [messages[0]["content"] for messages in batch["history"].prompt.to_chats()]
        ['2 + 2?', '2 + 2?']
        >>> data.skipped.counts
        Counter({'too_long': 1})
    """

    max_tokens: int
    tokenizer: "PreTrainedTokenizerBase"
    _: KW_ONLY
    chat_template_name: str | None = None

    def __post_init__(self) -> None:
        check_not_none("PromptLimit", max_tokens=self.max_tokens)
        check_counts("PromptLimit", max_tokens=self.max_tokens)
        named: Any = {"chat_template_name": self.chat_template_name}
        self._encoder = ConversationEncoder(self.tokenizer, **named)

    def error(self, prompt: str | list[dict[str, Any]], system_prompt: str | None) -> str:
        """That a prompt is too long, or ``""``."""
        return length_error(self._encoder, self.max_tokens, prompt, system_prompt)


def length_error(
    encoder: ConversationEncoder,
    max_tokens: int,
    prompt: str | list[dict[str, Any]],
    system_prompt: str | None,
) -> str:
    """That a prompt has more tokens than are allowed, or ``""``."""
    messages = opening_messages(prompt, system_prompt)
    opened = encoder.encode_rows(Conversations.from_messages([messages], goes_on=True))
    length = opened.conversations.num_tokens(
        0
    )  # 0 of one that can't be encoded, which is told then
    if length <= max_tokens:
        return ""
    return f"the prompt has {length} tokens, {max_tokens} are allowed"


def opening_messages(prompt: str | Sequence[Any], system_prompt: str | None) -> list[Any]:
    """The conversation that a prompt opens, after the system prompt unless it has its own."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system_prompt is not None and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return list(messages)

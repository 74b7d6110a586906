"""Rows that worker processes prepare, some chunks ahead, in order."""

import pickle
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

import cloudpickle

from torchrl_envs.concurrency.calls import CallTimeoutError
from torchrl_envs.concurrency.threads import DaemonThreads
from torchrl_envs.processes import ToolProcessError, WorkerPool, WorkerStartError

from .prepare import BadRow, MadeRow, Prepare, prepare_rows

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
    """Form that a worker gets: functions of the program are sent whole, others by their name."""
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

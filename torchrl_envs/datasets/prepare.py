"""Preparation of a row; worker processes import this module, and no more of the package."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


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

"""How a row is made; what worker processes import of this package, and no more."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class BadRow(NamedTuple):
    """A row that could not be prepared."""

    reason: str


class PrepareRow:
    """Fetches a row by its key, which without rows is the row, and applies the user's function.

    It can be sent to a worker process.
    """

    def __init__(
        self,
        rows: Sequence[Any] | None,
        function: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
    ) -> None:
        self._rows = rows
        self._function = function

    def __call__(self, key: Any) -> dict[str, Any] | BadRow:
        """The row, or why there is none: one bad row is no reason to stop."""
        try:
            row = key if self._rows is None else self._rows[key]
            if self._function is not None:
                row = self._function(dict(row) if isinstance(row, Mapping) else row)
        except Exception as error:  # the data's reader and the user's function
            return BadRow(f"{type(error).__name__}: {error}")
        if not isinstance(row, Mapping):
            return BadRow(f"the row is a {type(row).__name__}, not a dictionary: {row!r:.80}")
        return dict(row)


class PrepareRows:
    """In a worker: pickled keys to pickled rows."""

    def __init__(self, prepare: PrepareRow) -> None:
        self._prepare = prepare

    def __call__(self, request: bytes) -> bytes:
        """A list of rows, each pickled."""
        return pickle.dumps([self._sent(self._prepare(key)) for key in pickle.loads(request)])

    @staticmethod
    def _sent(row: dict[str, Any] | BadRow) -> bytes:
        try:
            return pickle.dumps(row)
        except Exception as error:  # the code of the user's objects
            reason = f"it can't be sent from its worker process: {type(error).__name__}: {error}"
            return pickle.dumps(BadRow(reason))

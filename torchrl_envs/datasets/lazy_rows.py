"""Rows of a file that are read when somebody asks for them."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

SKIP: Final = "skip_bad_rows=True (of a recipe task.skip_bad_rows=true, of sft data.skip_bad_rows)"
"""What a message offers for rows that can't be used."""
_log = logging.getLogger(__name__)


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


def part_of(path: Path, written_ns: int, begin: int, size: int) -> bytes:
    """Bytes of a file that has not been written to since it was loaded.

    Args:
        path: of the file.
        written_ns: when it was written.
        begin: where they begin.
        size: how many.

    Raises:
        ValueError: it was changed.
    """
    with path.open("rb") as file:
        file.seek(begin)
        part = file.read(size)
    if path.stat().st_mtime_ns != written_ns:
        raise ValueError(f"{path} was changed after it was loaded")
    return part


def tell_bad_lines(path: Path, bad: Sequence[str], *, num_rows: int, skip: bool) -> None:
    """Refuse a file with lines that can't be read, or log that they are left out.

    Args:
        path: of the file.
        bad: what is wrong, each with the number of the line.
        num_rows: rows that can be read.
        skip: leave the others out.

    Raises:
        ValueError: there is no row, or there are bad lines that are not left out.
    """
    if not num_rows or (bad and not skip):
        hint = f", or leave such lines out with {SKIP}" if num_rows else ""
        found = bad[0] if bad else "it holds no rows"
        raise ValueError(f"{path} can't be read: {found}. Mend it{hint}.")
    if bad:
        _log.warning("%s: %d lines are left out: %s", path, len(bad), "; ".join(bad[:5]))

"""Rows of a file of comma-separated or tab-separated values (RFC 4180), as they are written.

Every value is a text: a table says nothing of types, and what looks like a number may be a postal
code. (The loader of ``datasets`` makes 501 of 00501, 7.0 of 7 where another row has none, and
nothing of NA; and it shifts a row with a comma that is not within quotes.)
"""

import csv
import hashlib
import io
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Final

import numpy as np

from .lazy_rows import LazyRows, part_of, tell_bad_lines

_LONGEST: Final = (1 << 31) - 1
"""Characters of a field."""


def rows_of_csv(path: Path, *, skip_bad_rows: bool = False) -> LazyRows:
    """Rows of a file whose first line names the columns; a field that is empty is none.

    Only the places of the rows are held in memory, so the file must stay as it is.

    Args:
        path: of the file; commas separate the values, and tabs in a ``.tsv``.
        skip_bad_rows: leave out rows that can't be read, and log them.

    Raises:
        ValueError: the file has no rows, its columns have no names of their own, or a row has not
            as many fields as there are columns, and the message names its line.
    """
    path = path.resolve()
    csv.field_size_limit(_LONGEST)
    separator = "\t" if path.suffix == ".tsv" else ","
    places, bad, digest = array("q"), list[str](), hashlib.sha256()
    columns: list[str] | None = None
    with path.open("rb") as file:
        for line, begin, written, fault in _records(file, separator):
            if not written.strip(b"\r\n"):
                continue
            try:
                fields = [] if fault else _fields(written, separator)
                if columns is None and not fault:
                    columns = _names(fields)
                elif fault or len(fields) != len(columns or ()):
                    raise ValueError(
                        fault
                        or f"it has {len(fields)} fields, and {len(columns or ())} columns are "
                        "named (what has a separator in it is put within quotes)"
                    )
                else:
                    places.extend((begin, len(written)))
                digest.update(written.strip())
            except ValueError as error:
                if columns is None:
                    raise ValueError(f"{path} can't be read: line {line}: {error}") from error
                bad.append(f"line {line}: {error}")
    tell_bad_lines(path, bad, num_rows=len(places) // 2, skip=skip_bad_rows)
    names = tuple(columns or ())
    read = partial(_parsed, path, path.stat().st_mtime_ns, separator, names)
    return LazyRows(read, np.array(places).reshape(-1, 2), dict.fromkeys(names), digest.hexdigest())


def _records(file: IO[bytes], separator: str) -> Iterator[tuple[int, int, bytes, str]]:
    """Yield the line at which each row begins, its place, what is written, and what is wrong."""
    held = list[bytes]()

    def lines() -> Iterator[str]:
        for line in file:
            held.append(line)
            yield line.decode("latin-1")  # a character for each byte

    rows = csv.reader(lines(), delimiter=separator, strict=True)
    begin, first = 0, 1
    while True:
        fault = ""
        try:
            next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            fault = str(error)
        written = b"".join(held)
        yield first, begin, written, fault
        begin, first = begin + len(written), first + len(held)
        held.clear()


def _fields(written: bytes, separator: str) -> list[str]:
    text = io.StringIO(written.decode("utf-8-sig"), newline="\n")
    return next(csv.reader(text, delimiter=separator, strict=True))


def _names(fields: Sequence[str]) -> list[str]:
    """The columns: a first one without a name is the index that pandas writes."""
    names = [name.strip() for name in fields]
    if names and not names[0]:
        names[0] = "Unnamed: 0"
    if not all(names) or len({*names}) < len(names):
        raise ValueError(f"the columns need names, each another one, got {names}")
    return names


def _parsed(
    path: Path, written_ns: int, separator: str, names: Sequence[str], begin: int, size: int
) -> dict[str, str]:
    """A row of a file."""
    fields = _fields(part_of(path, written_ns, begin, size), separator)
    return {name: field for name, field in zip(names, fields, strict=True) if field}

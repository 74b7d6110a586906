"""Rows of tables, without the nulls that a table adds to them."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final


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


def one_source_of(*, default: Any = None, **choices: Any) -> Any:
    """The value of the one of several names that was used; not more than one may be."""
    used = {name: value for name, value in choices.items() if value is not None}
    if len(used) > 1 or (not used and default is None):
        raise ValueError(f"DataLoadingPrimer: give one of {', '.join(choices)}, got {len(used)}.")
    return next(iter(used.values()), default)

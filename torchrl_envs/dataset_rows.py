"""Rows of a data set, wherever it is: in memory, on disk, or on a hub."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FILES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""What is read of single files: suffix to builder of the package ``datasets``."""


def dataset_rows(source: Any, *, split: str = "train", name: str | None = None) -> Any:
    """A data set that has a length and rows.

    Args:
        source: a ``datasets.Dataset`` or a sequence of dictionaries, which is given back; a
            ``datasets.DatasetDict``; a local path, of a directory that ``save_to_disk`` wrote or of
            a json, jsonl, csv or parquet file; or a hub id.
        split: which split, where there are several.
        name: configuration of a data set of the hub.

    Raises:
        ValueError: there is no such split, or a local file is of an unknown kind.
        TypeError: the source is none of these.
    """
    if isinstance(source, str | Path):
        source = _load(str(source), split, name)
    if isinstance(source, Mapping):
        if split not in source:
            raise ValueError(f"The data set has no split {split!r}; it has {sorted(source)}.")
        source = source[split]
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        raise TypeError(
            "A data set is a datasets.Dataset, a sequence of dictionaries, a local path or a hub "
            f"id, got {type(source).__name__}."
        )
    return source


def map_rows(rows: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Each row with the columns that a function gives for it.

    Args:
        rows: of :func:`dataset_rows`.
        change: gives new or changed columns.
    """
    if hasattr(rows, "map"):
        return rows.map(change)
    return [{**row, **change(row)} for row in rows]


def require_columns(rows: Any, columns: Sequence[str], who: str) -> None:
    """Check that a data set is what a task takes it for.

    Raises:
        ValueError: it is empty, or columns are missing; the message says which, and what it has.
    """
    if len(rows) == 0:
        raise ValueError(f"{who}: the data set has no rows.")
    found = list(rows[0])
    missing = [column for column in columns if column not in found]
    if missing:
        raise ValueError(f"{who} needs the columns {missing}; the data set has {found}.")


def _load(source: str, split: str, name: str | None) -> Any:
    import datasets

    path = Path(source)
    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        return datasets.load_from_disk(source)
    if path.is_file():
        builder = FILES.get(path.suffix)
        if builder is None:
            raise ValueError(f"{source!r} is none of the files that are read: {sorted(FILES)}.")
        return datasets.load_dataset(builder, data_files=source, split="train")
    return datasets.load_dataset(source, name, split=split)

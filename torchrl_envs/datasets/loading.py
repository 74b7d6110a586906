"""Data sets by name: a hub id or a local path."""

import hashlib
import json
import re
from array import array
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from . import DATA_FILES, check_source
from .csv_rows import rows_of_csv
from .lazy_rows import LazyRows, part_of, tell_bad_lines
from .tables import without_nulls


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
            TSV, Parquet, Arrow, text), or else an id on the hub. Several splits by name give one of
            them; a data set of ``datasets`` gives its rows, and other data come back as they are.
        name: of the configuration.
        split: which; the only one, or ``"train"``, when not given.
        streaming: read while iterating instead of loading first.
        load_options: passed to ``datasets.load_dataset``.
        skip_bad_rows: leave out lines of a file of JSON lines, CSV or TSV that can't be read, and
            log them.

    Raises:
        ValueError: a file is empty or can't be read, and the message names the first bad line of
            a file of JSON lines, CSV or TSV; a folder has no data, or no such as go together; no
            split is given and there are several, none of them ``"train"``; or an option does not
            apply to the source.

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
    options = {"name": name, "split": split, "streaming": streaming, **(load_options or {})}
    if path.is_file():
        builder = DATA_FILES.get(path.suffix)
        if builder is None:
            raise ValueError(f"{source} is no data file that is known: {sorted(DATA_FILES)}.")
        rows, is_whole = None, split in (None, "train")
        if builder == "csv" and not load_options:
            rows = rows_of_csv(path, skip_bad_rows=skip_bad_rows)
        elif builder == "json" and is_whole and not (streaming or load_options):
            rows = rows_of_json(path, skip_bad_rows=skip_bad_rows)
        if rows is None or not is_whole:  # some of the rows, such as train[:10]
            return _pick_split(_load_file(path, builder, options, rows), split)
        return _whole_file(path, rows, streaming=streaming)
    check_source(source, DATA_FILES)
    if path.is_dir():
        return _pick_split(_load_folder(path, options), split)
    return _pick_split(import_module("datasets").load_dataset(str(source), **options), split)


def _load_folder(path: Path, options: Mapping[str, Any]) -> Any:
    """What ``datasets`` makes of a folder of files."""
    if "data_files" not in options:
        _check_one_kind(path)
    refused = import_module("datasets.exceptions").DatasetsError
    try:  # of "." it would take no name
        return import_module("datasets").load_dataset(str(path.resolve()), **options)
    except (refused, ValueError) as error:
        why = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"The folder {path} can't be read as a data set: {why}. Give one file, or a folder "
            f"with files of one kind alone ({', '.join(sorted(DATA_FILES))})."
        ) from error


def _check_one_kind(path: Path) -> None:
    """Check that the files of a folder are of one kind: of several the commonest would be read.

    A few texts beside rows are taken for notes, and a ``README.md`` may say which files are data.

    Raises:
        ValueError: there are several kinds.
    """
    readme = path / "README.md"
    if readme.is_file() and "\nconfigs:" in readme.read_text(encoding="utf-8", errors="replace"):
        return
    found: dict[str, list[str]] = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path)
        is_hidden = any(part.startswith((".", "_")) for part in name.parts)
        kind = DATA_FILES.get(file.suffix)
        if kind and file.is_file() and not is_hidden and file.name != "dataset_infos.json":
            found.setdefault(kind, []).append(str(name))
    num_rows_files = sum(len(names) for kind, names in found.items() if kind != "text")
    if len(found.get("text", ())) < num_rows_files:
        found.pop("text", None)
    if len(found) > 1:
        told = ", ".join(f"{kind} ({names[0]})" for kind, names in found.items())
        raise ValueError(
            f"The folder {path} has files of several kinds, of which one alone would be read: "
            f"{told}. Give one file, or a folder with files of one kind alone."
        )


def _whole_file(path: Path, rows: LazyRows, *, streaming: bool) -> Any:
    """Rows as a stream, as a list, or on the disk where that would be long."""
    if streaming:
        table = import_module("datasets").IterableDataset.from_generator(rows.__iter__)
        return without_nulls(table)
    return list(rows) if path.stat().st_size <= _HELD_BYTES else rows


def _load_file(
    path: Path, builder: str, options: Mapping[str, Any], rows: LazyRows | None = None
) -> Any:
    """What ``datasets`` makes of a file; of a table of texts texts, where its rows are known."""
    import datasets.exceptions

    if builder == "csv":
        options = {"sep": "\t" if path.suffix == ".tsv" else ",", **options}
        if rows is not None:
            kinds = datasets.Features(dict.fromkeys(rows.columns, datasets.Value("string")))
            options |= {"features": kinds, "keep_default_na": False, "na_values": [""]}
    try:
        return datasets.load_dataset(builder, data_files=str(path), **options)
    except (datasets.exceptions.DatasetGenerationError, ValueError, StopIteration) as error:
        why = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
        raise ValueError(f"{path} can't be read: {why}. Mend it.") from error


_HELD_BYTES: Final = 1 << 26
"""Of a file of JSON or CSV; the rows of a larger one stay on the disk."""
_READ_BYTES: Final = 1 << 22
_COMMA: Final = re.compile(r"\s*,\s*")


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
                    row = json.loads(text, object_pairs_hook=_named_once)
                    if "\\u" in text:
                        json.dumps(row, ensure_ascii=False).encode()  # no half of a character
                    if not isinstance(row, dict):
                        raise ValueError(f"{text:.40} is no object with columns")
                    columns |= dict.fromkeys(row)
                    places.extend((begin, len(line)))
                    digest.update(line.strip())
            except ValueError as error:
                bad.append(f"line {number}: {error}")
    tell_bad_lines(path, bad, num_rows=len(places) // 2, skip=skip_bad_rows)
    return LazyRows(read, np.array(places).reshape(-1, 2), columns, digest.hexdigest())


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of a row, of which the decoder would take the last of two values of a key."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in made if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return made


def _parsed(path: Path, written_ns: int, begin: int, size: int) -> dict[str, Any]:
    """A row of a file."""
    return json.loads(part_of(path, written_ns, begin, size).decode("utf-8-sig"))


def _written_rows(path: Path, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield where each line begins, and what it says; or each element, if the file is one list."""
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
            rest, is_first = text[at:].strip(), not (passed or at)
            if rest != "]" and not (is_first and rest.lstrip(", \t\r\n") == "]"):
                what = f"its list breaks off after byte {passed + at}: {error}"
                raise ValueError(f"{path} can't be read: {what}. Mend it.") from error
            return
        yield passed + begin, text[begin:end].encode("latin-1")
        at = end


def _pick_split(loaded: Any, split: str | None) -> Any:
    """A split of what may hold several: the one named, the only one, or ``"train"``."""
    if not isinstance(loaded, Mapping):
        return without_nulls(loaded)
    if split is None:
        split = next(iter(loaded)) if len(loaded) == 1 else "train"
    if split not in loaded:
        raise ValueError(f"There is no split {split!r}; there are {sorted(loaded)}. Name one.")
    return without_nulls(loaded[split])

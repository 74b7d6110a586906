"""Data sets by name: a hub id or a local path."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_BUILDERS: Final = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}


def load_rows(
    source: Any,
    *,
    name: str | None = None,
    split: str | None = None,
    streaming: bool = False,
    load_options: Mapping[str, Any] | None = None,
) -> Any:
    """Load a data set, for :class:`~torchrl_envs.DataLoadingPrimer` or to look at.

    Args:
        source: a folder that ``save_to_disk`` wrote, another folder or a file (JSON lines, CSV,
            Parquet, Arrow, text), or else an id on the hub. Several splits by name give one of
            them; other data come back as they are.
        name: of the configuration.
        split: which; the only one, or ``"train"``, when not given.
        streaming: read while iterating instead of loading first.
        load_options: passed to ``datasets.load_dataset``.

    Raises:
        ValueError: no split is given and there are several, none of them ``"train"``; or an option
            does not apply to the source.
    """
    if not isinstance(source, str | Path):
        return _loaded(source, split, name is not None or streaming or bool(load_options))
    import datasets

    path = Path(source)
    if path.is_dir() and _is_saved(path):
        if name is not None or streaming or load_options:
            raise ValueError(
                f"{source} was written by save_to_disk: name=, streaming= and load_options= do not "
                "apply to it."
            )
        return _pick_split(datasets.load_from_disk(str(path)), split)
    options = {"name": name, "split": split, "streaming": streaming, **(load_options or {})}
    if path.is_file():
        builder = _BUILDERS.get(path.suffix)
        if builder is None:
            raise ValueError(f"{source} is no data file that is known: {sorted(_BUILDERS)}.")
        return _pick_split(datasets.load_dataset(builder, data_files=str(path), **options), split)
    return _pick_split(datasets.load_dataset(str(source), **options), split)


def _loaded(rows: Any, split: str | None, has_options: bool) -> Any:
    if has_options:
        raise ValueError(
            "load_rows: name=, streaming= and load_options= are for a hub id or a path, got "
            f"{type(rows).__name__}."
        )
    if isinstance(rows, Mapping) and not any(isinstance(v, list) for v in rows.values()):
        return _pick_split(rows, split)
    if split is not None:
        raise ValueError(
            f"load_rows: split= is for a hub id, a path or several splits, got "
            f"{type(rows).__name__}."
        )
    return rows


def _pick_split(loaded: Any, split: str | None) -> Any:
    """One split of what may hold several: the one named, the only one, or ``"train"``."""
    if not isinstance(loaded, Mapping):
        return loaded
    if split is None:
        split = next(iter(loaded)) if len(loaded) == 1 else "train"
    if split not in loaded:
        raise ValueError(f"There is no split {split!r}; there are {sorted(loaded)}. Name one.")
    return loaded[split]


def _is_saved(path: Path) -> bool:
    return (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()


def one_of(*, default: Any = None, **choices: Any) -> Any:
    """The value of the one of several names that was used; not more than one may be."""
    used = {name: value for name, value in choices.items() if value is not None}
    if len(used) > 1 or (not used and default is None):
        raise ValueError(f"DataLoadingPrimer: give one of {', '.join(choices)}, got {len(used)}.")
    return next(iter(used.values()), default)

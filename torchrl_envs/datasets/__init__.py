"""Rows of data: where they come from, in what order, and which are fit to be used."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

DATA_FILES: Final = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
"""What reads a file of rows, by its suffix."""
MODEL_FILES: Final = (".gguf",)
"""Suffixes of files that hold a model."""
_HUB_ID: Final = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?")


def check_source(source: Any, suffixes: Collection[str]) -> None:
    """Refuse what can only be a file or folder of this machine, and is none.

    Args:
        source: a path or an id on the hub; what is neither is not looked at.
        suffixes: of files; no id ends so.

    Raises:
        ValueError: nobody is asked for it.
    """
    path = Path(source) if isinstance(source, str | Path) else Path()
    if not path.exists() and (path.suffix in suffixes or not _HUB_ID.fullmatch(str(source))):
        raise ValueError(f"There is no file or folder {source}, from {Path.cwd()}.")

"""Arguments that a run wrote down, with which the one that resumes it begins."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from .arguments import name_of
from .errors import SettingsError
from .started_ranks import OF_RANKS, num_ranks

AUTO: Final = "auto"
RECORD: Final = "run.json"


def with_recorded(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command line, with those of the run that it resumes before them.

    Args:
        arguments: without the program's name; ``resume=<folder>`` stands for all that the run was
            started with.

    Raises:
        SettingsError: the folder holds no run.
    """
    given = _by_name(arguments)
    folder = given.get("resume", "").partition("=")[2]
    if folder in ("", AUTO, "null"):
        return list(arguments)
    recorded = _by_name(read_record(Path(folder))["command"][1:])
    new = {*given, "overwrite", "resume", "-m", "--multirun"}
    if num_ranks() == 1:  # it goes on with any number of ranks, one included
        new |= {f"train.{name}" for name in OF_RANKS}
    return [*(text for name, text in recorded.items() if name not in new), *arguments]


def _by_name(arguments: Sequence[str]) -> dict[str, str]:
    return {name_of(each): each for each in arguments}


def read_record(folder: Path) -> dict[str, Any]:
    """Return what a run wrote down of itself.

    Raises:
        SettingsError: there is none in the folder.
    """
    try:
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"resume={folder}: it holds no run: {error}.") from error

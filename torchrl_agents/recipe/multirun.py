"""What came of the runs of ``--multirun``: a table at the end, and the same in a file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .results import finite

SUMMARY: Final = "multirun.json"


class MultirunSummary:
    """The results of the runs of one command, written after each of them."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        """Of each its overrides and its result."""
        self.path: Path | None = None
        """Of the file, in Hydra's folder of the sweep."""

    def add(self, result: Mapping[str, Any]) -> None:
        """Take in the result of a run that Hydra runs now; nothing is kept of a single one.

        Args:
            result: as the run printed it.
        """
        hydra = HydraConfig.get()
        if hydra.mode != RunMode.MULTIRUN:
            return
        overrides: Sequence[str] = list(hydra.overrides.task)
        self.runs.append({"overrides": overrides, **finite(result)})
        self.path = Path(hydra.runtime.output_dir).parent / SUMMARY
        self.path.write_text(json.dumps(self.runs, indent=1) + "\n", encoding="utf-8")

    def show(self) -> None:
        """Print the table to standard error: the last line of the output is the last result."""
        if self.path is None:
            return
        table = Table(title=str(self.path), title_justify="left")
        for name in ("run", "overrides", "held-out before", "after"):
            table.add_column(name, justify="left" if name == "overrides" else "right")
        for number, run in enumerate(self.runs):
            scores = [_score(run.get(f"held_out_{when}")) for when in ("before", "after")]
            table.add_row(str(number), escape(" ".join(run["overrides"])), *scores)
        Console(stderr=True).print(table)


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"

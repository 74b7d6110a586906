"""The runs of ``--multirun``: a table at the end, and the same in a file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from collectors.record.files import finite

SUMMARY: Final = "multirun.json"


@dataclass
class MultirunSummary:
    """The results of the runs of one command, written after each of them."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    """Of each its overrides and its result."""
    path: Path | None = None
    """Of the file, in Hydra's folder of the sweep."""

    def add(self, result: Mapping[str, Any]) -> None:
        """Take in the result of a run that Hydra runs now; nothing is kept of a single one.

        Args:
            result: as the run printed it.
        """
        hydra = HydraConfig.get()
        if hydra.mode != RunMode.MULTIRUN:
            return
        self.runs.append({"overrides": list(hydra.overrides.task), **finite(result, str)})
        self.path = Path(hydra.runtime.output_dir).parent / SUMMARY
        self.path.write_text(json.dumps(self.runs, indent=1) + "\n", encoding="utf-8")

    def show(self) -> None:
        """Print the table to standard error: the last line of the output is the last result."""
        if self.path is None:
            return
        table = Table(title=str(self.path), title_justify="left")
        told = [
            {name: each["value"] for name, each in run["estimates"].items() if "^" not in name}
            if "estimates" in run
            else {"held-out before": run.get("held_out_before"), "after": run.get("held_out_after")}
            for run in self.runs
        ]
        names = [*dict.fromkeys(name for scores in told for name in scores)]
        table.add_column("run", justify="right")
        table.add_column("overrides", overflow="fold")
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for number, (run, scores) in enumerate(zip(self.runs, told, strict=True)):
            values = map(scores.get, names)
            shown = ["" if value is None else f"{value:.3f}" for value in values]
            table.add_row(str(number), escape(" ".join(run["overrides"])), *shown)
        Console(stderr=True).print(table)

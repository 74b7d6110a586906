"""Places in the record of a run: the run itself, a step, a group of it, a sample of that."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Final, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .run_record import RunRecord
from .samples import RolloutSample
from .terminal import (
    LEFT_COLUMNS,
    NUM_SQUARES,
    RecordTable,
    group_columns,
    group_table,
    rewards_of_groups,
    run_rows,
    sample_view,
    sparkline,
    step_rows,
)

Place = tuple[int, ...]
"""Step, number of a group in it, number of a sample in that; fewer show more."""
RUN: Final[Place] = ()


class View(NamedTuple):
    """The view of a place."""

    rows: RecordTable | None
    """What can be opened from here."""
    body: RenderableType
    """What stands below."""

    def printed(self) -> RenderableType:
        """All of it."""
        if self.rows is None or not self.rows.title:
            return self.body
        wide = "prompt" in self.rows.columns
        title = Text(self.rows.title)
        table = Table(title=title, title_justify="left", header_style="bold", expand=wide)
        for name in self.rows.columns:
            width: dict[str, Any] = {"max_width": NUM_SQUARES} if name == "rewards" else {}
            width |= {"ratio": 1} if name == "prompt" else {}  # what the others leave
            table.add_column(name, justify="left" if name in LEFT_COLUMNS else "right", **width)
        for row in self.rows.rows:
            table.add_row(*row)
        return Group(table, self.body)


class Browser:
    """Finds what to show at a place in a record.

    Args:
        run: the record.
        keep: which samples are shown; others are dimmed, or left out of a group.
    """

    def __init__(
        self, run: RunRecord, *, keep: Callable[[RolloutSample], bool] = lambda _: True
    ) -> None:
        self.run = run
        self._keep = keep
        self._samples: tuple[int, list[RolloutSample]] | None = None

    def view(self, place: Sequence[int], colour: str) -> View:
        """Return what there is at a place.

        Args:
            place: in the record.
            colour: of tokens.

        Raises:
            KeyError: there is no such place.
        """
        if not place:
            steps = self.run.steps
            means = [
                fmean(rewards) for step in steps if (rewards := rewards_of_groups(step.groups))
            ]
            line = Text(f"reward {sparkline(means)}", style="blue")
            return View(run_rows(steps, self.run.name), line)
        numbers = [step.step for step in self.run.steps]
        if place[0] not in numbers:
            raise KeyError(f"no step {place[0]}; there are {numbers}")
        step = self.run.steps[numbers.index(place[0])]
        if self._samples is None or self._samples[0] != step.step:
            self._samples = step.step, list(self.run.samples(step.step))
        samples = self._samples[1]
        if len(place) == 1:
            return View(step_rows(step, samples, self._keep), Text())
        if not 0 <= place[1] < len(step.groups):
            raise KeyError(f"step {step.step} has groups 0 to {len(step.groups) - 1}")
        own = [s for s in samples if s.group_id == step.groups[place[1]].group_id]
        if len(place) == 2:
            kept = [sample for sample in own if self._keep(sample)]
            return View(group_table(own, self._keep), group_columns(kept, colour))
        if not 0 <= place[2] < len(own):
            raise KeyError(f"the group has samples 0 to {len(own) - 1}")
        return View(None, sample_view(own[place[2]], colour))

    def beside(self, place: Place, by: int) -> Place:
        """The place so many further on, in what it is in; itself where there is none."""
        if not place:
            return place
        keys = self.view(place[:-1], "writer").rows
        assert keys is not None
        numbers = list(keys.keys)
        if place[-1] not in numbers:  # left out by the filter
            return place
        at = numbers.index(place[-1]) + by
        return (*place[:-1], numbers[min(max(at, 0), len(numbers) - 1)])

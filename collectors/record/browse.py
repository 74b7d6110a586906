"""Looking around in the record of a run: run, step, group, sample, by short commands."""

from collections.abc import Callable
from typing import Final

from rich.console import Console
from rich.text import Text

from .prompts import find_prompts
from .reader import RunRecord
from .samples import RolloutSample, StepSummary
from .terminal import COLOURS, group_columns, prompt_view, run_table, sample_view, step_table

_HELP: Final = (
    "a number opens a step, a group, a sample; u up; n and b next and before; c colour; "
    "p 17 where is prompt 17; q quit"
)


class Browser:
    """Shows a place in a record.

    Args:
        run: the record.
        console: where to print.
        colour: of tokens.
        keep: which samples are shown; others are dimmed, or left out of a group.
    """

    def __init__(
        self,
        run: RunRecord,
        console: Console,
        *,
        colour: str = "writer",
        keep: Callable[[RolloutSample], bool] = lambda _: True,
    ) -> None:
        self._run = run
        self._console = console
        self._colour = colour
        self._keep = keep
        self._place: list[int] = []
        self._samples: tuple[int, list[RolloutSample]] | None = None

    def open(self, *place: int | None) -> None:
        """Show a place.

        Args:
            *place: step, number of a group in it, number of a sample in that; fewer show more.

        Raises:
            KeyError: there is no such place.
            ValueError: a group or sample is given without what it is in.
        """
        given = [part for part in place if part is not None]
        if list(place[: len(given)]) != given:
            raise ValueError("--sample goes with --group and --step, --group with --step.")
        self._show(given)
        self._place = given

    def loop(self) -> None:
        """Read commands until the end."""
        while True:
            self._console.print(Text(_HELP, style="bright_black"))
            try:
                said = self._console.input("[bold]> [/bold]").strip()
            except (EOFError, KeyboardInterrupt):
                return
            if said == "q":
                return
            try:
                self._obey(said)
            except (LookupError, ValueError) as error:
                self._console.print(Text(str(error.args[0]), style="red"))

    def _obey(self, said: str) -> None:
        place = list(self._place)
        if said.isdecimal():
            self.open(*place[:2], int(said))
        elif said == "u":
            self.open(*place[:-1])
        elif said in ("n", "b") and place:
            self.open(*place[:-1], self._beside(1 if said == "n" else -1))
        elif said == "c":
            self._colour = COLOURS[(COLOURS.index(self._colour) + 1) % len(COLOURS)]
            self.open(*place)
        elif said.startswith("p "):
            for history in find_prompts(self._run, said[2:].strip()):
                self._console.print(prompt_view(history))
        else:
            self.open(*place)

    def _beside(self, by: int) -> int:
        if len(self._place) > 1:
            return self._place[-1] + by
        steps = [step.step for step in self._run.steps]
        return steps[min(max(steps.index(self._place[0]) + by, 0), len(steps) - 1)]

    def _show(self, place: list[int]) -> None:
        if not place:
            self._console.print(run_table(self._run.steps, self._run.name))
            return
        step = self._step(place[0])
        samples = self._samples_of(step.step)
        if len(place) == 1:
            self._console.print(step_table(step, samples, self._keep))
            return
        if not 0 <= place[1] < len(step.groups):
            raise KeyError(f"step {step.step} has groups 0 to {len(step.groups) - 1}")
        own = [s for s in samples if s.group_id == step.groups[place[1]].group_id]
        if len(place) == 2:
            self._console.print(group_columns([s for s in own if self._keep(s)], self._colour))
            return
        if not 0 <= place[2] < len(own):
            raise KeyError(f"the group has samples 0 to {len(own) - 1}")
        self._console.print(sample_view(own[place[2]], self._colour))

    def _step(self, number: int) -> StepSummary:
        for step in self._run.steps:
            if step.step == number:
                return step
        raise KeyError(f"no step {number}; there are {[step.step for step in self._run.steps]}")

    def _samples_of(self, step: int) -> list[RolloutSample]:
        if self._samples is None or self._samples[0] != step:
            self._samples = step, list(self._run.samples(step))
        return self._samples[1]

"""Reader of the record of a run, also while it goes on."""

import json
import re
from collections.abc import Iterator
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import Any, Final

from .files import read_lines
from .samples import FORMAT, RolloutSample, StepSummary

FOLDER: Final = "rollouts"
"""In the folder of a run."""
END: Final = "end.jsonl.gz"
"""With what was told behind the last step."""
_STEP = re.compile(r"step-(\d+)\.jsonl\.gz")


def step_file(folder: Path, step: int) -> Path:
    """Path of a step."""
    return folder / f"step-{step:06}.jsonl.gz"


def steps_in(folder: Path) -> list[int]:
    """The steps that have a file, in order."""
    found = (_STEP.fullmatch(path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def runs_named(path: Path) -> str:
    """A sentence with the last runs of a name, where it lacks the number; empty without any."""
    pattern = f"{escape(path.name)}-[0-9]*"
    found = [] if path.exists() or not path.name else sorted(path.parent.glob(pattern))
    return f" There is {' and '.join(map(str, found[-2:]))}." if found else ""


class RunRecord:
    """The record that a :class:`RolloutRecorder` wrote.

    What can't be read is left out and named in :attr:`damage`; the rest is there::

        record = RunRecord("outputs/grpo/calculator/seed0")
        for summary in record.steps:
            for sample in record.samples(summary.step):
                ...

    Args:
        path: folder of the run, or the one with its ``step-*.jsonl.gz``.

    Raises:
        FileNotFoundError: there is no record.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        self.folder = path / FOLDER if (path / FOLDER).is_dir() else path
        """With the files."""
        self.run_folder = self.folder.parent if self.folder.name == FOLDER else self.folder
        self.damage: list[str] = []
        """What could not be read so far, and why."""
        if not self.folder.is_dir() or not steps_in(self.folder):
            raise FileNotFoundError(
                f"{path} holds no record of a run: no {FOLDER}/step-*.jsonl.gz. A RolloutRecorder "
                f"writes them, after each step.{runs_named(path)}"
            )

    @cached_property
    def steps(self) -> list[StepSummary]:
        """All steps without their samples, in order, as they were when this was first asked."""
        found = []
        for step in steps_in(self.folder):
            path = step_file(self.folder, step)
            for line in read_lines(path, self.damage):
                _check_format(line, path)
                found.append(StepSummary.from_json(line))
                break
            else:
                self.damage.append(f"{path.name}: nothing of it can be read")
        return found

    def samples(self, step: int) -> Iterator[RolloutSample]:
        """The samples of a step that were recorded, group by group.

        Args:
            step: its number.

        Raises:
            KeyError: there is no such step.
            ValueError: it was written in a newer format.
        """
        path = step_file(self.folder, step)
        if not path.exists():
            raise KeyError(f"step {step}; there are {steps_in(self.folder)}")
        lines = read_lines(path, self.damage)
        header = next(lines, {})
        _check_format(header, path)
        known = {group.group_id for group in StepSummary.from_json(header).groups}
        for line in lines:
            sample = RolloutSample.from_json(line)
            if sample.group_id in known:
                yield sample
            else:
                self.damage.append(f"{path.name}: it has no group {sample.group_id} of a sample")

    def events(self) -> list[dict[str, Any]]:
        """All that the ledger told, in order, see :attr:`StepSummary.events`."""
        events = [event for summary in self.steps for event in summary.events]
        path = self.folder / END
        for line in read_lines(path, self.damage) if path.exists() else ():
            _check_format(line, path)
            events += line["events"]
        return events

    @property
    def name(self) -> str:
        """Title of the run: the last two parts of its folder."""
        return "/".join(self.run_folder.resolve().parts[-2:])

    def about(self) -> dict[str, Any]:
        """Return what the script left beside the record in ``run.json``, if it did."""
        path = self.run_folder / "run.json"
        try:
            about = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:  # it is being written
            self.damage.append(f"{path.name}: {error}")
            return {}
        return about if isinstance(about, dict) else {}

    def tests(self) -> list[tuple[int, dict[str, float]]]:
        """Tests on held-out prompts, which the script left in ``evaluations.jsonl``, if it did.

        Returns:
            Of each the step after which it was made and its scores, ``reward`` among them, in the
            order of the steps.
        """
        path, found = self.run_folder / "evaluations.jsonl", []
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                told = json.loads(line)
                scores = {
                    name: float(value)
                    for name, value in told.items()
                    if type(value) in (int, float) and name not in ("step", "version", "lag_steps")
                }
                found.append((int(told["step"]), scores))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                self.damage.append(f"{path.name}: line {number} is torn or no test ({error})")
        return sorted(found, key=lambda test: test[0])


def _check_format(line: Any, path: Path) -> None:
    found = line.get("format") if isinstance(line, dict) else None
    if not isinstance(found, int) or found > FORMAT:
        raise ValueError(
            f"{path} is in format {found!r}; this version reads formats up to {FORMAT}. Update the "
            "package that reads it."
        )

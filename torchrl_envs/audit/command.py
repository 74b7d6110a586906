"""The command ``torchrl-agents audit``: whether tasks reward what they say, and nothing else."""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from torchrl_data.output_file import output_file
from torchrl_envs.harbor.folders import TaskFolderError
from torchrl_envs.harbor.machines import MachineError
from torchrl_envs.harbor.rows import found_tasks

from .checks import audit
from .findings import Finding, Report
from .harbor_task import audit_task
from .kinds import audited_task
from .model_groups import ModelGroups

PlayWithModel = Callable[[str, Mapping[str, Any], str, Sequence[str], int, int], ModelGroups]
"""Lets a model play a task: its name, its settings, the model, further settings, prompts and
rollouts of each."""
_PREFIX: Final = "task."
_OF_MODEL: Final = ("policy.", "engine.", "engine=")
_HELD: Final = ("nothing", "solution")
_NAME_WIDTH: Final = 40


def main(arguments: Sequence[str], *, play: PlayWithModel | None = None) -> int:
    """Audit tasks, and print a table and what is wrong.

    Args:
        arguments: of the command line.
        play: lets a model play, for ``--model``.

    Returns:
        0; 1 where a defect was found; 2 where nothing could be audited.
    """
    given = _parser().parse_intermixed_args(list(arguments))
    further = [word for word in given.words if word.startswith(_OF_MODEL)]
    names = [word for word in given.words if not word.startswith((_PREFIX, *_OF_MODEL))]
    try:
        settings = _settings([word for word in given.words if word.startswith(_PREFIX)])
        if not names:
            raise ValueError("give it a task: a folder, gymnasium:NAME, module:name, or a name.")
        for option in ("episodes", "rollouts", "repeats"):
            if getattr(given, option) < 1:
                raise ValueError(f"--{option} is at least 1, got {getattr(given, option)}.")
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # a module beside the user
        if given.model is None and further:
            raise ValueError(f"{further[0]} is a setting of a model: give --model, too.")
        if given.model is not None and play is None:
            raise ValueError("--model needs the program: torchrl-agents audit.")
        reports, wrong = _audited(names, settings, given)
        sizes = (given.episodes, given.rollouts)
        played = [
            play(name, settings, given.model, further, *sizes)
            for name in names
            if play is not None and given.model is not None
        ]
    except (ValueError, TypeError, ImportError, OSError, TaskFolderError) as error:
        print(f"torchrl-agents audit: {error}", file=sys.stderr)
        return 2
    found = [*wrong, *(finding for report in reports for finding in report.findings)]
    found += [finding for groups in played for finding in groups.findings()]
    for line in (
        *(line for groups in played for line in groups.lines()),
        *_findings(reports, found),
    ):
        print(line)
    num_defects = sum(finding.is_defect for finding in found)
    num_tasks = len({*(r.task for r in reports), *(finding.task for finding in wrong)})
    print(f"{num_tasks} tasks, {num_defects} defects, {len(found) - num_defects} notes")
    if given.json is not None:
        written = [report.as_json() for report in reports]
        written += [Report(f.task, {}, [f], {}).as_json() for f in wrong]
        written += [groups.as_json() for groups in played]
        given.json.write_text(json.dumps(written, indent=1), encoding="utf-8")
    return int(num_defects > 0) if num_tasks else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrl-agents audit",
        description="Let agents that deserve nothing do a task, and say what is wrong with it: "
        "before somebody trains on it.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="TASK",
        help="a folder, an archive or a file of rows of Harbor's tasks; gymnasium:NAME; "
        "openenv:URL; verifiers:TASKSET; module:name of what makes an environment or a task; a "
        "name of the registry (gcd, catch, ...). "
        "Settings of the task, and of the model, as in a recipe: task.KEY=VALUE",
    )
    parser.add_argument(
        "--solution", help="module:name of a function from what is shown to the right answer"
    )
    parser.add_argument(
        "--episodes", type=int, default=12, help="seeds, or rows, of each agent (%(default)s)"
    )
    parser.add_argument(
        "--rollouts", type=int, default=8, help="of a group, for its signal (%(default)s)"
    )
    parser.add_argument(
        "--model",
        help="plays --rollouts of --episodes held-out prompts, too: what policy.model takes, or "
        "embedded; with settings of evaluate, such as policy.max_new_tokens=64",
    )
    parser.add_argument("--machine", default="bubblewrap", help="of Harbor's tasks (%(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=2, help="runs of Harbor's tasks that agree (%(default)s)"
    )
    parser.add_argument("--json", type=output_file, help="where the reports are written, too")
    return parser


def _settings(words: Sequence[str]) -> dict[str, Any]:
    """Settings of a task from ``task.KEY=VALUE``.

    Raises:
        ValueError: a word is of another form, or its value is not YAML.
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.removeprefix(_PREFIX).partition("=")
        if not key or not equals:
            raise ValueError(f"a setting is task.KEY=VALUE, got {word!r}.")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"{word!r} is not YAML: {error}") from error
    return found


def _audited(
    names: Sequence[str], settings: Mapping[str, Any], given: argparse.Namespace
) -> tuple[list[Report], list[Finding]]:
    """Reports of tasks, each printed as a row; findings about those that could not be run."""
    reports: list[Report] = []
    wrong: list[Finding] = []
    print(
        f"{'task':<{_NAME_WIDTH}}{'nothing':>9}{'solution':>9}{'others':>8}{'signal':>8}"
        f"{'reset':>11}{'step':>11}{'reward':>11}  findings"
    )
    for name in names:
        if Path(name).exists():
            if settings or given.solution:
                has = "have their settings and solutions in their folders"
                raise ValueError(
                    f"{name}: Harbor's tasks {has}: leave task.KEY and --solution out."
                )
            for made in _harbor(name, given):
                if isinstance(made, Finding):
                    wrong.append(made)
                else:
                    reports.append(made)
                    print(_row(made), flush=True)
            continue
        task = audited_task(name, settings, solution=given.solution)
        level = logging.root.manager.disable
        logging.disable(logging.WARNING)  # of the rollouts that hostile agents lose
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                report = audit(task, num_episodes=given.episodes, num_rollouts=given.rollouts)
        finally:
            logging.disable(level)
        reports.append(report)
        print(_row(report), flush=True)
    return reports, wrong


def _harbor(dataset: str, given: argparse.Namespace) -> Iterator[Report | Finding]:
    tasks, faults = found_tasks(dataset, skip_bad=True)
    yield from (Finding(name, "broken", what) for name, what in faults.items())
    for task in tasks:
        try:
            yield audit_task(task, machine=given.machine, repeats=given.repeats)
        except (MachineError, ValueError) as error:
            yield Finding(task.name, "broken", str(error))


def _findings(reports: Sequence[Report], found: Sequence[Finding]) -> Iterator[str]:
    """The findings in words, and the checks that were not asked."""
    for finding in found:
        word = "" if finding.is_defect else " (a note)"
        yield f"{finding.task}: {finding.defect}{word}: {finding.what}"
        if finding.evidence:
            yield f"    seen: {finding.evidence}"
        yield f"    change: {finding.remedy}"
    for report in reports:
        for check, why in report.not_asked.items():
            yield f"{report.task}: not asked: {check}: {why}"


def _row(report: Report) -> str:
    """A line of the table; times in milliseconds."""
    by_agent = report.rewards
    solutions = [v for name, v in by_agent.items() if name.startswith("solution") and v is not None]
    others = [v for k, v in by_agent.items() if not k.startswith(_HELD) and v is not None]
    signal = "" if report.signal_fraction is None else f"{report.signal_fraction:.0%}"
    shown = (by_agent.get("nothing"), max(solutions, default=None), max(others, default=None))
    cells = "".join(
        f"{'none' if value is None else f'{value:.3g}':>{width}}"
        for value, width in zip(shown, (9, 9, 8), strict=True)
    )
    times = "".join(
        f"{f'{1000 * report.times_s[each]:.2f} ms' if each in report.times_s else '':>11}"
        for each in ("reset", "step", "reward")
    )
    names = ", ".join(dict.fromkeys(each.defect for each in report.findings)) or "none"
    return f"{report.task:<{_NAME_WIDTH}}{cells}{signal:>8}{times}  {names}"

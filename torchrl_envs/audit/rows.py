"""Rows of a task's data for an audit, and the solutions that they hold."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from torchrl_envs.graders.answer_columns import ANSWER_COLUMNS, end_of_worked_answer
from torchrl_envs.tasks.task import Task, digest_of

from .audited_task import AgentView
from .scripted_agents import FORMS

_NUM_ROWS: Final = 64
_NONE: Final = ("", "None")
"""Texts of a data set that has no answer."""


class AuditedRow(NamedTuple):
    """A row of the data, and as episodes get it."""

    raw: Mapping[str, Any]
    mapped: Mapping[str, Any]


def distinct_rows(task: Task) -> list[AuditedRow]:
    """The first different rows of a task's data.

    Raises:
        ValueError: there are none.
    """
    found: dict[bytes, AuditedRow] = {}
    for number, row in enumerate(islice(iter(task.train_rows), 4 * _NUM_ROWS)):
        mapped = dict(row if task.map_row is None else task.map_row(dict(row)))
        found.setdefault(digest_of(mapped, number), AuditedRow(row, mapped))
    if not found:
        raise ValueError(f"The task {task.name} has no rows, so that no episode can be started.")
    return list(found.values())[:_NUM_ROWS]


def solutions_of_rows(
    rows: Sequence[AuditedRow],
) -> dict[str, Callable[[AgentView], str | None]]:
    """Agents that say what a column of the data says is right, in each form; by their names."""
    found: dict[str, Callable[[AgentView], str | None]] = {}
    for column in ANSWER_COLUMNS:
        values = [row.mapped.get(column) for row in rows]
        if all(isinstance(value, str | int | float) and value not in _NONE for value in values):
            for form in FORMS:
                named = f"solution: {form.format('...')} with the column {column!r}"
                found[named] = _saying(column, form)
    return found


def _saying(column: str, form: str) -> Callable[[AgentView], str | None]:
    def say(view: AgentView) -> str | None:
        return form.format(end_of_worked_answer(str(view.row[column]))) if view.turn == 0 else None

    return say

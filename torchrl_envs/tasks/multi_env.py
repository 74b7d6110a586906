"""Several environments in one run: each row names its own, and sees only that one's tools."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final

from .catch import catch_task
from .echo import echo_task
from .task import Row, Task
from .wordle import wordle_task

ROUTE_COLUMN: Final = "environment"
"""The column that names a row's environment."""


def combine_tasks(name: str, tasks: Sequence[Task]) -> Task:
    """One task of several: rows and demonstrations in turn, routed by ``environment``."""
    names = [task.name for task in tasks]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"combine_tasks needs tasks of different names, got {names}.")
    environments: dict[str, Callable[[], Any]] = {}
    for task in tasks:
        if not callable(task.environment):
            raise ValueError(
                f"combine_tasks takes tasks of one environment each; {task.name} has "
                f"{'none' if task.environment is None else 'several environments already'}."
            )
        environments[task.name] = task.environment
    columns = dict.fromkeys(column for task in tasks for column in task.train_rows[0])
    return Task(
        name=name,
        environment=environments,
        train_rows=_in_turn([_routed(t.train_rows, t.name, columns) for t in tasks]),
        held_out_rows=_in_turn([_routed(t.held_out_rows, t.name, columns) for t in tasks]),
        demonstrations=_in_turn([task.demonstrations for task in tasks]),
        max_turns=max(task.max_turns for task in tasks),
        max_new_tokens=max(task.max_new_tokens for task in tasks),
        isolated="|".join(dict.fromkeys(task.isolated for task in tasks)),
    )


def _routed(rows: Sequence[Row], name: str, columns: Row) -> list[Row]:
    """Rows with the columns of all tasks, as in one table, and the name of their own."""
    return [{**columns, **row, ROUTE_COLUMN: name} for row in rows]


def _in_turn(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """One of each part after the other, for as long as the shortest lasts."""
    return list(chain.from_iterable(zip(*parts, strict=False)))


def multi_env_task(
    *, num_rows: int = 4096, num_held_out: int = 256, num_demonstrations: int = 3072, seed: int = 0
) -> Task:
    """Echo, Catch and Wordle, as many rows of each.

    Args:
        num_rows: training rows of all together.
        num_held_out: held-out rows of all together, at least; a multiple of the three is cut.
        num_demonstrations: conversations of all together.
        seed: of everything.
    """
    settings = {
        "num_rows": -(-num_rows // 3),
        "num_held_out": -(-num_held_out // 3),
        "num_demonstrations": -(-num_demonstrations // 3),
        "seed": seed,
    }
    parts = [make(**settings) for make in (echo_task, catch_task, wordle_task)]
    return combine_tasks("multi_env", parts)

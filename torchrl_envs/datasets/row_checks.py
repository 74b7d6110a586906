"""Checks of rows that begin an episode, and reports of those that cannot."""

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from torchrl_data.images import images_of, with_plain_images
from torchrl_data.messages import begun_turn, check_messages

from .prepare import BadRow, MadeRow

RowCheck = Callable[[Mapping[str, Any]], str]
"""What is wrong with a row; ``""`` if nothing is."""

PROMPT_COLUMNS: Final = ("prompt", "query", "question", "messages", "text")
"""Where the prompt is looked for when no column is named."""
MAX_SKIPPED: Final = 1000
"""Skipped rows that are remembered one by one."""


class SkippedRow(NamedTuple):
    """A row that was not used."""

    epoch: int
    row_id: int
    reason: str


@dataclass
class SkippedRows:
    """The rows that were not used: the last ones, and how many there were by kind of reason."""

    rows: deque[SkippedRow] = field(default_factory=partial(deque, maxlen=MAX_SKIPPED))
    counts: Counter[str] = field(default_factory=Counter)


def columns_of(
    first: Iterable[tuple[int, MadeRow]], others: Iterable[Any], declared: Iterable[str]
) -> tuple[str, ...]:
    """The columns that rows have, those of the first row that can be read first.

    Args:
        first: rows until one can be read.
        others: further rows; what is none is left out.
        declared: columns that the data are known to have.
    """
    reason = ""
    for row_id, row in first:
        if not isinstance(row, BadRow):
            more = [column for each in others if isinstance(each, Mapping) for column in each]
            return tuple(dict.fromkeys([*row, *declared, *more]))
        reason = reason or f"row {row_id}: {row.reason}"
    raise ValueError(f"DataLoadingPrimer: none of the rows can be read; {reason}.")


def find_prompt_column(columns: Sequence[str], asked: str | None) -> str:
    """The column that holds the prompt."""
    candidates = PROMPT_COLUMNS if asked is None else (asked,)
    for column in candidates:
        if column in columns:
            return column
    wanted = " or ".join(map(repr, candidates))
    raise ValueError(
        f"DataLoadingPrimer: the data set has no prompt column {wanted}; its columns are "
        f"{list(columns)}. Name the one that holds the prompt with prompt_column=."
    )


def prompt_error(row: Mapping[str, Any], column: str) -> str:
    """Fault of a row's prompt, which must be a string or a list of messages, and text."""
    if column not in row:
        return f"it has no column {column!r}; it has {sorted(map(str, row))}"
    value = row[column]
    if isinstance(value, list) and value:
        try:
            check_messages(value)
            images_of(value)
            if value[-1]["role"] == "assistant" and not begun_turn(value):
                return (
                    f"column {column!r}: it ends with a message of the assistant in which the "
                    "policy can't go on, for it has no text, or calls tools. Leave that message out"
                )
        except (TypeError, ValueError) as error:
            return f"column {column!r}: {error}"
    elif not isinstance(value, str):
        found = f"{type(value).__name__}: {value!r:.80}"
        return f"column {column!r} must hold strings or lists of messages, got {found}"
    return "" if is_text(value) else f"column {column!r} is not text: it can't be encoded as UTF-8"


def column_error(
    who: str,
    columns: Sequence[str],
    of: Callable[[Mapping[str, Any]], bool] | None,
    row: Mapping[str, Any],
) -> str:
    """That a row lacks columns which somebody needs, or ``""``."""
    missing = [column for column in columns if column not in row]
    if not missing or not (of is None or of(row)):
        return ""
    return f"it lacks {missing}, which {who} needs"


def with_plain_prompt(row: Any, column: str) -> dict[str, Any]:
    """A row whose prompt holds images as plain values: read once for all rollouts of a group."""
    if isinstance(row[column], str):
        return row
    return {**row, column: [with_plain_images(message) for message in row[column]]}


def is_text(value: Any) -> bool:
    """Whether all strings in a value can be encoded; what JSON can't hold is not looked into."""
    try:
        json.dumps(value, ensure_ascii=False, default=lambda _: None, skipkeys=True).encode()
    except UnicodeEncodeError:
        return False
    return True


def row_error(row: MadeRow, checks: Iterable[RowCheck]) -> str:
    """The first thing that is wrong with a row, or ``""``."""
    if isinstance(row, BadRow):
        return row.reason
    return next(filter(None, (check(row) for check in checks)), "")

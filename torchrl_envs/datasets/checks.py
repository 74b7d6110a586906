"""What a row must be to begin an episode, and what to say of one that is not."""

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from torchrl_data.conversation.conversations import Conversations
from torchrl_data.conversation.images import images_of, with_plain_images
from torchrl_data.conversation.record import check_messages
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_data.validation import check_counts, check_not_none

from .prepare import BadRow, PrepareRow
from .sources import SequenceSource, StreamSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RowCheck = Callable[[Mapping[str, Any]], str]
"""What is wrong with a row; ``""`` if nothing is."""

PROMPT_COLUMNS: Final = ("prompt", "query", "question", "messages", "text")
"""Where the prompt is looked for when no column is named."""
_SHOWN_ERRORS: Final = 5
MAX_SKIPPED: Final = 1000
"""Skipped rows that are remembered one by one."""


class SkippedRow(NamedTuple):
    """A row that was not used."""

    epoch: int
    row_id: int
    reason: str


class SkippedRows:
    """The rows that were not used: the last ones, and how many there were by kind of reason."""

    def __init__(self) -> None:
        self.rows: deque[SkippedRow] = deque(maxlen=MAX_SKIPPED)
        self.counts: Counter[str] = Counter()

    def add(self, row: SkippedRow, kind: str) -> None:
        """Note one."""
        self.rows.append(row)
        self.counts[kind] += 1


def sample_rows(
    source: SequenceSource | StreamSource, prepare: PrepareRow, count: int
) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Some rows of a sequence, spread evenly, or the first one of a stream, with their ids."""
    if source.num_rows is None:
        keys: Iterable[tuple[int, Any]] = islice(source.epoch(0), min(count, 1))
    else:
        ids = np.linspace(0, source.num_rows - 1, min(count, source.num_rows)).round()
        keys = ((row_id, row_id) for row_id in ids.astype(int).tolist())
    return ((row_id, prepare(key)) for row_id, key in keys)


def columns_of(
    source: SequenceSource | StreamSource, prepare: PrepareRow, count: int
) -> tuple[str, ...]:
    """The columns of the first row that can be read."""
    reason = ""
    for row_id, row in sample_rows(source, prepare, max(1, count)):
        if not isinstance(row, BadRow):
            return tuple(row)
        reason = reason or f"row {row_id}: {row.reason}"
    raise ValueError(f"DataLoadingPrimer: none of the rows can be read; {reason}.")


def refuse_bad_rows(rows: Iterable[tuple[int, dict[str, Any] | BadRow]], check: RowCheck) -> None:
    """Rows that are bad are an error before anything runs."""
    errors = ((row_id, row_error(row, [check])) for row_id, row in rows)
    bad = [f"row {row_id}: {error}" for row_id, error in errors if error]
    if bad:
        shown = "; ".join(bad[:_SHOWN_ERRORS]) + ("; ..." if len(bad) > _SHOWN_ERRORS else "")
        raise ValueError(
            f"DataLoadingPrimer: {len(bad)} rows can't be used: {shown}. Mend the data, or leave "
            "such rows out with options=DataOptions(skip_bad_rows=True)."
        )


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
    """What is wrong with a row's prompt: it is a string or a list of messages, and is text."""
    if column not in row:
        return f"it has no column {column!r}; it has {sorted(map(str, row))}"
    value = row[column]
    if isinstance(value, list) and value:
        try:
            check_messages(value)
            images_of(value)
        except (TypeError, ValueError) as error:
            return f"column {column!r}: {error}"
    elif not isinstance(value, str):
        return (
            f"column {column!r} must hold strings or lists of messages, got "
            f"{type(value).__name__}: {value!r:.80}"
        )
    return "" if is_text(value) else f"column {column!r} is not text: it can't be encoded as UTF-8"


def with_plain_prompt(row: Any, column: str) -> dict[str, Any]:
    """A row whose prompt holds images as plain values: read once for all rollouts of a group."""
    if isinstance(row[column], str):
        return row
    return {**row, column: [with_plain_images(message) for message in row[column]]}


def is_text(value: Any) -> bool:
    """Whether every string in nested lists and dictionaries can be encoded."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    elif isinstance(value, Mapping):
        return all(is_text(key) and is_text(item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        return all(map(is_text, value))
    return True


def row_error(row: dict[str, Any] | BadRow, checks: Sequence[RowCheck]) -> str:
    """The first thing that is wrong with a row, or ``""``."""
    if isinstance(row, BadRow):
        return row.reason
    return next(filter(None, (check(row) for check in checks)), "")


class PromptLimit:
    """Most tokens that a prompt may have, as the conversation that it opens.

    The system prompt and the chat template count, schemas of tools do not.

    Args:
        max_tokens: rows with a longer prompt are skipped.
        tokenizer: counts.
        chat_template_name: with which built-in template; the tokenizer's own when not given.

    Raises:
        ValueError: ``max_tokens`` is no positive number, or there is no such template.
    """

    def __init__(
        self,
        max_tokens: int,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        chat_template_name: str | None = None,
    ) -> None:
        check_not_none("PromptLimit", max_tokens=max_tokens)
        check_counts("PromptLimit", max_tokens=max_tokens)
        self.max_tokens = max_tokens
        self._encoder = ConversationEncoder(tokenizer, chat_template_name=chat_template_name)

    def error(self, prompt: str | list[dict[str, Any]], system_prompt: str | None) -> str:
        """That a prompt is too long, or ``""``."""
        messages = opening_messages(prompt, system_prompt)
        opened = self._encoder.encode_waiting(Conversations.from_messages([messages]))
        length = opened.num_tokens(0)
        if length <= self.max_tokens:
            return ""
        return f"the prompt has {length} tokens, {self.max_tokens} are allowed"


def opening_messages(
    prompt: str | list[dict[str, Any]], system_prompt: str | None
) -> list[dict[str, Any]]:
    """The conversation that a prompt opens, after the system prompt unless it has its own."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system_prompt is not None and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages


def check_same(settings: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` where a saved position belongs to something else, naming what."""
    other = [
        f"{name} is {value!r:.80} here and {saved.get(name)!r:.80} there"
        for name, value in settings.items()
        if value != saved.get(name)
    ]
    if other:
        raise ValueError(
            "DataLoadingPrimer: the saved position belongs to other data or settings: "
            f"{'; '.join(other)}."
        )


def digest(rows: Sequence[Any]) -> str:
    """The same for the same rows in every process."""
    shown = json.dumps(rows, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(shown.encode(errors="replace")).hexdigest()[:16]

"""The texts of a rollout, and what they have in common: answers, copies of the prompt, loops."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

from collectors.record import RolloutSample
from torchrl_data.display.text import message_text
from torchrl_envs.graders.answer_columns import ANSWER_COLUMNS, end_of_worked_answer

_SHORTEST_COPY: Final = 4
"""Characters; what is shorter is in many a prompt by chance."""
_LONG_COPY: Final = 20
"""Characters from which on a text is copied though single words were changed."""
_COPIED_WINDOW: Final = 8
_COPIED_FRACTION: Final = 0.8
_SHORTEST_LOOP: Final = 40
_LOOP_WINDOW: Final = 12
_LOOP_FRACTION: Final = 0.8
"""Prose of a thousand characters has less than 0.1, a table of numbers up to 0.6."""


def plain_text(text: str) -> str:
    """The text in lower case, with single spaces."""
    return " ".join(text.lower().split())


def repeated_fraction(text: str) -> float:
    """The fraction of a text's windows of 12 characters that stood before in the same text.

    Args:
        text: of less than 40 characters has 0.
    """
    if len(text) < _SHORTEST_LOOP:
        return 0.0
    windows = _windows(text, _LOOP_WINDOW)
    return 1 - len({*windows}) / len(windows)


def is_loop(text: str) -> bool:
    """Return whether a text repeats itself, four of five of its characters."""
    return repeated_fraction(text) >= _LOOP_FRACTION


def is_copied(text: str, source: str) -> bool:
    """Return whether a text of at least four characters is copied from another one.

    All of it has to be, or, from 20 characters on, four fifths of its windows of eight.

    Args:
        text: plain.
        source: plain.
    """
    if len(text) < _SHORTEST_COPY:
        return False
    if text in source or len(text) < _LONG_COPY:
        return text in source
    windows, known = _windows(text, _COPIED_WINDOW), _windows_of_source(source)
    return sum(each in known for each in windows) >= _COPIED_FRACTION * len(windows)


def holds(text: str, wanted: str) -> bool:
    """Return whether a text has another one in it, not as a part of longer words or numbers.

    Args:
        text: plain.
        wanted: plain, and not empty.
    """
    return re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", text) is not None


@dataclass(frozen=True)
class RolloutTexts:
    """The plain texts of a rollout."""

    prompt: str
    """What came before the policy's first turn."""
    turns: tuple[str, ...]
    """What the policy wrote, turn by turn, with its calls."""
    right: tuple[str, ...] = ()
    """The answer that the data have, in each of their columns for one."""
    columns: tuple[str, ...] = ()
    """The texts of all other columns of the data's row."""

    @cached_property
    def said(self) -> str:
        """All turns."""
        return "\n".join(self.turns)

    @cached_property
    def answer(self) -> str:
        """The last turn."""
        return self.turns[-1] if self.turns else ""

    @cached_property
    def is_right(self) -> bool | None:
        """Return whether the last turn holds the data's answer; ``None`` where they have none."""
        return any(holds(self.answer, each) for each in self.right) if self.right else None

    @cached_property
    def is_wanted(self) -> bool:
        """Return whether the last turn holds the data's answer, or a column but the prompt."""
        return self.is_right or any(
            len(each) >= _SHORTEST_COPY
            and 2 * len(each) <= len(self.prompt)
            and holds(self.answer, each)
            for each in self.columns
        )

    @cached_property
    def copies_prompt(self) -> bool:
        """Return whether the last turn is copied from the prompt, where it should not be.

        It should be where the data's answer stands in the prompt, or another column that it holds.
        A short text counts only where the data say that it is wrong.
        """
        may_be_meant = self.is_wanted or any(is_copied(each, self.prompt) for each in self.right)
        is_short = len(self.answer) < _LONG_COPY
        if may_be_meant or (is_short and self.is_right is None):
            return False
        return is_copied(self.answer, self.prompt)

    @cached_property
    def loops(self) -> bool:
        """Return whether a turn repeats itself, and the data's answer does not."""
        return any(map(is_loop, self.turns)) and not any(map(is_loop, self.right))


def texts_of(sample: RolloutSample) -> RolloutTexts:
    """The texts of a recorded rollout.

    Args:
        sample: with its messages and its row.
    """
    messages = [plain_text(message_text(each)) for each in sample.messages]
    sampled = {span.message for span in sample.tokens.spans if span.writer == "model"}
    roles = [each.get("role") for each in sample.messages]  # a prompt may hold turns as examples
    turns = [n for n, role in enumerate(roles) if role == "assistant" and n in (sampled or {n})]
    first = turns[0] if turns else len(messages)
    row: Mapping[str, Any] = sample.row or {}
    given = {n: _given_text(n, value) for n, value in row.items() if type(value) in (str, int)}
    answers = {name for name in given if name in ANSWER_COLUMNS}
    if type(row.get("target")) is int:  # may be a number to be reached, and not to be said
        answers -= {"target"}
    return RolloutTexts(
        prompt=sys.intern("\n".join(messages[:first])),  # the same of all of a group
        turns=tuple(messages[n] for n in turns),
        right=tuple(text for name, text in given.items() if name in answers and text),
        columns=tuple(text for name, text in given.items() if name not in answers),
    )


def _given_text(column: str, value: str | int) -> str:
    text = str(value)
    return plain_text(end_of_worked_answer(text) if column in ANSWER_COLUMNS else text)


@lru_cache(maxsize=64)
def _windows_of_source(source: str) -> frozenset[str]:
    """Of a prompt, which all rollouts of a group have."""
    return frozenset(_windows(source, _COPIED_WINDOW))


def _windows(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(len(text) - size + 1)]

"""The columns in which data sets have what is right, and the answer in their texts."""

import re
from typing import Final

ANSWER_COLUMNS: Final = ("answer", "solution", "target", "ground_truth", "label", "gold")
"""Columns of data sets that hold what is right."""


def end_of_worked_answer(answer: str) -> str:
    """The text after ``####``, as GSM8K has it, or all of it."""
    found = re.search(r"####\s*(.+)\s*$", answer)
    return found[1].strip() if found else answer

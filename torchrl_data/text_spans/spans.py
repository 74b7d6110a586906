"""Spans of a text: minimal groups of tokens of two tokenizers that cover the same bytes."""

from collections.abc import Sequence
from typing import NamedTuple


class TextSpan(NamedTuple):
    """Tokens of a student and of a teacher that cover exactly the same bytes."""

    student: slice
    """Which of the student's tokens."""
    teacher: slice
    """Which of the teacher's tokens."""


def align_spans(
    student: Sequence[int | None],
    teacher: Sequence[int | None],
    *,
    without: Sequence[tuple[int, int]] = (),
) -> list[TextSpan]:
    """Group the tokens that two tokenizers cut a text into: no group can be cut further.

    A token that spells nothing belongs to the group of the token before it, and those at the
    beginning to the first group. Tokens after the last common end are in no group.

    Args:
        student: where each token ends, in bytes of the text, rising; ``None`` where no cut is
            possible, inside of a character that the text does not have.
        teacher: the same of the other tokenizer.
        without: groups that cover any byte from ``start`` to ``stop`` of one of these are left out.

    Example:
        >>> align_spans([2, 3, 5, 8], [3, 4, 6, 8])  # they meet at 3 and at 8
        [TextSpan(student=slice(0, 2, None), teacher=slice(0, 1, None)), \
TextSpan(student=slice(2, 4, None), teacher=slice(1, 4, None))]
    """
    cuts = [{end: i + 1 for i, end in enumerate(ends) if end} for ends in (student, teacher)]
    spans: list[TextSpan] = []
    start, at = (0, 0), 0
    for end in sorted(cuts[0].keys() & cuts[1].keys()):
        stop = (cuts[0][end], cuts[1][end])
        if not any(begin < end and at < finish for begin, finish in without):
            spans.append(TextSpan(slice(start[0], stop[0]), slice(start[1], stop[1])))
        start, at = stop, end
    return spans

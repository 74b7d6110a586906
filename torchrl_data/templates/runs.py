"""Runs: known tokens and texts to be encoded, in turn, and who wrote them."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from torchrl_data.conversation.conversations import EncodedMessages, Source

from .control_tokens import ControlTokenGuard, RunStart, TextPiece

ROW_ERRORS: Final = (ValueError, TypeError, RecursionError)
"""What a row's own messages may raise: odd content, odd calls, text that is no Unicode."""


class Run(NamedTuple):
    """Tokens that are known, or a text to be encoded."""

    ids: tuple[int, ...]
    """The tokens; for a text, those of the scaffold that it begins with."""
    source: Source
    text: str | None = None
    start: RunStart = RunStart.CONTROL
    tail: tuple[int, ...] = ()
    """Tokens of the scaffold that a text ends with."""


def label_pieces(pieces: Sequence[TextPiece], spans: Sequence[tuple[int, int]]) -> list[Run]:
    """Say who wrote each piece: the model inside the spans."""
    runs = []
    for piece in pieces:
        ids = () if piece.control_id is None else (piece.control_id,)
        text = piece.text if piece.control_id is None else None
        if any(start <= piece.start < end for start, end in spans):
            source = Source.MODEL
        else:
            source = Source.TEMPLATE if text is None else Source.CONTENT
        runs.append(Run(ids, source, text, piece.before))
    return runs


def text_sources(ids: list[int], run: Run) -> list[Source]:
    """Sources of a text's tokens: the scaffold at its ends is the template's."""
    sources = [run.source] * len(ids)
    head, tail = len(run.ids), len(run.tail)
    if head and tuple(ids[:head]) == run.ids:
        sources[:head] = [Source.TEMPLATE] * head
    if tail and tail <= len(ids) - head and tuple(ids[-tail:]) == run.tail:
        sources[-tail:] = [Source.TEMPLATE] * tail
    return sources


def encode_runs(
    rows: Sequence[Sequence[Run]], guard: ControlTokenGuard
) -> list[EncodedMessages | Exception]:
    """Encode the text of all rows in one call of the tokenizer; an error for a row it refuses."""
    try:
        return _encode(rows, guard)
    except ROW_ERRORS as error:
        if len(rows) == 1:
            text = "".join(run.text or "" for run in rows[0])
            return [
                ValueError(
                    f"The tokenizer can't encode {text!r:.80}: {error}. Text must be Unicode, "
                    "without half of a surrogate pair, say."
                )
            ]
    return [result for row in rows for result in encode_runs([row], guard)]


def _encode(
    rows: Sequence[Sequence[Run]], guard: ControlTokenGuard
) -> list[EncodedMessages | Exception]:
    texts = [run for row in rows for run in row if run.text is not None]
    encoded = iter(
        guard.encode_texts([run.text or "" for run in texts], [run.start for run in texts])
    )
    results: list[EncodedMessages | Exception] = []
    for row in rows:
        ids: list[int] = []
        sources: list[Source] = []
        for run in row:
            if run.text is None:
                ids += run.ids
                sources += [run.source] * len(run.ids)
            else:
                new = next(encoded)
                ids += new
                sources += text_sources(new, run)
        results.append(EncodedMessages(ids, sources))
    return results


def encoded_or_raise(result: EncodedMessages | Exception) -> EncodedMessages:
    """The tokens of a row, where one that was refused is an error of all."""
    if isinstance(result, Exception):
        raise result
    return result

"""Spans of the assistant's words in the text of a template that does not mark them.

Nothing is compared with a known template: a fork, or one with a trailing space, works like the
original. A turn starts after the header that the template itself gives for a generation prompt
and ends with its first end-of-turn token. Content can't spell either, if they hold control
tokens; if they hold none, each turn is measured by rendering the messages before it.
"""

import re
from collections.abc import Callable, Sequence
from os.path import commonprefix
from typing import NamedTuple

from torchrl_data.messages import Message

Render = Callable[[Sequence[Message], bool], str]
"""Renders escaped messages, with or without a generation prompt."""

QUESTION: Message = {"role": "user", "content": "Question7"}
ANSWER: Message = {"role": "assistant", "content": "Answer7"}


_LAST_TAG = re.compile(r"(-?)(%\}|\}\}|#\})((?:(?!%\}|\}\}|#\}).)*)\Z", re.DOTALL)


class TurnShape(NamedTuple):
    """The text with which a template opens and closes an assistant's turn."""

    header: str
    """What opens the turn; nothing for some templates."""
    end_of_turn: str
    """The control token that ends it; nothing if there is none."""
    after: str
    """What follows the content: white space, end of turn and whatever comes after it."""
    header_is_control: bool
    """The header holds a control token, so that content can't spell it."""
    tail: str
    """What the template's source ends with, whatever the messages."""


def turn_shape(
    source: str, render: Render, first_control: Callable[[str], str | None]
) -> TurnShape:
    """Find how a template opens and closes an assistant's turn."""
    asked = render([QUESTION], False)
    opened = render([QUESTION], True)
    answered = render([QUESTION, ANSWER], False)
    at = answered.find(ANSWER["content"])
    if at < 0:
        raise ValueError(
            "The chat template does not show what the assistant says: messages "
            f"{[QUESTION, ANSWER]} are rendered as {answered!r}. Use another template, or mark the "
            "assistant's part with {% generation %} ... {% endgeneration %}."
        )
    both = ((opened, asked), (opened, answered[:at]))
    begin, end = (len(commonprefix(texts)) for texts in both)  # noqa: RUF071 (of texts, not paths)
    header = opened[begin:end]
    after = answered[at + len(ANSWER["content"]) :]
    control = first_control(after)
    if control is None or after.split(control, 1)[0].strip():
        control = ""
    # The text after the last tag of the source, as Jinja gives it.
    tag, tail = _LAST_TAG.search(source), ""
    if tag is not None and tag[1] != "-":
        # Jinja drops one line end at the end of the source, and one after a block or a comment.
        tail = tag[3].removesuffix("\n")
        tail = tail if tag[2] == "}}" else tail.removeprefix("\n")
    if not all(text.endswith(tail) for text in (asked, opened, answered)):
        tail = ""
    return TurnShape(header, control, after, first_control(header) is not None, tail)


def find_spans(
    rendered: str, messages: Sequence[Message], render: Render, shape: TurnShape
) -> list[tuple[int, int]]:
    """Start and end, in characters, of each assistant's message, end-of-turn token included."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    spans: list[tuple[int, int]] = []
    position = 0
    for _ in turns if shape.header_is_control and shape.end_of_turn else ():
        header = rendered.find(shape.header, position)
        start = header + len(shape.header)
        end = rendered.find(shape.end_of_turn, start)
        if header < 0 or end < 0:
            break
        position = end + len(shape.end_of_turn)
        spans.append((start, position))
    if len(spans) == len(turns):
        return spans
    spans = []
    for turn in turns:
        before = render(messages[:turn], True).removesuffix(shape.tail)
        until = render(messages[: turn + 1], False).removesuffix(shape.after)
        if not until.startswith(before) or not rendered.startswith(until):
            raise ValueError(
                f"Message {turn} (assistant) can't be told from the text that the chat template "
                "renders, as the template changes earlier text when messages are added. Mark the "
                "assistant's part with {% generation %} ... {% endgeneration %}."
            )
        end = len(until)
        if shape.end_of_turn:
            end = rendered.index(shape.end_of_turn, end) + len(shape.end_of_turn)
        spans.append((len(before), end))
    return spans

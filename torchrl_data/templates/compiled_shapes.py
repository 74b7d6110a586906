"""Message shapes compiled to runs of scaffold and slots for content, so that nothing is rendered.

What a template writes around messages depends on their shape (roles and entries), and on their
content only in ways that can be tried out: by white space at its ends, by being empty, and by the
words that the template's source compares it with. A shape is compiled once, from a rendering of
placeholders; contents for which the compiled form was seen to differ are rendered after all.
"""

import ast
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from torchrl_data.conversation import Source
from torchrl_data.messages import Message

from .content_shown import message_entries
from .control_tokens import ControlTokenGuard, RunStart, TextPiece, TokenRun

Shape = tuple[tuple[str, tuple[str, ...]], ...]
"""Role and entries of each message."""
MAX_SHAPES: Final = 512
"""Shapes that are kept; further ones are rendered."""
MAX_MESSAGES: Final = 24
"""Messages of a shape that is worth compiling."""
_LITERAL = re.compile(r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"")
_FORMS = ("{}", "{}x", "x{}", "x{}x")
# Whatever a template does to every content (escape it as JSON, cut it, change its case) shows here.
_GENERAL = (
    "some words",
    "a\"b'c\\d",
    "a\nb\tc",
    "<a> & {b} [c] %d",
    "Aé\u4e2d😀z",
    "a  b" * 3000,
    "0",
)
_FIELDS = ("content", "name", "tool_call_id")


class _Compiled(NamedTuple):
    runs: list[TokenRun | list[Any]]
    """A list stands for a text: its parts (strings, and slots as numbers), start, head, tail."""
    fields: list[tuple[int, str]]
    """Message and entry of each slot."""
    keeps_edges: bool
    """White space at the ends of the content is kept, and content may be empty."""
    sensitive: list[str]
    """Contents with one of these in them are rendered."""
    dropped: list[tuple[int, str]]
    """Message and entry of what is left out; messages that have any are rendered, and refused."""


class CompiledShapes:
    """Runs of messages by their shape."""

    def __init__(
        self,
        render: Callable[[Sequence[Message]], list[TextPiece]],
        guard: ControlTokenGuard,
        source: str,
    ) -> None:
        self._render = render
        self._guard = guard
        # What the template's source compares content with, and more.
        self._literals: set[str] = set()
        for match in _LITERAL.finditer(source):
            with suppress(SyntaxError, ValueError):
                value = ast.literal_eval(match.group())
                if isinstance(value, str) and 0 < len(value) <= 40 and not value.isspace():
                    self._literals.add(value.strip())
        self._cache: dict[Shape, _Compiled | None] = {}
        # Nobody can guess it, so no content can spell a slot.
        self._secret = secrets.token_hex(8)
        self._slot = re.compile(f"Slot{self._secret}n([0-9]+)x")

    def runs(self, messages: Sequence[Message]) -> list[TokenRun] | None:
        """The runs of messages, or ``None`` if they are to be rendered."""
        shape = tuple([(message["role"], tuple(message)) for message in messages])
        compiled = self._cache.get(shape)
        if compiled is None and shape not in self._cache:
            if len(self._cache) >= MAX_SHAPES or len(messages) > MAX_MESSAGES:
                return None
            compiled = self._cache[shape] = self._compile(messages)
        if compiled is None or any(messages[i].get(key) for i, key in compiled.dropped):
            return None
        values = [messages[i].get(field) for i, field in compiled.fields]
        for value in values:
            if type(value) is not str or any(word in value for word in compiled.sensitive):
                return None
            if not compiled.keeps_edges and (not value or value != value.strip()):
                return None
        return [run if isinstance(run, TokenRun) else _fill(run, values) for run in compiled.runs]

    def _compile(self, messages: Sequence[Message]) -> _Compiled | None:
        allowed = {"role", *_FIELDS}
        if any(not allowed.issuperset(m) or m["role"] == "assistant" for m in messages):
            return None
        every = [(i, key) for i, m in enumerate(messages) for key in _FIELDS if key in m]
        slots = self._slots(every)
        marked = _filled(messages, every, slots)
        try:
            shown = self._render(marked)
            text = "".join(piece.text for piece in shown)
            fields = [field for field, slot in zip(every, slots, strict=True) if slot in text]
            for value in ("", "other words"):  # nothing goes by a field that is not shown
                values = [slot if slot in text else value for slot in slots]
                if self._render(_filled(messages, every, values)) != shown:
                    return None
            pieces = self._render(_filled(messages, fields, self._slots(fields)))
        except ValueError:
            return None
        runs = [self._run_of(piece) for piece in pieces]
        held = [(entry.message, entry.key) for entry in message_entries(marked)]
        dropped = [entry for entry in held if entry not in fields]
        compiled = _Compiled(runs, fields, True, [], dropped)
        if not all(self._agrees(compiled, messages, value) for value in _GENERAL):
            return None
        edges = all(self._agrees(compiled, messages, v) for v in ("", " x", "x ", "\n", "\n x\n"))
        sensitive = [
            word
            for word in sorted(self._literals)
            if not all(self._agrees(compiled, messages, form.format(word)) for form in _FORMS)
        ]
        return compiled._replace(keeps_edges=edges, sensitive=sensitive)

    def _slots(self, fields: Sequence[Any]) -> list[str]:
        return [f"Slot{self._secret}n{n}x" for n in range(len(fields))]

    def _run_of(self, piece: TextPiece) -> Any:
        if piece.control_id is not None:
            return TokenRun((piece.control_id,), Source.TEMPLATE)
        # Strings at even places, numbers of slots at odd ones.
        parts: list[Any] = self._slot.split(piece.text)
        parts[1::2] = map(int, parts[1::2])
        if len(parts) == 1:
            return TokenRun(self._encode(piece.text, piece.before), Source.TEMPLATE)
        head = self._encode(parts[0], piece.before) if parts[0] else ()
        tail = self._encode(parts[-1], RunStart.RUN) if parts[-1] else ()
        return [parts, piece.before, head, tail]

    def _encode(self, text: str, start: RunStart) -> tuple[int, ...]:
        return tuple(self._guard.encode_texts([text], [start])[0])

    def _agrees(self, compiled: _Compiled, messages: Sequence[Message], value: str) -> bool:
        """Check that the compiled form gives what rendering gives, with a value in all slots."""
        values = [value] * len(compiled.fields)
        try:
            pieces = self._render(
                _filled(messages, compiled.fields, [self._guard.escape(value)] * len(values))
            )
        except ValueError:
            return False
        expected = [index for piece in pieces for index in self._run_of(piece).ids]
        filled = [run if isinstance(run, TokenRun) else _fill(run, values) for run in compiled.runs]
        return expected == [
            index
            for run in filled
            if run.text != ""
            for index in (run.ids if run.text is None else self._encode(run.text, run.start))
        ]


def _fill(text: list[Any], values: Sequence[Any]) -> TokenRun:
    parts, start, head, tail = text
    joined = "".join([part if type(part) is str else values[part] for part in parts])
    return TokenRun(head, Source.CONTENT, joined, start, tail)


def _filled(
    messages: Sequence[Message], fields: Sequence[tuple[int, str]], values: Sequence[str]
) -> list[Message]:
    filled = [dict(message) for message in messages]
    for (i, key), value in zip(fields, values, strict=True):
        filled[i][key] = value
    return filled

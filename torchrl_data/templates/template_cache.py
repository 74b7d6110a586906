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
from typing import Any, Final, NamedTuple

from torchrl_data.conversation.conversations import Source
from torchrl_data.conversation.record import Message

from .control_tokens import ControlTokenGuard, Run, RunStart, TextPiece
from .tools_shown import entries_of

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
    runs: list[Run | list[Any]]
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
        self._literals = _literals(source)
        self._cache: dict[Shape, _Compiled | None] = {}
        # Nobody can guess it, so no content can spell a slot.
        self._secret = secrets.token_hex(8)
        self._slot = re.compile(f"Slot{self._secret}n([0-9]+)x")

    def runs(self, messages: Sequence[Message]) -> list[Run] | None:
        """The runs of messages, or ``None`` if they are to be rendered."""
        shape = tuple([(message["role"], tuple(message)) for message in messages])
        compiled = self._cache.get(shape) or self._compile_once(shape, messages)
        if compiled is None or any(messages[i].get(key) for i, key in compiled.dropped):
            return None
        values = [messages[i].get(field) for i, field in compiled.fields]
        for value in values:
            if type(value) is not str or not self._fits(value, compiled):
                return None
        return [run if isinstance(run, Run) else _fill(run, values) for run in compiled.runs]

    @staticmethod
    def _fits(value: str, compiled: _Compiled) -> bool:
        if not compiled.keeps_edges and (not value or value[0].isspace() or value[-1].isspace()):
            return False
        return not any(word in value for word in compiled.sensitive)

    def _compile_once(self, shape: Shape, messages: Sequence[Message]) -> _Compiled | None:
        if shape in self._cache:
            return self._cache[shape]
        if len(self._cache) >= MAX_SHAPES or len(messages) > MAX_MESSAGES:
            return None
        compiled = self._cache[shape] = self._compile(messages)
        return compiled

    def _compile(self, messages: Sequence[Message]) -> _Compiled | None:
        allowed = {"role", *_FIELDS}
        if any(
            not allowed.issuperset(message) or message["role"] == "assistant"
            for message in messages
        ):
            return None
        every = [(i, key) for i, m in enumerate(messages) for key in _FIELDS if key in m]
        try:
            fields = self._shown(messages, every)
            pieces = None if fields is None else self._render_slots(messages, fields)
        except ValueError:
            return None
        if fields is None or pieces is None:
            return None
        runs = [self._run_of(piece) for piece in pieces]
        marked = _filled(messages, every, self._slots(every))
        held = [(entry.message, entry.key) for entry in entries_of(marked)]
        dropped = [entry for entry in held if entry not in fields]
        compiled = _Compiled(runs, fields, True, [], dropped)
        if not all(self._agrees(compiled, messages, value) for value in _GENERAL):
            return None
        edges = all(self._agrees(compiled, messages, v) for v in ("", " x", "x ", "\n", "\n x\n"))
        sensitive = [
            word
            for word in self._literals
            if not all(self._agrees(compiled, messages, form.format(word)) for form in _FORMS)
        ]
        return compiled._replace(keeps_edges=edges, sensitive=sensitive)

    def _shown(
        self, messages: Sequence[Message], fields: Sequence[tuple[int, str]]
    ) -> list[tuple[int, str]] | None:
        """The entries that the template shows, or ``None`` if it changes one of them."""
        pieces = self._render_slots(messages, fields)
        text = "".join(piece.text for piece in pieces)
        slots = zip(fields, self._slots(fields), strict=True)
        shown = [field for field, slot in slots if slot in text]
        for value in ("", "other words"):
            values = [
                slot if f in shown else value
                for f, slot in zip(fields, self._slots(fields), strict=True)
            ]
            if self._render(_filled(messages, fields, values)) != pieces:
                return None
        return shown

    def _slots(self, fields: Sequence[Any]) -> list[str]:
        return [f"Slot{self._secret}n{n}x" for n in range(len(fields))]

    def _render_slots(
        self, messages: Sequence[Message], fields: Sequence[tuple[int, str]]
    ) -> list[TextPiece]:
        return self._render(_filled(messages, fields, self._slots(fields)))

    def _run_of(self, piece: TextPiece) -> Any:
        if piece.control_id is not None:
            return Run((piece.control_id,), Source.TEMPLATE)
        parts = self._split_slots(piece.text)
        if len(parts) == 1:
            return Run(self._encode(piece.text, piece.before), Source.TEMPLATE)
        head = self._encode(parts[0], piece.before) if parts[0] else ()
        tail = self._encode(parts[-1], RunStart.RUN) if parts[-1] else ()
        return [parts, piece.before, head, tail]

    def _split_slots(self, text: str) -> list[Any]:
        """Strings at even places, numbers of slots at odd ones."""
        parts: list[Any] = []
        position = 0
        for match in self._slot.finditer(text):
            parts += [text[position : match.start()], int(match.group(1))]
            position = match.end()
        return [*parts, text[position:]]

    def _encode(self, text: str, start: RunStart) -> tuple[int, ...]:
        return tuple(self._guard.encode_texts([text], [start])[0])

    def _agrees(self, compiled: _Compiled, messages: Sequence[Message], value: str) -> bool:
        """Whether the compiled form gives what rendering gives, with a value in all slots."""
        values = [value] * len(compiled.fields)
        try:
            pieces = self._render(
                _filled(messages, compiled.fields, [self._guard.escape(value)] * len(values))
            )
        except ValueError:
            return False
        expected = [self._run_of(piece) for piece in pieces]
        filled = [run if isinstance(run, Run) else _fill(run, values) for run in compiled.runs]
        return _flat(expected) == _flat(self._with_ids(filled))

    def _with_ids(self, runs: Sequence[Run]) -> list[Run]:
        return [
            run if run.text is None else Run(self._encode(run.text, run.start), Source.TEMPLATE)
            for run in runs
            if run.text != ""
        ]


def _flat(runs: Sequence[Run]) -> list[int]:
    return [index for run in runs for index in run.ids]


def _fill(text: list[Any], values: Sequence[Any]) -> Run:
    parts, start, head, tail = text
    joined = "".join([part if type(part) is str else values[part] for part in parts])
    return Run(head, Source.CONTENT, joined, start, tail)


def _filled(
    messages: Sequence[Message], fields: Sequence[tuple[int, str]], values: Sequence[str]
) -> list[Message]:
    filled = [dict(message) for message in messages]
    for (i, key), value in zip(fields, values, strict=True):
        filled[i][key] = value
    return filled


def _literals(source: str) -> list[str]:
    """What the template's source compares content with, and more."""
    found = set()
    for match in _LITERAL.finditer(source):
        try:
            value = ast.literal_eval(match.group())
        except (SyntaxError, ValueError):
            continue
        if isinstance(value, str) and 0 < len(value) <= 40 and not value.isspace():
            found.add(value.strip())
    return sorted(found)

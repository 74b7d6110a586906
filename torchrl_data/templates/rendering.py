"""Rendering a chat template, and which part of the text its generation blocks gave.

The environment is the one that transformers renders chat templates with, but for the generation
blocks: they are marked in the text itself, so that any number of threads can render at once.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols

from torchrl_data.messages import PLACEHOLDER_ROLE, Message

from .sandbox import BoundedEnvironment, bounded_rendering, joined

# Nobody can guess the marks, so no content can spell them.
_SECRET: Final = secrets.token_hex(8)
_BEGIN: Final = f"\ua789{_SECRET}<"
_END: Final = f"\ua789{_SECRET}>"
_MARKS = re.compile(f"({_BEGIN}|{_END})")


class Rendered(NamedTuple):
    """The output of a template."""

    text: str
    spans: list[tuple[int, int]]
    """Where the generation blocks are, in characters: start and end of each."""


class _GenerationBlocks(Extension):
    """``{% generation %} ... {% endgeneration %}`` leaves marks around its output."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment.from_string(source)


def render_template(
    source: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> Rendered:
    """Render messages."""
    shown = [_joined(message) for message in messages if message["role"] != PLACEHOLDER_ROLE]
    values = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
    values |= variables or {}
    rendered = _render(source, shown, values)
    for i, message in enumerate(shown):
        content = message.get("content")
        if isinstance(content, _Parts):
            only_text = _Parts(part for part in content if part.get("type") == "text")
            texts = {**message, "content": only_text}
            if _render(source, [*shown[:i], texts, *shown[i + 1 :]], values) == rendered:
                raise ValueError(
                    f"The chat template leaves out what is no text in message {i} "
                    f"({message['role']}), which has parts of the types {content.types}. Take "
                    "them out, or use a template that shows them (chat_template_name)."
                )
    text, spans, begin = "", [], 0
    for piece in _MARKS.split(rendered):
        if piece == _BEGIN:
            begin = len(text)
        elif piece == _END:
            spans.append((begin, len(text)))
        else:
            text += piece
    return Rendered(text, spans)


def _render(source: str, messages: Sequence[Message], values: Mapping[str, Any]) -> str:
    try:
        template = _compile(source)
        context = template.new_context({"messages": messages, **values})
        with bounded_rendering():
            return joined(template.root_render_func(context))
    except Exception as error:  # a template is a program, and may fail of anything
        roles = [message["role"] for message in messages]
        text = str(error)
        if not isinstance(error, jinja2.TemplateError):
            text = f"{type(error).__name__}: {text}"
        raise ValueError(
            f"The chat template can't render messages of roles {roles}: {text}. Change the "
            "messages, or use another template (chat_template_name)."
        ) from error


class _Parts(list[Any]):
    """Parts of a content; a template that would print them as Python does can't render them."""

    @property
    def types(self) -> list[Any]:
        return [part.get("type") for part in self]

    def __radd__(self, text: Any) -> Any:
        return text + str(self)

    def __str__(self) -> str:
        raise TypeError(f"it shows content as text, which has parts of the types {self.types}")


def _joined(message: Message) -> Message:
    """A message whose parts are all text, with a string as content."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    if any(part.get("type") != "text" for part in parts):
        return {**message, "content": _Parts(parts)}
    return {**message, "content": "".join(str(part.get("text", "")) for part in parts)}

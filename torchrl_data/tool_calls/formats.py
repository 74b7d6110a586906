"""Formats in which the families of models write tool calls: one function per format.

Each finds the calls of a text, lazily and in order. All are total: any text gives calls and
errors, never an exception, in time linear in its length for a bounded number of calls.
"""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from .records import FoundCall, MalformedCall, ToolCall
from .strict_json import MAX_CALL_CHARS, read_json, value_end

Finder = Callable[[str, int], Iterator[FoundCall]]
"""Finds the calls of a text from a position on."""


class Format(NamedTuple):
    """A way to write tool calls."""

    find: Finder
    example: str
    """One call, shown to a model that got it wrong."""


def call_of(value: Any, keys: tuple[str, ...]) -> ToolCall | MalformedCall:
    """A call from the JSON object that stands for it."""
    first = keys[0]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return MalformedCall(f'a call is {{"name": <tool>, "{first}": {{...}}}}')
    if unknown := sorted(value.keys() - {"name", "id", "type", *keys}):
        return MalformedCall(f'a call has "name" and "{first}", not {", ".join(unknown):.200}')
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if not isinstance(arguments, dict):
        return MalformedCall(f'"{first}" must be an object')
    call_id = value.get("id")
    return ToolCall(value["name"], arguments, call_id if isinstance(call_id, str) else None)


def _read(
    body: str,
    keys: tuple[str, ...] = ("arguments",),
    name: str | None = None,
    call_id: str | None = None,
) -> ToolCall | MalformedCall:
    """The call of a JSON object or, where it has its name already, of that of its arguments."""
    try:
        value = read_json(body)
    except ValueError as error:
        return MalformedCall(str(error))
    if name is None:
        return call_of(value, keys)
    if not isinstance(value, dict):
        return MalformedCall("the arguments must be an object")
    return ToolCall(name, value, call_id)


_SPACE = re.compile(r"\s*+")


def _skip_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return position if space is None else space.end()


def after_mark(text: str, mark: str, position: int) -> int:
    """Return where the next mark ends: where to go on after a broken call."""
    at = text.find(mark, position)
    return len(text) if at < 0 else at + len(mark)


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def find_hermes(text: str, position: int = 0) -> Iterator[FoundCall]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3."""
    while (start := text.find(_OPEN, position)) >= 0:
        opened = start + len(_OPEN)
        # Looks inside JSON strings, so that a closer that an argument spells is none.
        body = _skip_space(text, opened)
        end = value_end(text, body) if text[body : body + 1] in ("{", "[") else -1
        close = -1 if end < 0 else _skip_space(text, end)
        if close < 0 or not text.startswith(_CLOSE, close):
            body, end = opened, text.find(_CLOSE, opened)
            close = end
        if close < 0:
            position, call = len(text), MalformedCall(f"the call is not closed with {_CLOSE}")
        else:
            position, call = close + len(_CLOSE), _read(text[body:end])
        yield FoundCall(start, position, call)


class _Markup(NamedTuple):
    """Calls of tags around a name, keys and values; values are not quoted."""

    opener: re.Pattern[str]
    """Begins a call."""
    name: re.Pattern[str]
    """The name, where the opener ends."""
    parameter: re.Pattern[str]
    """The key, up to the value."""
    value_end: str
    call_end: str
    end: re.Pattern[str]
    """``call_end`` and what may be around it."""
    line_break: str = ""
    """What is written between a value and its tag, and is no part of it."""


_FUNCTIONS: Final = _Markup(
    re.compile(r"(?:<tool_call>\s{0,8})?<function="),
    re.compile(r"([^<>\n]{1,256})>"),
    re.compile(r"\s*+<parameter=([^<>\n]{1,256})>\n?"),
    "</parameter>",
    "</function>",
    re.compile(r"\s*+</function>(?:\s*+</tool_call>)?"),
    "\n",
)
_ARG_KEYS: Final = _Markup(
    re.compile("<tool_call>"),
    re.compile(r"\s*+([^\s<>]{1,256})"),
    re.compile(r"\s*+<arg_key>([^<>\n]{1,256})</arg_key>\s*+<arg_value>"),
    "</arg_value>",
    _CLOSE,
    re.compile(r"\s*+</tool_call>"),
)
_INVOKES: Final = _Markup(
    re.compile(r"(?:<minimax:tool_call>\s{0,8})?<invoke name="),
    re.compile(r"\"?([^<>\n\"]{1,256})\"?>"),
    re.compile(r"\s*+<parameter name=\"?([^<>\n\"]{1,256})\"?>"),
    "</parameter>",
    "</invoke>",
    re.compile(r"\s*+</invoke>(?:\s*+</minimax:tool_call>)?"),
)


def find_xml(text: str, position: int = 0, markup: _Markup = _FUNCTIONS) -> Iterator[FoundCall]:
    """``<tool_call><function=name><parameter=key>value</parameter>...``: Qwen3-Coder, Qwen 3.5."""
    # A string's own first and last line break is kept, the ones that the format writes are not.
    while match := markup.opener.search(text, position):
        found = _marked_call(text, match.start(), match.end(), markup)
        position = found.end
        yield found


def _marked_call(text: str, start: int, at: int, markup: _Markup) -> FoundCall:
    arguments: dict[str, Any] = {}
    name = markup.name.match(text, at)
    if name is None:
        return FoundCall(start, at, MalformedCall(f"the call has no name after {text[start:at]}"))
    position = name.end()
    while parameter := markup.parameter.match(text, position):
        end = text.find(markup.value_end, parameter.end())
        if end < 0:
            return FoundCall(
                start, len(text), MalformedCall(f"a parameter has no {markup.value_end}")
            )
        if parameter[1] in arguments:
            error = MalformedCall(f"the parameter {parameter[1]:.80} is given twice")
            return FoundCall(start, after_mark(text, markup.call_end, end), error)
        arguments[parameter[1]] = text[parameter.end() : end].removesuffix(markup.line_break)
        position = end + len(markup.value_end)
    close = markup.end.match(text, position)
    if close is None:
        error = MalformedCall(f"the call has no {markup.call_end}")
        return FoundCall(start, after_mark(text, markup.call_end, position), error)
    if close.end() - start > MAX_CALL_CHARS:
        error = f"the call has {close.end() - start} characters; at most {MAX_CALL_CHARS}"
        return FoundCall(start, close.end(), MalformedCall(error))
    return FoundCall(start, close.end(), ToolCall(name[1].strip(), arguments, is_text=True))


_QWEN = re.compile(r"(?:<tool_call>\s{0,8})?(?P<xml><function=)|<tool_call>")


def find_qwen(text: str, position: int = 0) -> Iterator[FoundCall]:
    """JSON or XML inside ``<tool_call>``, told apart by what comes first."""
    while match := _QWEN.search(text, position):
        is_xml = match["xml"] is not None
        found = next((find_xml if is_xml else find_hermes)(text, match.start()))
        position = found.end
        yield found


_LLAMA = re.compile(
    r'(?P<tag><\|python_tag\|>)\s*+|(?:\A|(?<=[;\n]))[ \t]*+(?=\{\s*+"(?:name|type|function)"\s*+:)'
)
_LLAMA_KEYS = ("parameters", "arguments")
_MAX_OPEN: Final = 16
"""Objects that do not end, after which no more are looked at: each costs a look at much text."""


def find_llama(text: str, position: int = 0) -> Iterator[FoundCall]:
    """``{"name": ..., "parameters": {...}}``, perhaps after ``<|python_tag|>``: Llama 3."""
    # Without the tag, only an object that begins a line and has a name and parameters is a call:
    # any other JSON is an answer.
    num_open = 0
    while num_open < _MAX_OPEN and (match := _LLAMA.search(text, position)):
        start, body = match.start(), match.end()
        is_tagged = match["tag"] is not None
        end = value_end(text, body) if text.startswith("{", body) else -1
        num_open += end < 0
        position = end if end > 0 else body + 1
        if end > 0:
            window = text[body:end]
            call = _read(window, _LLAMA_KEYS)
        else:
            window = text[body : body + MAX_CALL_CHARS]
            call = MalformedCall("a call is one JSON object whose braces are closed")
        if is_tagged or any(f'"{key}"' in window for key in _LLAMA_KEYS):
            position = end if end > 0 else len(text)
            yield FoundCall(start, position, call)


_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAME = re.compile(r"\s*+([\w.-]{1,256})(?:\[CALL_ID\]([\w-]{1,256}))?(?:\[ARGS\])?\s*+")


def find_mistral(text: str, position: int = 0) -> Iterator[FoundCall]:
    """``[TOOL_CALLS] [{...}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}``: Mistral."""
    while (start := text.find(_MISTRAL, position)) >= 0:
        body = _skip_space(text, start + len(_MISTRAL))
        position = body
        if text.startswith("[", body):
            end = value_end(text, body)
            position = len(text) if end < 0 else end
            yield from _listed(text[body:position], start, position, is_closed=end >= 0)
            continue
        name = _MISTRAL_NAME.match(text, body)
        at = body if name is None else name.end()
        end = value_end(text, at) if name is not None and text.startswith("{", at) else -1
        if name is None or end < 0:
            following = text.find(_MISTRAL, body)
            position = len(text) if following < 0 else following
            yield FoundCall(
                start, position, MalformedCall("the call has no name and JSON arguments")
            )
        else:
            position = end
            yield FoundCall(start, end, _read(text[at:end], name=name[1], call_id=name[2]))


def _listed(body: str, start: int, end: int, *, is_closed: bool) -> Iterator[FoundCall]:
    """The calls of a JSON list, or of the one object in its place; they share their place."""
    try:
        if not is_closed:
            raise ValueError("the list of calls is not closed with ]")
        values = read_json(body)
    except ValueError as error:
        yield FoundCall(start, end, MalformedCall(str(error)))
        return
    for value in values if isinstance(values, list) else [values]:
        yield FoundCall(start, end, call_of(value, ("arguments",)))


_LIST = re.compile(r"(?:<\|tool_call\|>|<TOOLCALL>)\s*+")
_LIST_END = re.compile(r"\s*+(?:<\|/tool_call\|>|</TOOLCALL>)")


def find_lists(text: str, position: int = 0) -> Iterator[FoundCall]:
    """``<|tool_call|>[{...}]``: Phi 4 mini; ``<TOOLCALL>[{...}]</TOOLCALL>``: Nemotron Nano 2."""
    while match := _LIST.search(text, position):
        body = match.end()
        end = value_end(text, body) if text[body : body + 1] in ("[", "{") else -1
        if end < 0:
            following = _LIST.search(text, body)
            position = len(text) if following is None else following.start()
        else:
            close = _LIST_END.match(text, end)
            position = end if close is None else close.end()
        yield from _listed(text[body:end], match.start(), position, is_closed=end >= 0)


class _Section(NamedTuple):
    """Calls between control tokens, and control tokens around all of them."""

    open: str
    sep: str
    close: str
    first: str
    last: str
    ids: re.Pattern[str] | None = None
    """The name inside of a call's id, where the format has ids in the place of names."""


_DEEPSEEK: Final = _Section(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI: Final = _Section(
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    re.compile(r"(?:functions\.)?(.{1,256}?)(?::\d{1,9})?"),
)
_FENCE = re.compile(r"\s*+([^\n`]{1,256})\n```(?:json)?\s*+")


def find_deepseek(text: str, position: int = 0, marks: _Section = _DEEPSEEK) -> Iterator[FoundCall]:
    """DeepSeek V3 and R1: a type, a name and fenced JSON; V3.1: a name and JSON."""
    while (start := text.find(marks.open, position)) >= 0:
        head = start + len(marks.open)
        end = after_mark(text, marks.close, head)
        # What is around all calls belongs to the first one and to the last one.
        start -= len(marks.first) * text.endswith(marks.first, position, start)
        position = end + len(marks.last) * text.startswith(marks.last, end)
        sep = text.find(marks.sep, head, end)
        if sep < 0:
            yield FoundCall(start, position, MalformedCall(f"the call has no {marks.sep}"))
            continue
        name, call_id = text[head:sep].strip(), None
        body = _skip_space(text, sep + len(marks.sep))
        fence = None if text.startswith("{", body) else _FENCE.match(text, sep + len(marks.sep))
        if fence is not None:
            name, body = fence[1].strip(), fence.end()
        last = value_end(text, body) if text.startswith("{", body) else -1
        if last < 0 or last > end:
            yield FoundCall(start, position, MalformedCall("the call has no JSON arguments"))
        elif not text.startswith(marks.close, end - len(marks.close)):
            error = MalformedCall(f"the call is not closed with {marks.close}")
            yield FoundCall(start, position, error)
        else:
            if marks.ids is not None and (named := marks.ids.fullmatch(name)):
                name, call_id = named[1], name
            yield FoundCall(start, position, _read(text[body:last], name=name, call_id=call_id))


_HARMONY_END = re.compile(r"<\|(?:call|end|return|start)\|>")
_RECIPIENT = re.compile(r"(?:\A|\s)to=([^\s<]{1,256})")
_MAX_HEADER: Final = 1024


def find_harmony(text: str, position: int = 0) -> Iterator[FoundCall]:
    """``<|channel|>commentary to=functions.name json<|message|>{...}<|call|>``: gpt-oss."""
    # The last token of a turn is not in its text, so the end of the text closes a call too.
    while (mark := text.find("<|message|>", position)) >= 0:
        # The header starts after the last message, or at the beginning.
        start = max(position, mark - _MAX_HEADER)
        for opener in ("<|start|>", "<|end|>", "<|call|>"):
            found = text.rfind(opener, start, mark)
            if found >= 0:
                start = found + (0 if opener == "<|start|>" else len(opener))
        position = body = mark + len("<|message|>")
        to = _RECIPIENT.search(text[start:mark])
        if to is None:
            continue
        close = _HARMONY_END.search(text, body)
        end = len(text) if close is None else close.start()
        position = end if close is None or close.group() != "<|call|>" else close.end()
        name = to[1].removeprefix("functions.")
        yield FoundCall(start, position, _read(text[body:end].strip(), name=name))


FORMATS: Final[dict[str, Format]] = {
    "hermes": Format(
        find_hermes, '<tool_call>\n{"name": <tool>, "arguments": {...}}\n</tool_call>'
    ),
    "qwen3_coder": Format(
        find_qwen,
        "<tool_call>\n<function=tool>\n<parameter=key>\nvalue\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    "llama3": Format(find_llama, '{"name": <tool>, "parameters": {...}}'),
    "mistral": Format(find_mistral, '[TOOL_CALLS] [{"name": <tool>, "arguments": {...}}]'),
    "deepseek": Format(
        find_deepseek,
        f"{_DEEPSEEK.open}function{_DEEPSEEK.sep}tool\n```json\n{{...}}\n```{_DEEPSEEK.close}",
    ),
    "glm": Format(
        # <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...: GLM 4.5.
        functools.partial(find_xml, markup=_ARG_KEYS),
        "<tool_call>tool\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>",
    ),
    "minimax": Format(
        # <invoke name="..."><parameter name="key">value</parameter>...: MiniMax M2.
        functools.partial(find_xml, markup=_INVOKES),
        '<minimax:tool_call>\n<invoke name="tool">\n<parameter name="key">value</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
    ),
    "kimi": Format(
        # <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}: Kimi K2.
        functools.partial(find_deepseek, marks=_KIMI),
        f"{_KIMI.first}{_KIMI.open}functions.tool:0{_KIMI.sep}{{...}}{_KIMI.close}{_KIMI.last}",
    ),
    "phi4mini": Format(
        find_lists, '<|tool_call|>[{"name": <tool>, "arguments": {...}}]<|/tool_call|>'
    ),
    "nemotron": Format(find_lists, '<TOOLCALL>[{"name": <tool>, "arguments": {...}}]</TOOLCALL>'),
    "harmony": Format(
        find_harmony,
        "<|channel|>commentary to=functions.tool <|constrain|>json<|message|>{...}<|call|>",
    ),
}
"""Formats by name."""

"""Tool calls in the text of a model: every format in which they are written, read strictly."""

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .import_path import import_callable
from .templates.template import DEFAULT_TEMPLATE, builtin_template, family_of, own_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# What a parser of tool calls finds.


class ToolCall(NamedTuple):
    """A call that is well formed; whether such a tool exists is for the environment to say."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    """How the model calls this call, where its format has such names."""
    is_text: bool = False
    """The arguments are text, as formats write that do not quote them; the tool's schema says what
    each stands for."""


class MalformedCall(NamedTuple):
    """A call that could not be read."""

    error: str
    """What is wrong with it, so that the model can repair it."""


class Found(NamedTuple):
    """A call and where it is in the text."""

    start: int
    end: int
    call: ToolCall | MalformedCall


class ParsedTurn(NamedTuple):
    """What one assistant turn holds."""

    content: str
    """The text outside the calls."""
    calls: list[ToolCall | MalformedCall]
    """Calls in the order in which they were written."""
    positions: Sequence[int] = ()
    """Where each call starts, in characters of the turn; none where that is not known: all of them
    then count as at its beginning."""


# JSON as a model writes it: read strictly, in bounded time, whatever the text.

MAX_CALL_CHARS: Final = 64 * 1024
"""Most characters of one value."""
MAX_DEPTH: Final = 64
"""Most nested braces and brackets of one value."""
MAX_DIGITS: Final = 1000
"""Most digits of one integer."""

# The next bracket outside strings. Possessive, so that whatever has none is passed over once.
_BRACKET: Final = re.compile(
    r'[^"\[\]{}]*+(?:"(?:[^"\\]|\\.)*+"?[^"\[\]{}]*+)*+([\[\]{}])', re.DOTALL
)


def _end_and_depth(text: str, start: int) -> tuple[int, int]:
    """The end of what opens at ``start``, -1 beyond MAX_CHARS, and its deepest nesting."""
    depth = deepest = 0
    last = start + MAX_CALL_CHARS
    while bracket := _BRACKET.match(text, start, last):
        depth += 1 if bracket[1] in "[{" else -1
        deepest = max(deepest, depth)
        start = bracket.end()
        if depth <= 0:
            return start, deepest
    return -1, deepest


def value_end(text: str, start: int) -> int:
    """The position after the last bracket of what opens at ``start``; -1 beyond MAX_CHARS."""
    return _end_and_depth(text, start)[0]


def read_json(body: str) -> Any:
    """Read JSON that holds no key twice, no NaN, no huge integer, and is not too long or deep."""
    if len(body) > MAX_CALL_CHARS:
        raise ValueError(f"the call has {len(body)} characters; at most {MAX_CALL_CHARS}")
    # Counting is cheap, and the brackets of most calls are few.
    many = body.count("{") + body.count("[") > MAX_DEPTH
    if many and _end_and_depth(body, 0)[1] > MAX_DEPTH:
        raise ValueError(f"the call is nested deeper than {MAX_DEPTH} levels")
    try:
        return _DECODER.decode(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the call is not valid JSON: {error}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ValueError(f"a key is given twice in {[key for key, _ in pairs[:8]]}")
    return unique


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")


def _parse_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits:.40} is not finite")
    return value


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_unique_keys,
    parse_constant=_refuse,
    parse_float=_parse_float,
    parse_int=_parse_int,
)


# How the families of models write tool calls: one function per format.
#
# Each finds the calls of a text, lazily and in order. All are total: any text gives calls and
# errors, never an exception, in time linear in its length for a bounded number of calls.

Finder = Callable[[str, int], Iterator[Found]]
"""Finds the calls of a text from a position on."""


class Format(NamedTuple):
    """A way to write tool calls."""

    find: Finder
    example: str
    """One call, shown to a model that got it wrong."""


# Shared pieces -----------------------------------------------------------------------------------


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


def _after(text: str, mark: str, position: int) -> int:
    """Where the next mark ends: where to go on after a broken call."""
    at = text.find(mark, position)
    return len(text) if at < 0 else at + len(mark)


# Formats -----------------------------------------------------------------------------------------

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def find_hermes(text: str, position: int = 0) -> Iterator[Found]:
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
        yield Found(start, position, call)


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


def find_xml(text: str, position: int = 0, markup: _Markup = _FUNCTIONS) -> Iterator[Found]:
    """``<tool_call><function=name><parameter=key>value</parameter>...``: Qwen3-Coder, Qwen 3.5."""
    # A string's own first and last line break is kept, the ones that the format writes are not.
    while match := markup.opener.search(text, position):
        found = _marked_call(text, match.start(), match.end(), markup)
        position = found.end
        yield found


def _marked_call(text: str, start: int, at: int, markup: _Markup) -> Found:
    arguments: dict[str, Any] = {}
    name = markup.name.match(text, at)
    if name is None:
        return Found(start, at, MalformedCall(f"the call has no name after {text[start:at]}"))
    position = name.end()
    while parameter := markup.parameter.match(text, position):
        end = text.find(markup.value_end, parameter.end())
        if end < 0:
            return Found(start, len(text), MalformedCall(f"a parameter has no {markup.value_end}"))
        if parameter[1] in arguments:
            error = MalformedCall(f"the parameter {parameter[1]:.80} is given twice")
            return Found(start, _after(text, markup.call_end, end), error)
        arguments[parameter[1]] = text[parameter.end() : end].removesuffix(markup.line_break)
        position = end + len(markup.value_end)
    close = markup.end.match(text, position)
    if close is None:
        error = MalformedCall(f"the call has no {markup.call_end}")
        return Found(start, _after(text, markup.call_end, position), error)
    if close.end() - start > MAX_CALL_CHARS:
        error = f"the call has {close.end() - start} characters; at most {MAX_CALL_CHARS}"
        return Found(start, close.end(), MalformedCall(error))
    return Found(start, close.end(), ToolCall(name[1].strip(), arguments, is_text=True))


_QWEN = re.compile(r"(?:<tool_call>\s{0,8})?(?P<xml><function=)|<tool_call>")


def find_qwen(text: str, position: int = 0) -> Iterator[Found]:
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


def find_llama(text: str, position: int = 0) -> Iterator[Found]:
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
            yield Found(start, position, call)


_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_NAME = re.compile(r"\s*+([\w.-]{1,256})(?:\[CALL_ID\]([\w-]{1,256}))?(?:\[ARGS\])?\s*+")


def find_mistral(text: str, position: int = 0) -> Iterator[Found]:
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
            yield Found(start, position, MalformedCall("the call has no name and JSON arguments"))
        else:
            position = end
            yield Found(start, end, _read(text[at:end], name=name[1], call_id=name[2]))


def _listed(body: str, start: int, end: int, *, is_closed: bool) -> Iterator[Found]:
    """The calls of a JSON list, or of the one object in its place; they share their place."""
    try:
        if not is_closed:
            raise ValueError("the list of calls is not closed with ]")
        values = read_json(body)
    except ValueError as error:
        yield Found(start, end, MalformedCall(str(error)))
        return
    for value in values if isinstance(values, list) else [values]:
        yield Found(start, end, call_of(value, ("arguments",)))


_LIST = re.compile(r"(?:<\|tool_call\|>|<TOOLCALL>)\s*+")
_LIST_END = re.compile(r"\s*+(?:<\|/tool_call\|>|</TOOLCALL>)")


def find_lists(text: str, position: int = 0) -> Iterator[Found]:
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


def find_deepseek(text: str, position: int = 0, marks: _Section = _DEEPSEEK) -> Iterator[Found]:
    """DeepSeek V3 and R1: a type, a name and fenced JSON; V3.1: a name and JSON."""
    while (start := text.find(marks.open, position)) >= 0:
        head = start + len(marks.open)
        end = _after(text, marks.close, head)
        # What is around all calls belongs to the first one and to the last one.
        start -= len(marks.first) * text.endswith(marks.first, position, start)
        position = end + len(marks.last) * text.startswith(marks.last, end)
        sep = text.find(marks.sep, head, end)
        if sep < 0:
            yield Found(start, position, MalformedCall(f"the call has no {marks.sep}"))
            continue
        name, call_id = text[head:sep].strip(), None
        body = _skip_space(text, sep + len(marks.sep))
        fence = None if text.startswith("{", body) else _FENCE.match(text, sep + len(marks.sep))
        if fence is not None:
            name, body = fence[1].strip(), fence.end()
        last = value_end(text, body) if text.startswith("{", body) else -1
        if last < 0 or last > end:
            yield Found(start, position, MalformedCall("the call has no JSON arguments"))
        elif not text.startswith(marks.close, end - len(marks.close)):
            error = MalformedCall(f"the call is not closed with {marks.close}")
            yield Found(start, position, error)
        else:
            if marks.ids is not None and (named := marks.ids.fullmatch(name)):
                name, call_id = named[1], name
            yield Found(start, position, _read(text[body:last], name=name, call_id=call_id))


_HARMONY_END = re.compile(r"<\|(?:call|end|return|start)\|>")
_RECIPIENT = re.compile(r"(?:\A|\s)to=([^\s<]{1,256})")
_MAX_HEADER: Final = 1024


def find_harmony(text: str, position: int = 0) -> Iterator[Found]:
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
        yield Found(start, position, _read(text[body:end].strip(), name=name))


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


# Tool calls in what a model wrote, in the format of its family.
#
# The parser is total: any text gives calls and errors, never an exception, in time linear in its
# length.

MAX_CALLS: Final = 16
"""Most calls of one turn; further ones are refused with one error."""
DEFAULT_FORMAT: Final = "hermes"

TurnParser = Callable[[str], ParsedTurn]
_THOUGHT, _THOUGHT_END = "<think>", "</think>"


def parse_tool_calls(text: str, format: str = DEFAULT_FORMAT) -> ParsedTurn:
    """Find the tool calls of an assistant turn.

    What a model calls while it thinks (before ``</think>``) is no call.

    Args:
        text: what the model wrote, in any shape.
        format: one of :data:`FORMATS`.

    Returns:
        The text outside the calls, and the calls in order.

    Raises:
        ValueError: there is no such format.

    Example:
        >>> call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        >>> turn = parse_tool_calls("Let me add. " + call)
        >>> turn.content, turn.calls[0].name, turn.calls[0].arguments
        ('Let me add.', 'add', {'a': 1, 'b': 2})
    """
    written = _format(format)
    # A turn may begin with a thought, which may never end.
    thinks = text.lstrip().startswith(_THOUGHT)
    found = _collect(written, text, _after(text, _THOUGHT_END, 0) if thinks else 0)
    end = 0
    if _THOUGHT_END in text:
        # Where the first thought ends, but for one that an argument of a call spells.
        read = [(start, stop) for start, stop, call in found if isinstance(call, ToolCall)]
        marks = (mark.span() for mark in re.finditer(_THOUGHT_END, text))
        ends = (end for at, end in marks if not any(start < at < stop for start, stop in read))
        end = next(ends, 0)
    if end > 0:
        after = _collect(written, text, end)
        # A call that is broken may have spelled the end of a thought itself.
        if after or not any(start < end < stop for start, stop, _ in found):
            found = after
    if not found:
        return ParsedTurn(text.strip(), [], [])
    content, position = "", 0
    for start, stop, _ in found:
        content += text[position:start]
        position = max(position, stop)
    starts, _, calls = map(list, zip(*found, strict=True))
    return ParsedTurn((content + text[position:]).strip(), calls, starts)


def tool_call_parser(
    format: str | TurnParser | None = None, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> TurnParser:
    """Give the parser of a format; your own has to be total.

    Args:
        format: a name of :data:`FORMATS`; a function of your own from the text of a turn to a
            :class:`ParsedTurn`, or where it is, ``package.module:name``; ``None`` for the format
            that the chat template teaches.
        tokenizer: has the chat template.

    Raises:
        ValueError: there is no such format, or no such function.
        TypeError: the function gives something else, of a turn without text.
    """
    if isinstance(format, str) and ":" in format:
        format = import_callable("tool_call_format", format)
    if callable(format):
        turn = format("")
        if not isinstance(turn, ParsedTurn):
            raise TypeError(
                f"tool_call_format: {format!r:.80} must give a ParsedTurn(content, calls) of any "
                f"text, got {turn!r:.80} of an empty one."
            )
        return format
    name = format or detect_tool_call_format(tokenizer)
    _format(name)
    return functools.partial(parse_tool_calls, format=name)


_SIGNS: Final = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm"),
    ("<minimax:tool_call>", "minimax"),
    ("<|tool_call_begin|>", "kimi"),
    ("<TOOLCALL>", "nemotron"),
    ("<|tool_call|>", "phi4mini"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("<|channel|>", "harmony"),
    ("<tool_call>", "hermes"),
    ("<|start_header_id|>", "llama3"),
    ('{"name": function name, "parameters"', "llama3"),
)
_FAMILIES: Final = {"deepseek": "deepseek"}
"""Formats of families whose built-in template does not show any."""


def detect_tool_call_format(tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """The format that a model's chat template teaches."""
    family = family_of(tokenizer) or ""
    template = own_template(tokenizer) or builtin_template(family or DEFAULT_TEMPLATE)
    return format_of_template(template, family=family)


def format_of_template(template: str, *, family: str = "") -> str:
    """The format that a chat template teaches; ``hermes`` where it teaches none.

    Args:
        template: Jinja source.
        family: of the tokenizer, for templates that show no call.
    """
    shown = (name for sign, name in _SIGNS if sign in template)
    return next(shown, _FAMILIES.get(family, DEFAULT_FORMAT))


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"There is no tool call format {name!r}; there are {sorted(FORMATS)}.")
    return FORMATS[name]


def _collect(format: Format, text: str, start: int) -> list[Found]:
    """Calls; those that are malformed say how to write one."""
    found: list[Found] = []
    for item in format.find(text, start):
        if len(found) == MAX_CALLS:
            error = MalformedCall(f"at most {MAX_CALLS} calls in a turn; the rest is ignored")
            found.append(Found(item.start, len(text), error))
            break
        if isinstance(item.call, MalformedCall):
            error = f"{item.call.error}; write a call as {format.example}"
            found.append(item._replace(call=MalformedCall(error)))
        else:
            found.append(item)
    return found

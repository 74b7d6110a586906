"""How the families of models write tool calls: one function per format.

Each finds the calls of a text, lazily and in order. All are total: any text gives calls and errors,
never an exception, in time linear in its length for a bounded number of calls.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from .records import Found, MalformedCall, ToolCall
from .strict_json import MAX_CHARS, read_json, value_end

Finder = Callable[[str, int], Iterator[Found]]
"""Finds the calls of a text from a position on."""


class Format(NamedTuple):
    """A way to write tool calls."""

    find: Finder
    example: str
    """One call, shown to a model that got it wrong."""


# Shared pieces -----------------------------------------------------------------------------------


def call_of(value: Any, *, argument_keys: tuple[str, ...] = ("arguments",)) -> ToolCall:
    """A call from the JSON object that stands for it."""
    first = argument_keys[0]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f'a call is {{"name": <tool>, "{first}": {{...}}}}')
    unknown = sorted(value.keys() - {"name", "id", "type", *argument_keys})
    if unknown:
        raise ValueError(f'a call has "name" and "{first}", not {", ".join(unknown):.200}')
    arguments: Any = next((value[key] for key in argument_keys if key in value), {})
    if not isinstance(arguments, dict):
        raise ValueError(f'"{first}" must be an object')
    call_id = value.get("id")
    return ToolCall(value["name"], arguments, call_id if isinstance(call_id, str) else None)


def _read(body: str, keys: tuple[str, ...] = ("arguments",)) -> ToolCall | MalformedCall:
    try:
        return call_of(read_json(body), argument_keys=keys)
    except ValueError as error:
        return MalformedCall(str(error))


def _read_arguments(name: str, body: str, call_id: str | None = None) -> ToolCall | MalformedCall:
    try:
        arguments = read_json(body)
    except ValueError as error:
        return MalformedCall(str(error))
    if not isinstance(arguments, dict):
        return MalformedCall("the arguments must be an object")
    return ToolCall(name, arguments, call_id)


_SPACE = re.compile(r"\s*+")


def _skip_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return position if space is None else space.end()


def _object_body(text: str, position: int, closer: str) -> tuple[int, int, int] | None:
    """Start and end of the value at a position, and the end of what closes it, if all is there."""
    # Looks inside JSON strings, so that a closer that an argument spells is none.
    start = _skip_space(text, position)
    if text[start : start + 1] not in ("{", "["):
        return None
    end = value_end(text, start)
    after = _skip_space(text, end)
    if end < 0 or not text.startswith(closer, after):
        return None
    return start, end, after + len(closer)


def _closed_by(text: str, start: int, body: int, closer: str) -> Found:
    """The call between an opener and its closer."""
    span = _object_body(text, body, closer)
    if span is not None:
        return Found(start, span[2], _read(text[span[0] : span[1]]))
    end = text.find(closer, body)
    if end < 0:
        return Found(start, len(text), MalformedCall(f"the call is not closed with {closer}"))
    return Found(start, end + len(closer), _read(text[body:end]))


# Formats -----------------------------------------------------------------------------------------

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def find_hermes(text: str, position: int = 0) -> Iterator[Found]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3."""
    while (start := text.find(_OPEN, position)) >= 0:
        found = _closed_by(text, start, start + len(_OPEN), _CLOSE)
        position = found.end
        yield found


_FUNCTION = re.compile(r"(?:<tool_call>\s{0,8})?<function=")
_FUNCTION_NAME = re.compile(r"<function=([^<>\n]{1,256})>")
_PARAMETER = re.compile(r"\s*+<parameter=([^<>\n]{1,256})>\n?")
_FUNCTION_END = re.compile(r"\s*+</function>(?:\s*+</tool_call>)?")


def find_xml(text: str, position: int = 0) -> Iterator[Found]:
    """``<tool_call><function=name><parameter=key>value</parameter>...``: Qwen3-Coder, Qwen 3.5."""
    # Values are not quoted; a string's own first and last line break is kept, the ones that the
    # format writes around it are not.
    while match := _FUNCTION.search(text, position):
        start = match.start()
        found = _xml_call(text, start, match.end() - len("<function="))
        position = found.end
        yield found


def _xml_call(text: str, start: int, at: int) -> Found:
    arguments: dict[str, Any] = {}
    name = _FUNCTION_NAME.match(text, at)
    if name is None:
        return Found(start, at + 1, MalformedCall("the call has no <function=name>"))
    position = name.end()
    while parameter := _PARAMETER.match(text, position):
        end = text.find("</parameter>", parameter.end())
        if end < 0:
            return Found(start, len(text), MalformedCall("a parameter has no </parameter>"))
        if parameter[1] in arguments:
            error = MalformedCall(f"the parameter {parameter[1]:.80} is given twice")
            return Found(start, _xml_end(text, end), error)
        arguments[parameter[1]] = text[parameter.end() : end].removesuffix("\n")
        position = end + len("</parameter>")
    close = _FUNCTION_END.match(text, position)
    if close is None:
        return Found(start, _xml_end(text, position), MalformedCall("the call has no </function>"))
    if close.end() - start > MAX_CHARS:
        error = f"the call has {close.end() - start} characters; at most {MAX_CHARS}"
        return Found(start, close.end(), MalformedCall(error))
    return Found(start, close.end(), ToolCall(name[1].strip(), arguments, is_text=True))


def _xml_end(text: str, position: int) -> int:
    """Where to go on after a broken call."""
    end = text.find("</function>", position)
    return len(text) if end < 0 else end + len("</function>")


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
            window = text[body : body + MAX_CHARS]
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
            yield from _mistral_list(text, start, body, end)
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
            yield Found(start, end, _read_arguments(name[1], text[at:end], name[2]))


def _mistral_list(text: str, start: int, body: int, end: int) -> Iterator[Found]:
    if end < 0:
        yield Found(start, len(text), MalformedCall("the list of calls is not closed with ]"))
        return
    try:
        values = read_json(text[body:end])
    except ValueError as error:
        yield Found(start, end, MalformedCall(str(error)))
        return
    for value in values:
        try:
            call: ToolCall | MalformedCall = call_of(value)
        except ValueError as error:
            call = MalformedCall(str(error))
        # The calls of a list share its place in the text.
        yield Found(start, end, call)


_DS_OPEN, _DS_SEP, _DS_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DS_FIRST, _DS_LAST = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_FENCE = re.compile(r"\s*+([^\n`]{1,256})\n```(?:json)?\s*+")


def find_deepseek(text: str, position: int = 0) -> Iterator[Found]:
    """DeepSeek V3 and R1: a type, a name and fenced JSON; V3.1: a name and JSON."""
    while (start := text.find(_DS_OPEN, position)) >= 0:
        head = start + len(_DS_OPEN)
        end = _deepseek_end(text, head)
        # What is around all calls belongs to the first one and to the last one.
        start -= len(_DS_FIRST) * text.endswith(_DS_FIRST, position, start)
        position = end + len(_DS_LAST) * text.startswith(_DS_LAST, end)
        sep = text.find(_DS_SEP, head, end)
        if sep < 0:
            yield Found(start, position, MalformedCall(f"the call has no {_DS_SEP}"))
            continue
        name = text[head:sep].strip()
        body = _skip_space(text, sep + len(_DS_SEP))
        fence = None if text.startswith("{", body) else _FENCE.match(text, sep + len(_DS_SEP))
        if fence is not None:
            name, body = fence[1].strip(), fence.end()
        last = value_end(text, body) if text.startswith("{", body) else -1
        if last < 0 or last > end:
            yield Found(start, position, MalformedCall("the call has no JSON arguments"))
        elif not text.startswith(_DS_CLOSE, end - len(_DS_CLOSE)):
            yield Found(start, position, MalformedCall(f"the call is not closed with {_DS_CLOSE}"))
        else:
            yield Found(start, position, _read_arguments(name, text[body:last]))


def _deepseek_end(text: str, head: int) -> int:
    end = text.find(_DS_CLOSE, head)
    return len(text) if end < 0 else end + len(_DS_CLOSE)


_HARMONY_END = re.compile(r"<\|(?:call|end|return|start)\|>")


def find_harmony(text: str, position: int = 0) -> Iterator[Found]:
    """``<|channel|>commentary to=functions.name json<|message|>{...}<|call|>``: gpt-oss."""
    # The last token of a turn is not in its text, so the end of the text closes a call too.
    while (mark := text.find("<|message|>", position)) >= 0:
        start = _header_start(text, position, mark)
        header = text[start:mark]
        body = mark + len("<|message|>")
        position = body
        to = _RECIPIENT.search(header)
        if to is None:
            continue
        close = _HARMONY_END.search(text, body)
        end = len(text) if close is None else close.start()
        position = end if close is None or close.group() != "<|call|>" else close.end()
        name = to[1].removeprefix("functions.")
        yield Found(start, position, _read_arguments(name, text[body:end].strip()))


_RECIPIENT = re.compile(r"(?:\A|\s)to=([^\s<]{1,256})")
_MAX_HEADER: Final = 1024


def _header_start(text: str, position: int, mark: int) -> int:
    """Where the header before a message starts: after the last message, or at the beginning."""
    lowest = max(position, mark - _MAX_HEADER)
    for opener in ("<|start|>", "<|end|>", "<|call|>"):
        found = text.rfind(opener, lowest, mark)
        if found >= 0:
            lowest = max(lowest, found + (0 if opener == "<|start|>" else len(opener)))
    return lowest


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
        f"{_DS_OPEN}function{_DS_SEP}tool\n```json\n{{...}}\n```{_DS_CLOSE}",
    ),
    "harmony": Format(
        find_harmony,
        "<|channel|>commentary to=functions.tool <|constrain|>json<|message|>{...}<|call|>",
    ),
}
"""Formats by name."""

"""Answers of tools as the model reads them: valid text, never longer than its cap, and images."""

import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping, Set
from typing import Any, Final, TypeAlias

from torchrl_data.images import image_part, is_image, is_picture, read_part
from torchrl_data.stop_reason import StopReason

from .concurrency.calls import is_async
from .concurrency.outcome import Call, Outcome

MAX_RESULT_BYTES: Final = 64 * 1024
"""Default cap of one tool message, in bytes of UTF-8."""
MAX_ERROR_BYTES: Final = 2 * 1024
"""Cap of an error's message, in bytes of UTF-8."""
Content: TypeAlias = str | list[dict[str, Any]]
"""What a message says: text, or parts of which some are images."""

_ITEMS: Final = 1024
_REST: Final = "\n[... the rest was cut]"


def result_text(outcome: Outcome, *, max_bytes: int = MAX_RESULT_BYTES) -> str:
    """The tool message for a call.

    Args:
        outcome: what the call gave.
        max_bytes: longer results are cut, with a mark that says so; bytes of UTF-8 without the
            mark.

    Returns:
        What :func:`value_text` gives, or for an error a JSON object
        ``{"error": "<type>: <message>"}``.
    """
    if outcome.error is not None:
        return error_text(error_line(outcome.error))
    return value_text(outcome.value, max_bytes=max_bytes)


def error_line(error: BaseException) -> str:
    """The type and the message of an error, whatever its ``str`` does; at most 2 KiB."""
    return clean_text(f"{type(error).__name__}: {_safe_str(error)}", MAX_ERROR_BYTES)


def environment_error(error: BaseException, *where: str) -> str:
    """The ``stop_reason`` of an episode whose environment failed.

    Args:
        error: what was raised.
        *where: names of what failed.
    """
    return ": ".join([StopReason.ENVIRONMENT_ERROR, *where, error_line(error)])


def error_text(message: str) -> str:
    """A JSON object that tells the model what went wrong."""
    return json.dumps({"error": clean_text(message, MAX_ERROR_BYTES)}, ensure_ascii=False)


def value_text(value: Any, *, max_bytes: int = MAX_RESULT_BYTES) -> str:
    """Any value as text."""
    # value: strings and bytes are taken as they are; numbers, `None`, lists, dictionaries, sets,
    # dataclasses, pydantic models, arrays and what they hold become JSON; anything else becomes
    # `str(value)`, a string of the JSON where data hold it.
    if isinstance(value, bytes | bytearray | memoryview):
        raw = memoryview(value).cast("B")
        text = bytes(raw[: max_bytes + 1]).decode("utf-8", errors="replace")
        return _cut(text, max_bytes, len(raw)) if raw[max_bytes:] else clean_text(text, max_bytes)
    if isinstance(value, str):
        return clean_text(value, max_bytes)
    pieces: list[str] = []
    size = 0
    try:
        # In pieces, so that a large structure is never written out whole.
        is_scalar = value is None or isinstance(value, int | float)
        for piece in [_JSON.encode(value)] if is_scalar else _JSON.iterencode(value):
            if piece[0] == '"' and not pieces:  # no data, and so text without quotes
                return clean_text(json.loads(piece), max_bytes)
            pieces.append(piece)
            size += len(piece)
            if size > max_bytes:
                return _head("".join(pieces), max_bytes) + _REST
    except (TypeError, ValueError, RecursionError):
        return clean_text(_safe_str(value), max_bytes)
    return clean_text("".join(pieces), max_bytes)


def clean_text(text: str, max_bytes: int) -> str:
    """Text that can be encoded, cut to a size."""
    if len(text) > max_bytes:  # a character is a byte at least
        return _cut(text, max_bytes, None)
    # A lone surrogate is not text: it can't be encoded, hence not tokenised.
    data = text.encode("utf-8", errors="replace")
    return data.decode("utf-8") if len(data) <= max_bytes else _cut(text, max_bytes, None)


def value_content(value: Any, *, max_bytes: int = MAX_RESULT_BYTES) -> Content:
    """Any value as the content of a message.

    Args:
        value: a ``PIL.Image.Image`` or an image part (``{"type": "image", ...}``), or a list with
            one in it, becomes a list of parts; anything else becomes text.
        max_bytes: longer text is cut, that of all parts together; bytes of UTF-8. Images are not.

    Raises:
        ValueError: an image can't be read.
        TypeError: it is of no known type.
    """
    items = value if isinstance(value, list | tuple) else [value]
    if not any(is_picture(item) or is_image(item) for item in items):
        return value_text(value, max_bytes=max_bytes)
    parts: list[dict[str, Any]] = []
    for item in items:
        if is_picture(item):
            parts.append(image_part(item))
        elif is_image(item):
            # A tool's data are read, whatever it says that they are.
            own = {key: value for key, value in item.items() if key != "mime_type"}
            parts.append(dict(read_part(_without_path(own))))
        else:
            is_text = isinstance(item, Mapping) and item.get("type") == "text" and "text" in item
            text = value_text(item["text"] if is_text else item, max_bytes=max_bytes)
            max_bytes = max(0, max_bytes - len(text.encode()))
            parts.append({"type": "text", "text": text})
    return parts


def _without_path(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """An image part that names no file: the text of its path might be the model's own words."""
    for name in ("image", "url"):
        if isinstance(text := part.get(name), str) and not text.startswith("data:"):
            raise ValueError(
                f"a tool gives an image as a PIL image, bytes, a pathlib.Path or base 64 ('data'), "
                f"not as text that names a file: {name}={text!r:.80}"
            )
    return part


def as_content(function: Call, max_bytes: int) -> Call:
    """A call whose result is made a message's content where it runs, under its deadline."""

    async def call_async() -> Content:
        return value_content(await function(), max_bytes=max_bytes)

    def call() -> Content:
        value = function()
        if inspect.iscoroutine(value):
            value.close()
            raise TypeError("a tool that is not a coroutine function returned a coroutine")
        return value_content(value, max_bytes=max_bytes)

    return call_async if is_async(function) else call


class _Items(list[Any]):
    """The items of an array as a list that JSON can walk through, made as far as it gets."""

    def __init__(self, array: Any) -> None:
        super().__init__()
        self._array = array

    def __bool__(self) -> bool:
        return len(self._array) > 0

    def __iter__(self) -> Iterator[Any]:
        if getattr(self._array, "ndim", 1) > 1:
            yield from map(_Items, self._array)
            return
        for start in range(0, len(self._array), _ITEMS):
            yield from self._array[start : start + _ITEMS].tolist()


def _plain(value: Any) -> Any:
    """Return what JSON can show of a value that is not JSON itself."""
    kind: Any = type(value)
    if isinstance(value, Set):
        plain: Any = sorted(value, key=repr)
    elif dataclasses.is_dataclass(kind):
        plain = {f.name: getattr(value, f.name) for f in dataclasses.fields(kind)}
    elif hasattr(kind, "model_dump"):
        plain = value.model_dump(mode="json")
    elif hasattr(kind, "tolist"):
        is_scalar = getattr(value, "ndim", 1) == 0 or not hasattr(kind, "__len__")
        plain = value.tolist() if is_scalar else _Items(value)
    else:
        is_bytes = isinstance(value, bytes)
        plain = value.decode("utf-8", errors="replace") if is_bytes else _safe_str(value)
    return plain


_JSON: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_plain)


def _safe_str(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # str() is the tool's code: it may raise anything
        return f"<{type(value).__name__} that can't be shown: {type(error).__name__}>"


def _head(text: str, max_bytes: int) -> str:
    """Keep as many whole characters as fit."""
    head = text[:max_bytes].encode("utf-8", errors="replace")[:max_bytes]
    return head.decode("utf-8", errors="ignore")


def _cut(text: str, max_bytes: int, total: int | None) -> str:
    """The beginning of a text, and how much is missing."""
    shown = _head(text, max_bytes)
    missing = f"{len(text) - len(shown)} more characters"
    missing = missing if total is None else f"{total - max_bytes} more bytes"
    return f"{shown}\n[... {missing} were cut]"

"""What the model reads after a call: always valid text, never longer than its cap."""

import json
from typing import Any, Final

from .concurrent_calls import Outcome

MAX_RESULT_CHARS: Final = 64 * 1024
"""Default cap of one tool message."""
MAX_ERROR_CHARS: Final = 2 * 1024
"""Cap of an error's message."""


def result_text(outcome: Outcome, *, max_chars: int = MAX_RESULT_CHARS) -> str:
    """The tool message for a call.

    Args:
        outcome: what the call gave.
        max_chars: longer results are cut, with a mark that says so.

    Returns:
        A string result as it is, anything else as JSON where it can be and as ``str`` where not; an
        error as a JSON object ``{"error": "<type>: <message>"}``.
    """
    if outcome.error is not None:
        return error_text(f"{type(outcome.error).__name__}: {_safe_str(outcome.error)}")
    return _clean(_value_text(outcome.value), max_chars)


def error_text(message: str) -> str:
    """A JSON object that tells the model what went wrong."""
    return json.dumps({"error": _clean(message, MAX_ERROR_CHARS)}, ensure_ascii=False)


def _value_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return _safe_str(value)


def _safe_str(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # str() is the tool's code: it may raise anything
        return f"<{type(value).__name__} that can't be shown: {type(error).__name__}>"


def _clean(text: str, max_chars: int) -> str:
    # A lone surrogate is not text: it can't be encoded, hence not tokenised.
    text = text.encode("utf-8", errors="replace").decode("utf-8")
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[... {len(text) - max_chars} more characters were cut]"

"""JSON as a model writes it: read strictly, in bounded time, for every text."""

import json
import math
import re
from typing import Any, Final

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

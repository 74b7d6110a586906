"""Checks of single settings, the same everywhere: who, what is wrong, what was found.

Settings are given by name (``check_counts("Primer", group_size=size)``); None is off.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Final, TypeVar

Choice = TypeVar("Choice", bound=str)
Thing = TypeVar("Thing")

POSITIVE: Final = "(0, inf)"
NOT_NEGATIVE: Final = "[0, inf)"


def _named(who: str, name: str) -> str:
    return f"{who}: {name}" if who else name


def one_of(
    name: str,
    value: object,
    choices: Sequence[Choice],
    aliases: Mapping[str, Choice] | None = None,
    *,
    who: str = "",
) -> Choice:
    """Check a setting that takes one of a few names."""
    known = (aliases or {}).get(value, value) if isinstance(value, str) else value
    for choice in choices:
        if known == choice:
            return choice
    raise ValueError(f"{_named(who, name)} must be one of {tuple(choices)}, got {value!r}.")


def check_not_none(who: str, /, **settings: object) -> None:
    """Check that settings which can't be off are not None."""
    for name, value in settings.items():
        if value is None:
            raise ValueError(f"{_named(who, name)} must be given, got None.")


def check_columns(who: str, columns: Collection[str], needed: Iterable[str], do: str = "") -> None:
    """Refuse data that lack columns.

    Args:
        who: needs them.
        columns: of the data.
        needed: their names.
        do: what may be done where the data lack some; a sentence after a space.

    Raises:
        ValueError: they lack some.
    """
    if missing := [column for column in needed if column not in columns]:
        raise ValueError(
            f"{who} needs the columns {missing}, which the data lack; they have "
            f"{sorted(columns)}.{do}"
        )


def check_counts(who: str = "", least: int = 1, /, **counts: int | None) -> None:
    """Check that settings are whole numbers of at least ``least``."""
    for name, value in counts.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise ValueError(
                f"{_named(who, name)} must be a whole number, at least {least}, got {value!r}."
            )


def check_numbers(who: str = "", within: str = "(-inf, inf)", /, **numbers: float | None) -> None:
    """Check that settings are finite numbers within an interval, written as in ``"(0, 1]"``."""
    low, high = map(float, within[1:-1].split(","))
    for name, value in numbers.items():
        if value is None:
            continue
        holds = (
            isinstance(value, Real)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and (low <= value if within[0] == "[" else low < value)
            and (value <= high if within[-1] == "]" else value < high)
        )
        if not holds:
            where = "" if within == "(-inf, inf)" else f" in {within}"
            raise ValueError(f"{_named(who, name)} must be a finite number{where}, got {value!r}.")


def pair(name: str, value: object, *, who: str = "") -> tuple[float, float]:
    """Check a setting that takes two numbers."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        low, high = value
        if isinstance(low, Real) and isinstance(high, Real):
            return float(low), float(high)
    raise ValueError(f"{_named(who, name)} takes a pair of numbers (low, high), got {value!r}.")


def check_type(name: str, value: object, kind: type, *, who: str = "") -> None:
    """Check a setting that takes an object of a class."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{_named(who, name)} takes {kind.__name__}(...), got {value!r}.")


def takes_argument(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has an argument of a name, or takes any as ``**kwargs``.

    Args:
        function: or a method.
        name: of the argument.

    Example:
        >>> takes_argument(sorted, "key"), takes_argument(sorted, "order")
        (True, False)
    """
    parameters = inspect.signature(function).parameters.values()
    return any(each.name == name or each.kind is each.VAR_KEYWORD for each in parameters)


def check_names(who: str, names: Iterable[str], known: Collection[str]) -> None:
    """Check that settings given by name are known."""
    for name in names:
        if name not in known:
            hint = "".join(f" Did you mean {m!r}?" for m in get_close_matches(name, known, n=1))
            raise TypeError(f"{who} has no setting {name!r}.{hint} It has {sorted(known)}.")

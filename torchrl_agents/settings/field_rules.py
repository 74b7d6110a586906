"""Rules of single settings, which stand at their fields: a default, and what a value must be.

    num_steps: int = setting(100, AT_LEAST_1)
    mode: str = setting("sync", among("sync", "streaming", "ray"))

A subclass that gives a field another default keeps the rule: ``num_steps: int = 60``.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final, TypeVar, cast

Default = TypeVar("Default")
_RULE: Final = "rule"


@dataclass(frozen=True)
class FieldRule:
    """What a setting must be; ``None`` may always be, and of a list the rule is each value's."""

    words: str
    """They stand after ``must be``."""
    holds: Callable[[Any], bool]
    """Whether a value is so."""
    values: tuple[str, ...] = ()
    """Names that it may be, where there are few."""

    def breaches(self, path: str, value: Any) -> Iterator[str]:
        """Say what the value of a setting must be where it is not, of a list each of its values."""
        if isinstance(value, Sequence) and not isinstance(value, str):
            for place, each in enumerate(value):
                yield from self.breaches(f"{path}[{place}]", each)
        elif value is not None and not self.holds(value):
            told = repr(value) if isinstance(value, str) else value
            yield f"{path} must be {self.words}, got {told}."


def among(*values: str) -> FieldRule:
    """Return the rule of a setting that is one of a few names."""
    return FieldRule(f"one of {', '.join(values)}", lambda value: value in values, values)


def interval(text: str) -> FieldRule:
    """Return the rule of a number between two bounds: ``"[0, 1)"`` is 0 and more, and below 1."""
    low, high = map(float, text[1:-1].split(","))

    def holds(value: float) -> bool:
        is_above = low <= value if text[0] == "[" else low < value
        return is_above and (value <= high if text[-1] == "]" else value < high)

    return FieldRule(f"in {text}", holds)


AT_LEAST_0: Final = FieldRule("at least 0", lambda value: value >= 0)
AT_LEAST_1: Final = FieldRule("at least 1", lambda value: value >= 1)
FINITE: Final = FieldRule("a finite number", math.isfinite)
NOT_NEGATIVE: Final = FieldRule(
    "at least 0 and finite", lambda value: math.isfinite(value) and value >= 0
)
POSITIVE: Final = FieldRule("positive and finite", lambda value: math.isfinite(value) and value > 0)


def setting(default: Default, rule: FieldRule) -> Default:
    """Return a field of a data class, with a rule for its values.

    Args:
        default: of the setting; each object has a copy of a list.
        rule: for the setting, here and in subclasses that change its default.
    """
    own: Any = {"default": default}
    if isinstance(default, list):
        own = {"default_factory": default.copy}
    return cast("Default", field(**own, metadata={_RULE: rule}))


def rule_of(kind: type, name: str) -> FieldRule | None:
    """Return the rule of a data class's field: its own, or that of the nearest base with one."""
    for base in kind.__mro__:
        known = vars(base).get("__dataclass_fields__", {})
        if name in known and _RULE in known[name].metadata:
            return known[name].metadata[_RULE]
    return None


def values_of(kind: type, name: str) -> tuple[str, ...]:
    """Return the names that a data class's field may be; none where others may be, too."""
    rule = rule_of(kind, name)
    return () if rule is None else rule.values


def broken_rules(settings: Any, prefix: str = "") -> Iterator[str]:
    """Say of each setting that breaks its rule what it must be, and what it is.

    Args:
        settings: an object of a data class; fields that are such objects are looked into.
        prefix: before the names of its fields.
    """
    for each in fields(settings):
        value, path = getattr(settings, each.name), f"{prefix}{each.name}"
        if is_dataclass(value):
            yield from broken_rules(value, f"{path}.")
        elif (rule := rule_of(type(settings), each.name)) is not None:
            yield from rule.breaches(path, value)

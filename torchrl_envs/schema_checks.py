"""Arguments checked against JSON schemas that somebody else wrote, in bounded time all the same."""

import functools
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import regex
from jsonschema import Draft202012Validator, SchemaError, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend
from referencing import Registry

DEADLINE_S: Final = 0.25
"""Of the check of one call's arguments."""
_MAX_LATE: Final = 3
"""How often a pattern may miss that deadline before it is tried no more."""
_MAX_PATTERN: Final = 4096
_LITERAL: Final = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are no schemas."""

now = threading.local()
_late: Counter[str] = Counter()


class SlowSchemaError(Exception):
    """Arguments could not be checked in time."""


def make_validator(schema: dict[str, Any]) -> Validator:
    """A validator that keeps the deadline of its thread, if that has one."""
    Draft202012Validator.check_schema(schema)
    keywords, patterns, waiting = set(), [], [schema]
    for node in waiting:
        if isinstance(node, Mapping):
            keywords |= node.keys()
            patterns += [node.get("pattern"), *(node.get("patternProperties") or ())]
            waiting += [value for key, value in node.items() if key not in _LITERAL]
        elif isinstance(node, list):
            waiting += node
    for pattern in patterns:
        if not isinstance(pattern, str):  # an argument of that name
            continue
        if len(pattern) > _MAX_PATTERN:
            size = f"a pattern has {len(pattern)} characters"
            raise SchemaError(f"{size}, more than {_MAX_PATTERN}")
        try:
            regex.compile(pattern)
        except regex.error as error:
            raise SchemaError(f"{pattern!r:.200} is no pattern: {error}") from error
    if {"unevaluatedProperties", "patternProperties"} <= keywords:
        raise SchemaError("unevaluatedProperties beside patternProperties is not supported")
    # A registry of its own, so that a reference to somewhere else is never fetched.
    return _InTime(schema, registry=Registry())


def _remaining_s() -> float:
    remaining = getattr(now, "deadline", math.inf) - time.monotonic()
    if remaining <= 0:
        raise SlowSchemaError(f"checking takes more than {DEADLINE_S:g} s")
    return remaining


def _matches(pattern: str, text: str) -> bool:
    if _late[pattern] >= _MAX_LATE:
        raise SlowSchemaError(f"the pattern {pattern!r:.200} takes too long")
    try:
        return regex.search(pattern, text, timeout=min(_remaining_s(), DEADLINE_S)) is not None
    except TimeoutError:
        _late[pattern] += 1
        raise SlowSchemaError(f"the pattern {pattern!r:.200} takes too long") from None


Errors = Iterator[ValidationError]


def _pattern(validator: Any, pattern: str, instance: Any, _: Any) -> Errors:
    if validator.is_type(instance, "string") and not _matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, _: Any) -> Errors:
    if validator.is_type(instance, "object"):
        for pattern, schema in patterns.items():
            for name, value in instance.items():
                if _matches(pattern, name):
                    yield from validator.descend(value, schema, path=name, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Errors:
    if not validator.is_type(instance, "object"):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    others = {name: value for name, value in instance.items() if name not in named}
    rest = {n: v for n, v in others.items() if not any(_matches(p, n) for p in patterns)}
    own = Draft202012Validator.VALIDATORS["additionalProperties"]
    yield from own(validator, allowed, rest, {})


def _unique_items(validator: Any, unique: bool, instance: Any, _: Any) -> Errors:
    if unique and validator.is_type(instance, "array"):
        seen = {json.dumps(_comparable(item), sort_keys=True) for item in instance}
        if len(seen) < len(instance):
            yield ValidationError(f"{instance!r} has non-unique elements")


def _comparable(value: Any) -> Any:
    """Compare as JSON schemas do: 1 and 1.0 are equal."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    if isinstance(value, dict):
        return {name: _comparable(item) for name, item in value.items()}
    return value


def _in_time(check: Any, validator: Any, value: Any, instance: Any, schema: Any) -> Errors:
    _remaining_s()
    yield from check(validator, value, instance, schema) or ()


_CHECKS: Final = {
    **Draft202012Validator.VALIDATORS,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
}
_InTime: Final = extend(
    Draft202012Validator, {key: functools.partial(_in_time, own) for key, own in _CHECKS.items()}
)

"""Settings that are the options of a library class, as its record has and describes them."""

import re
import sys
from collections.abc import Collection
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Any, Final

_PLAIN: Final = {kind.__name__: kind for kind in (bool, int, float, str)}


def option_settings(name: str, record: type, *, leave_out: Collection[str] = ()) -> type:
    """A data class of settings with one for each option of a record, and with its descriptions.

    All are ``None``, which leaves an option as the record has it. An option that is a record itself
    becomes a group of settings. What is neither a number, a text nor a truth value is not checked
    before the record is made.

    Args:
        name: of the class, which no other one has: workers find it by its name.
        record: a frozen data class; its annotations are texts.
        leave_out: options that the script gives itself.
    """
    columns: list[Any] = []
    for option in fields(record):
        if option.name in leave_out:
            continue
        words = re.findall(r"[\w.]+", str(option.type))
        scope = vars(sys.modules[record.__module__])
        inner = [scope[word] for word in words if is_dataclass(scope.get(word))]
        if inner:
            kind = option_settings(f"{name}_{option.name}", inner[0])
            columns.append((option.name, kind, field(default_factory=kind)))
            continue
        plain = [_PLAIN[word] for word in words if word in _PLAIN]
        if not plain and type(option.default) in _PLAIN.values():
            plain = [type(option.default)]
        columns.append((option.name, plain[0] | None if len(plain) == 1 else Any, None))
    about = {"__doc__": record.__doc__, "__module__": __name__, "described_in": record}
    globals()[name] = made = make_dataclass(name, columns, namespace=about)
    return made


def given_options(settings: Any, record: type) -> dict[str, Any]:
    """The options that settings give, by name, for the record.

    Args:
        settings: an object with attributes of what :func:`option_settings` made of the record.
        record: the record.
    """
    given: dict[str, Any] = {}
    for option in fields(record):
        value = getattr(settings, option.name, None)
        if is_dataclass(value):
            inner = type(value).described_in  # type: ignore[attr-defined]
            own = given_options(value, inner)
            value = inner(**own) if own else None
        if value is not None:
            given[option.name] = tuple(value) if isinstance(value, list) else value
    return given

"""A sandbox for chat templates: they come with a model, and can't reach out or go on for ever.

Jinja's sandbox keeps a template from everything but its variables, and its ranges short. Here its
loops have a deadline, and no text, list or number becomes huge.
"""

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import jinja2
import jinja2.nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_LENGTH: Final = 1 << 26
"""Characters of a text, and items of a list, that a template makes at most."""
RENDER_S: Final = 10.0
"""How long the loops of one rendering may go on."""
_PRINTING: Final = frozenset({"string", "tojson", "pprint", "join", "format", "replace", "escape"})
_MAX_BITS: Final = 1 << 12
_MAX_WIDTH: Final = 1 << 20
_WIDTH: Final = re.compile(r"[0-9]{7,}|\*")
_deadline_s: ContextVar[float] = ContextVar("deadline of a rendering")


class TooMuchError(jinja2.TemplateError):
    """A template computes for too long, or makes something huge."""


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """Loops of templates that are rendered in here have a deadline."""
    token = _deadline_s.set(time.monotonic() + RENDER_S)
    try:
        yield
    finally:
        _deadline_s.reset(token)


def joined(chunks: Iterable[str]) -> str:
    """Return what a template gives, piece by piece.

    Raises:
        TooMuchError: it is too long.
    """
    parts, length = [], 0
    for chunk in chunks:
        length += len(chunk)
        _check_length(length)
        parts.append(chunk)
    return "".join(parts)


class Bounds(Extension):
    """Functions that bounded templates call: a clock in loops, a check where texts are joined."""

    def tick(self) -> None:
        """An iteration of a loop begins."""
        if time.monotonic() > _deadline_s.get(float("inf")):
            raise TooMuchError(f"it computes for more than {RENDER_S:g} s")

    def concat(self, *parts: Any) -> str:
        """The texts of some values, one after the other."""
        return joined(str(_printable(part)) for part in parts)


class _Inserted(NodeTransformer):
    """Puts the calls of :class:`Bounds` into a template."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds

    def visit_For(self, node: Any) -> Any:
        self.generic_visit(node)
        call = self._bounds.call_method("tick", lineno=node.lineno)
        node.body.insert(0, jinja2.nodes.ExprStmt(call, lineno=node.lineno))
        return node

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        return self._bounds.call_method("concat", node.nodes, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which nothing becomes huge.

    Args:
        **options: as for Jinja's.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        extensions = [*options.pop("extensions", ()), Bounds]
        super().__init__(**options, extensions=extensions, finalize=_printable)
        self.filters.update({name: _bounded(name, f) for name, f in self.filters.items()})

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        tree = super()._parse(source, name, filename)
        bounds = next(x for x in self.extensions.values() if isinstance(x, Bounds))
        tree = _Inserted(bounds).visit(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute what can make something huge, unless it would."""
        if operator == "*":
            sizes = [len(x) for x in (left, right) if isinstance(x, str | list | tuple)]
            counts = [x for x in (left, right) if isinstance(x, int)]
            if sizes and counts:
                _check_length(sizes[0] * counts[0])
            elif len(counts) == 2:
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        elif operator == "+" and isinstance(left, str | list | tuple):
            _check_length(len(left) + (len(right) if isinstance(right, str | list | tuple) else 0))
        elif operator == "%" and isinstance(left, str):
            _check_call("format", [left, right])
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or a method, unless what it gives would be huge."""
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps `format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _check_call(getattr(method, "__name__", ""), [owner, *args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses to make something huge."""

    @functools.wraps(function)  # with the marks by which Jinja knows what it takes
    def bounded(*args: Any, **kwargs: Any) -> Any:
        given = args[1:] if hasattr(function, "jinja_pass_arg") else args
        _check_call(name, [*given, *kwargs.values()])
        return function(*args, **kwargs)

    return bounded


def _check_call(name: str, args: list[Any]) -> None:
    """Check what a method of a text, or a filter, would make of its arguments."""
    if name in _PRINTING:
        for each in args:
            _printable(each)
    if any(isinstance(x, int) and abs(x) > _MAX_WIDTH for x in args[1:]):
        raise TooMuchError(f"it asks {name} for more than {_MAX_WIDTH} characters or items")
    if name == "replace" and len(args) > 2:
        text, old, new = (str(x) for x in args[:3])
        _check_length(len(text) + text.count(old) * len(new))
    elif name == "join":  # of the method the separator comes first, of the filter the items
        separator = next((x for x in args if isinstance(x, str)), "")
        items = next((x for x in args if isinstance(x, list | tuple)), ())
        texts = (x for x in items if isinstance(x, str))
        _check_length(len(separator) * len(items) + sum(map(len, texts)))
    elif name in ("format", "format_map") and isinstance(args[0], str):
        _check_widths(args[0])


def _printable(value: Any) -> Any:
    """A value whose text is not huge; lists may hold one list many times."""
    waiting, count = [value], 0
    while waiting:
        each = waiting.pop()
        if isinstance(each, list | tuple | dict):
            count += len(each)
            if count > _MAX_WIDTH:
                raise TooMuchError(f"it writes more than {_MAX_WIDTH} items as text")
            waiting += each.values() if isinstance(each, dict) else each
    return value


def _check_widths(text: str) -> None:
    if _WIDTH.search(text):
        raise TooMuchError(f"it formats with a width of more than {_MAX_WIDTH}, or with one of '*'")


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise TooMuchError(f"it makes something of more than {MAX_LENGTH} characters or items")


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TooMuchError(f"it computes a number of more than {_MAX_BITS} bits")

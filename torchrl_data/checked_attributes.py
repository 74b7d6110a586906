"""Checks of what is set on an object that exists: it takes effect later, or raises."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, ClassVar, Final


class ChecksAttributes:
    """Mixin of configurable objects: an attribute that is set later takes effect, or raises.

    Once an object is made, an argument of its constructor can be set only where the class has a
    property with a setter of that name, or lists it in :attr:`changeable`. A name that the object
    does not have can't be set at all, but for names with a leading underscore. A subclass that
    is written elsewhere may set further attributes; the arguments of its base stay fixed.

    Raises (when an attribute is set):
        AttributeError: the argument is fixed, or there is no such attribute.
    """

    changeable: ClassVar[frozenset[str]] = frozenset()
    """Arguments that are plain attributes, read whenever they are needed."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if (init := vars(cls).get("__init__")) is not None:
            cls.__init__ = _noting_its_end(init)

    def __setattr__(self, name: str, value: Any) -> None:
        if vars(self).get("_is_made") and not name.startswith("_"):
            self._check_settable(name)
            if name in self.changeable:
                value = self._checked_change(name, value)
        super().__setattr__(name, value)

    def _checked_change(self, name: str, value: Any) -> Any:
        """Return what one of :attr:`changeable` is set to, checked as at construction.

        Raises:
            ValueError: it is out of range, or can't take effect with the others.
        """
        del name
        return value

    def _check_settable(self, name: str) -> None:
        cls, who = type(self), type(self).__name__
        if name in (can := changeable_of(cls)):
            return
        arguments = arguments_of(cls)
        if name in arguments:
            more = f" These can be changed: {', '.join(sorted(can))}." if can else ""
            raise AttributeError(
                f"{who}: {name} is fixed when it is made, and setting it later would have no "
                f"effect, or half of one. Make another one with {name}=...{more}"
            )
        found = inspect.getattr_static(cls, name, None)
        if isinstance(found, property) and found.fset is None:
            raise AttributeError(f"{who}: {name} can't be set; it follows from the others.")
        if _is_written_elsewhere(cls) or hasattr(self, name):
            return
        known = sorted({n for n in (*arguments, *can, *vars(self)) if not n.startswith("_")})
        hint = "".join(f" Did you mean {m!r}?" for m in get_close_matches(name, known, n=1))
        raise AttributeError(f"{who} has no attribute {name!r} to set.{hint} It has {known}.")


def _noting_its_end(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor after whose outermost call the object counts as made."""

    @functools.wraps(init)
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        state = vars(self)
        state["_num_constructors"] = state.get("_num_constructors", 0) + 1
        try:
            init(self, *args, **kwargs)
        finally:
            state["_num_constructors"] -= 1
        if not state["_num_constructors"]:
            del state["_num_constructors"]
            state["_is_made"] = True

    return noting


@functools.cache
def changeable_of(cls: type[ChecksAttributes]) -> frozenset[str]:
    """Attributes that can be set later: plain ones, and own properties with a setter.

    Args:
        cls: the class; a property of TorchRL's may set what nothing here reads.
    """
    setters = {
        name
        for base in cls.__mro__
        if issubclass(base, ChecksAttributes)
        for name, value in vars(base).items()
        if isinstance(value, property) and value.fset is not None
    }
    return cls.changeable | setters


@functools.cache
def arguments_of(cls: type) -> frozenset[str]:
    """Names of the arguments of a class's own constructor and of those of its bases here.

    Args:
        cls: a subclass of :class:`ChecksAttributes`.
    """
    names: set[str] = set()
    for base in cls.__mro__:
        is_ours = issubclass(base, ChecksAttributes) and not _is_written_elsewhere(base)
        if is_ours and "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            names.update(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, _EITHER))
    return frozenset(names - {"self"})


def _is_written_elsewhere(cls: type) -> bool:
    """Return whether a class is one of a user's."""
    return cls.__module__.partition(".")[0] not in _PACKAGES


_EITHER: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD
_PACKAGES: Final = frozenset(
    {"collectors", "objectives", "torchrl_agents", "torchrl_data", "torchrl_envs"}
    | {"torchrl_modules"}
)

"""The functions and classes of a user's own that settings name: ``package.module:name``."""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any


def import_callable(setting: str, path: str) -> Callable[..., Any]:
    """Give what ``package.module:name`` names.

    Args:
        setting: that has it, for messages.
        path: its value; ``name`` may go into a class, ``module:Class.method``.

    Raises:
        ValueError: there is no such thing, or it can't be called.

    Example:
        >>> import_callable("rewards", "math:sqrt")(4)
        2.0
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name) or "/" in module or module.endswith(".py"):
        hint = "of mine.py mine:name, where mine.py is in the folder from which it is called"
        raise ValueError(f"{setting} must be package.module:name, got {path!r}; {hint}.")
    try:
        named = functools.reduce(getattr, name.split("."), import_module(module))
    except Exception as error:  # the user's module, which runs now
        raise ValueError(f"{setting}={path!r} can't be found: {error}") from error
    if not callable(named):
        raise ValueError(f"{setting}={path!r} can't be called: it is {named!r:.80}.")
    return named

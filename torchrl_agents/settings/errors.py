"""Faults of settings, which are shown without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class SettingsError(ValueError):
    """A setting can't work; shown without a traceback."""


@contextmanager
def refusing(what: str, *, foreign: bool = False) -> Iterator[None]:
    """Tell what a part refuses as a fault of the settings.

    Args:
        what: the setting, with which the message begins.
        foreign: what may fail is a tracker or the hub: errors of its own count, and are named.

    Raises:
        SettingsError: in place of the part's own error.
    """
    kinds = (Exception,) if foreign else (ValueError, TypeError, OSError, ImportError, RuntimeError)
    try:
        yield
    except SettingsError:
        raise
    except kinds as error:
        name = f"{type(error).__name__}: " if foreign else ""
        raise SettingsError(f"{what}: {name}{error}") from error

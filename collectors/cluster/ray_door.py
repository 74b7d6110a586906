"""The door to Ray, and what is raised when a part of a collection on a cluster is gone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchrl_data import import_package


class CollectorDied(RuntimeError):
    """A part of a collection on a cluster is gone, and nothing takes its place."""


def load_ray() -> Any:
    """Ray, imported when it is used.

    Raises:
        ImportError: it is not installed.
    """
    return import_package("ray", who="RayLLMCollector", install="pip install ray")


def is_death(error: BaseException) -> bool:
    """Return whether an actor, or the objects that it owned, are gone."""
    exceptions = load_ray().exceptions
    causes: list[BaseException | None] = [error, getattr(error, "cause", None), error.__cause__]
    kinds = (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.RaySystemError)
    return any(isinstance(cause, kinds) for cause in causes)


@contextmanager
def lets_signals_through() -> Iterator[None]:
    """Raise what a signal's handler raised; Ray's native code makes a ``SystemError`` of it."""
    try:
        yield
    except SystemError as error:
        if error.__cause__ is None or isinstance(error.__cause__, Exception):
            raise
        raise error.__cause__ from None

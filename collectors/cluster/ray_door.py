"""The door to Ray, and what is raised when a part of a collection on a cluster is gone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torchrl_data import import_package, page

_UNREADABLE: Final = "input arguments for this task could not be computed"


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


def is_unreadable(error: BaseException) -> bool:
    """Return whether an actor could not begin because it can't read what it was sent."""
    return _UNREADABLE in str(error)


def death_text(error: BaseException) -> str:
    """Return what a death is told as; of what can't be read, what to do about it.

    Args:
        error: Ray's.
    """
    text = str(error).strip()
    if not is_unreadable(error):
        return text
    return (
        f"it can't read what it was sent: {text.splitlines()[-1].strip()}. What make_env and the "
        "policy are made of has to be defined in the script itself, or in a module that every "
        "process of Ray can import. Put its folder on PYTHONPATH before Ray starts, send it with "
        "ray_init_config={'runtime_env': {'py_modules': [FOLDER]}}, or call "
        f"ray.cloudpickle.register_pickle_by_value(module). See {page('docs/clusters.md')}."
    )


@contextmanager
def lets_signals_through() -> Iterator[None]:
    """Raise what a signal's handler raised; Ray's native code makes a ``SystemError`` of it."""
    try:
        yield
    except SystemError as error:
        if error.__cause__ is None or isinstance(error.__cause__, Exception):
            raise
        raise error.__cause__ from None

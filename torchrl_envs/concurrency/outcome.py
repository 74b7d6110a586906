"""Outcome of a call: a value or an error, and an error that ends an episode."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

CLOSED: Final = "closed before it was done"
"""The words of the error of calls that were given up when their environment was closed."""


class EpisodeLostError(Exception):
    """The environment of a rollout can't go on: its server does not answer, its process is gone.

    Raised by a tool, it ends the row: truncated, unscorable, with the error in ``stop_reason``. Any
    other exception is something that the model reads, and may repair.
    """


Call = Callable[[], Any]


class Outcome(NamedTuple):
    """The result of one call: a value or an error."""

    value: Any = None
    error: BaseException | None = None
    seconds: float | None = None
    """That the call took; ``None`` where it did not start."""


def guarded(call: Call) -> Outcome:
    """The outcome of a call, whatever it raises."""
    # SystemExit and KeyboardInterrupt raised by a tool are the tool's errors, not the program's.
    try:
        return Outcome(call())
    except BaseException as error:
        return Outcome(error=error)

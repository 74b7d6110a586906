"""Giving back what is held, all of it, whatever goes wrong on the way."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .calls import ConcurrentCalls, Outcome

_log = logging.getLogger(__name__)


def close_all(
    objects: Sequence[Any], calls: ConcurrentCalls, timeout_s: float | None = None
) -> None:
    """Close objects, all at once."""
    # An error or a missed deadline is logged, with the object's class: the others are closed all
    # the same, and whoever gives something back has nothing to repair.
    closing = [each for each in objects if getattr(each, "close", None) is not None]
    if closing:
        results = calls.run([[each.close] for each in closing], timeout_s)
        for each, (outcome,) in zip(closing, results, strict=True):
            log_close_error(each, outcome)


def log_close_error(closed: Any, outcome: Outcome) -> None:
    """Log what went wrong when an object was closed, if anything did."""
    if outcome.error is not None:
        _log.warning("%s.close failed", type(closed).__name__, exc_info=outcome.error)


def run_all(steps: Iterable[Callable[[], object]]) -> None:
    """Run every step in order, whatever those before it raise; then raise that, or all of it."""
    errors: list[BaseException] = []
    for step in steps:
        try:
            step()
        except BaseException as error:
            errors.append(error)
    if len(errors) > 1:
        raise BaseExceptionGroup("several parts could not be closed", errors)
    if errors:
        raise errors[0]

"""Requests by number, done in the order of their numbers, whatever the order in which they come."""

import time
from collections.abc import Callable

from .errors import RefusedRequest


class InOrder:
    """Lets requests through one after the other.

    Args:
        first: the number of the first request.
    """

    def __init__(self, first: int = 1) -> None:
        self._next = first
        self._waiting: dict[int, Callable[[], None]] = {}
        self._since_s = 0.0

    def __call__(self, number: int, begin: Callable[[], None]) -> None:
        """Begin a request when all before it have begun.

        Args:
            number: of it.
            begin: called once: now, or when the last one before it comes.

        Raises:
            RefusedRequest: a request of this number has begun, or waits.
        """
        if number < self._next or number in self._waiting:
            raise RefusedRequest(
                f"seq_id {number} was given before; the next is {self._next}.", 409
            )
        if not self._waiting:
            self._since_s = time.monotonic()
        self._waiting[number] = begin
        while self._next in self._waiting:
            now = self._waiting.pop(self._next)
            self._next += 1
            self._since_s = time.monotonic()
            now()

    def missing(self, timeout_s: float) -> range:
        """Numbers that others have waited for longer than ``timeout_s``."""
        is_late = bool(self._waiting) and time.monotonic() - self._since_s > timeout_s
        return range(self._next, min(self._waiting)) if is_late else range(0)

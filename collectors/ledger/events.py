"""Who follows a ledger hears of everything that happens to a group."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .groups import Ticket


class GroupEvent(NamedTuple):
    """Something that happened to a group."""

    name: str
    """``offered``, ``started``, ``finished``, ``taken``, ``trained``, ``dropped``, ``returned``."""
    ticket: Ticket
    step: int
    """Of training, from 0: the one that trained it, or for which it was taken, or else the one that
    was under way."""
    reason: str = ""
    """Why it was dropped."""


class TellsEvents(ABC):
    """Tells of events, after the books were checked."""

    version: int
    on_event: Callable[[GroupEvent], None] | None = None
    """Told of whatever happens to a group, on the thread that told the ledger."""
    unwritten: Callable[[], Sequence[dict[str, Any]]] | None = None
    """Gives what who follows it has not written down yet, which is saved with the ledger."""
    unwritten_before: Sequence[dict[str, Any]] = ()
    """That of the run that goes on here."""

    @abstractmethod
    def _check(self) -> None:
        """Raise unless the books are balanced."""

    def _happened(
        self, event: str, *tickets: Ticket, step: int | None = None, reason: str = ""
    ) -> None:
        """Check the books, and tell of an event of each group."""
        self._check()
        if self.on_event is not None:
            for ticket in tickets:
                at = self.version if step is None else step
                self.on_event(GroupEvent(event, ticket, at, reason))

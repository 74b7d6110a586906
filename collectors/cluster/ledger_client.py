"""The trainer's messages to the ledger's actor, and the rows that it is told of."""

import logging
import pickle
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from tensordict import TensorDictBase

from collectors.ledger import Ticket

from .ledger_service import WHO, Share
from .ray_door import CollectorDied, death_text, is_death, lets_signals_through, load_ray

_LOOK_S: Final = 0.5
_log = logging.getLogger(__name__)


class LedgerClient:
    """Asks the ledger's actor, as long as the collection goes on.

    Args:
        actor: its handle.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.supervisor: Any = None
        """Of the collectors, once there are any."""
        self.taken: list[Ticket] = []
        """What the trainer has taken since it last said what became of it."""
        self.is_with_caller = True
        """Whether the rows of those taken have reached who asked for them."""
        self._taking: Any = None
        self.num_bytes = self.num_rows = 0
        """That came and went about rows, beside the rows themselves; and of how many."""

    def ask(self, what: str, *arguments: Any) -> Any:
        """The answer of a method of the actor.

        Raises:
            CollectorDied: a part of the collection is gone.
        """
        return self._answer(getattr(self._actor, what).remote(*arguments))

    def _answer(self, reference: Any) -> Any:
        ray = load_ray()
        try:
            with lets_signals_through():
                while not ray.wait([reference], timeout=_LOOK_S)[0]:
                    if self.supervisor is not None:
                        self.supervisor.check_open()
                return ray.get(reference)
        except Exception as error:
            if not is_death(error):
                raise
            if self.supervisor is not None:
                self.supervisor.check_open()  # which may know why
            told = death_text(error)
            raise CollectorDied(f"{WHO}: the actor of the ledger is gone: {told}") from error

    def take_batch(self) -> tuple[list[TensorDictBase], int]:
        """The rows of the next batch, and of how many groups; none: the data have ended."""
        while True:
            # Whatever is raised until its rows are here leaves what is taken to be asked again.
            self._taking = self._taking or self._actor.take.remote()
            shares: list[Share] = self._answer(self._taking)
            rows = [self._rows_of(share) for share in shares]
            lost = [share.ticket for share, own in zip(shares, rows, strict=True) if own is None]
            if not lost:
                tickets = [share.ticket for share in shares]
                self.taken, self.is_with_caller, self._taking = tickets, False, None
                # Ray keeps for ever what a reference names that is serialised outside of a call.
                self.num_bytes += len(pickle.dumps([(*s[::2], s.rows.binary()) for s in shares]))
                self.num_rows += sum(share.num_rows for share in shares)
                return [row for own in rows for row in own or ()], len(shares)
            _log.warning("%s: the rows of %d groups are gone, which run again", WHO, len(lost))
            self._taking = None
            self.ask("put_back", lost)

    def _rows_of(self, share: Share) -> list[TensorDictBase] | None:
        """The rows of a group; ``None``: they are gone with their collector, and it runs again."""
        try:
            with lets_signals_through():
                return load_ray().get(share.rows)
        except Exception as error:
            if not is_death(error):
                raise
            return None

    def put_back(self) -> None:
        """Let the groups that were taken last be taken again: the trainer has not had them."""
        with suppress(RuntimeError):  # the collection has ended, as the next call says
            self.ask("put_back", [])
            self.taken = []

    def used(self) -> list[Ticket]:
        """Return what the trainer has used since it last said so."""
        used, self.taken = self.taken, []
        self.num_bytes += len(pickle.dumps(used))
        return used

    def state(self) -> dict[str, Any]:
        """The ledger, the place in the data, the rows that wait, what each collector remembers."""
        workers = self.supervisor.ask(self.supervisor.ask_all("state"))
        state, shares = self.ask("state")
        found = ((share.ticket.ordinal, self._rows_of(share)) for share in shares)
        waiting = [{"ordinal": at, "rows": rows} for at, rows in found if rows is not None]
        taken = [ticket.ordinal for ticket in self.taken] if self.is_with_caller else []
        return {**state, "waiting": waiting, "taken": taken, "workers": workers}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: the data are others, or settings of the ledger.
            LedgerError: it has collected already.
        """
        self.supervisor.ask(self.supervisor.restore(state["workers"]))
        put = load_ray().put
        # In a list, a reference is handed on as it is.
        waiting = {
            each["ordinal"]: ([put(list(each["rows"]))], len(each["rows"]))
            for each in state["waiting"]
        }
        own = {"ledger": state["ledger"], "data": state["data"]}
        self.taken = self.ask("load", own, waiting, list(state["taken"]))

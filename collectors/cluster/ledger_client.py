"""The trainer's messages to the ledger's actor, and the rows that it is told of."""

import logging
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Final

from tensordict import TensorDictBase

from collectors.ledger import GroupLedger, Ticket

from .door import CollectorDied, is_death, lets_signals_through, load_ray
from .ledger_service import WHO, Share

_LOOK_S: Final = 0.5
_log = logging.getLogger(__name__)


class LedgerClient:
    """Asks the ledger's actor, as long as the collection goes on.

    Args:
        actor: its handle.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.check: Callable[[], None] = lambda: None
        """Raises if the collection has failed."""
        self.taken: list[Ticket] = []
        """What the trainer has taken since it last said what became of it."""
        self.is_with_caller = True
        """Whether the rows of those taken have reached who asked for them."""
        self._has_begun = False
        self._taking: Any = None
        self._num_bytes = self._num_rows = 0

    def _ask(self, reference: Any) -> Any:
        """Wait for an answer.

        Raises:
            CollectorDied: a part of the collection is gone.
        """
        ray = load_ray()
        try:
            with lets_signals_through():
                while not ray.wait([reference], timeout=_LOOK_S)[0]:
                    self.check()
                return ray.get(reference)
        except Exception as error:
            if not is_death(error):
                raise
            raise CollectorDied(f"{WHO}: the actor of the ledger is gone: {error}") from error

    def open(self) -> tuple[int, int, int]:
        """Groups of a batch, rows of a group, most groups in flight."""
        return self._ask(self._actor.open.remote())

    def take_batch(self) -> tuple[list[TensorDictBase], int]:
        """The rows of the next batch, and of how many groups; none: the data have ended."""
        if not self._has_begun:
            self._ask(self._actor.begin.remote())
            self._has_begun = True
        while True:
            shares = self._take()
            rows = self._rows_of(shares)
            if rows is not None:
                tickets = [share.ticket for share in shares]
                self.taken, self.is_with_caller, self._taking = tickets, False, None
                self._num_bytes += len(load_ray().cloudpickle.dumps(shares))
                self._num_rows += sum(share.num_rows for share in shares)
                return rows, len(shares)

    def _take(self) -> list[Share]:
        """What is taken; whatever is raised until its rows are here leaves it to be asked again."""
        if self._taking is None:
            self._taking = self._actor.take.remote()
        return self._ask(self._taking)

    def _rows_of(self, shares: list[Share]) -> list[TensorDictBase] | None:
        """The rows of a batch; ``None``: some are gone, and their groups run again."""
        ray = load_ray()
        rows, lost = [], []
        for share in shares:
            try:
                with lets_signals_through():
                    rows += ray.get(share.rows)
            except Exception as error:
                if not is_death(error):
                    raise
                lost.append(share.ticket)
        if not lost:
            return rows
        _log.warning("%s: the rows of %d groups are gone, which run again", WHO, len(lost))
        self._taking = None
        self._ask(self._actor.put_back.remote(lost))
        return None

    def push(self, version: int, *, is_restored: bool) -> int:
        """Weights of a version are on their way; gives the step of training that is in them.

        Args:
            version: their number.
            is_restored: they are those of before, and no step has been made.
        """
        used = [] if is_restored else self._used()
        return self._ask(self._actor.push.remote(used, version))

    def unchanged(self, version: int) -> None:
        """A step was made, and its weights are not pushed."""
        self._ask(self._actor.unchanged.remote(self._used(), version))

    def _used(self) -> list[Ticket]:
        used, self.taken = self.taken, []
        self._num_bytes += len(pickle.dumps(used))
        return used

    def state(self) -> dict[str, Any]:
        """The ledger, the place in the data, and the rows of the groups that wait."""
        ray = load_ray()
        state, shares = self._ask(self._actor.state.remote())
        waiting = []
        for share in shares:
            try:
                with lets_signals_through():
                    rows = ray.get(share.rows)
            except Exception as error:
                if not is_death(error):
                    raise
                continue  # They are gone with their collector: the group runs again.
            waiting.append({"ordinal": share.ticket.ordinal, "rows": rows})
        taken = [ticket.ordinal for ticket in self.taken] if self.is_with_caller else []
        return {**state, "waiting": waiting, "taken": taken}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: the data are others, or settings of the ledger.
            LedgerError: it has collected already.
        """
        put = load_ray().put
        # In a list, a reference is handed on as it is.
        waiting = {
            each["ordinal"]: ([put(list(each["rows"]))], len(each["rows"]))
            for each in state["waiting"]
        }
        own = {"ledger": state["ledger"], "data": state["data"]}
        self.taken = self._ask(self._actor.load.remote(own, waiting, list(state["taken"])))

    def report(self) -> tuple[GroupLedger, dict[str, float]]:
        """The ledger as it is, and its metrics."""
        return self._ask(self._actor.report.remote())

    @property
    def bytes_per_row(self) -> float:
        """That came and went about rows, beside the rows themselves."""
        return self._num_bytes / max(1, self._num_rows)

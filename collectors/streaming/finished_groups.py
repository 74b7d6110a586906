"""The trainer's side of a streaming collection: groups that are finished, a batch at a time."""

import time
from collections.abc import Mapping
from typing import Any, Final

from collectors.ledger import GroupLedger, GroupState, Ticket
from torchrl_envs.datasets.primer import DataExhaustedError

from .checks import WHO
from .group_runner import Group
from .monitor import Monitor
from .producer import Producer
from .prompt_queue import PromptQueue

_LOOK_S: Final = 0.5


class FinishedGroups:
    """Takes the groups of a step of training as soon as there are enough.

    Args:
        producer: finishes them.
        ledger: chooses them.
        prompts: of the groups.
        monitor: told how long the trainer waited.
    """

    def __init__(
        self, producer: Producer, ledger: GroupLedger, prompts: PromptQueue, monitor: Monitor
    ) -> None:
        self._producer = producer
        self._ledger = ledger
        self._prompts = prompts
        self._monitor = monitor
        self._taken: list[Ticket] = []
        self.is_with_caller = True
        """Whether the rows of those taken have reached who asked for them."""

    @property
    def are_taken(self) -> bool:
        """Whether the trainer has a batch that it has not told to be trained."""
        return bool(self._taken)

    def take(self) -> list[Group]:
        """Wait for the groups of the next batch.

        Raises:
            DataExhaustedError: there are no more data, and nothing is under way.
            RuntimeError: the collection has failed; the cause is attached.
        """
        begin = time.monotonic()
        producer = self._producer
        with producer.changed:
            while True:
                producer.check_alive()
                tickets = self._chosen()
                for eviction in self._ledger.take_evicted():
                    producer.forget(eviction)
                if tickets:
                    break
                producer.changed.wait(_LOOK_S)
            self._taken, self.is_with_caller = list(tickets), False
            groups = [producer.finished.pop(ticket) for ticket in tickets]
            num_queued = len(producer.finished)
        self._monitor.taken(begin, time.monotonic(), num_queued)
        producer.wake()
        return groups

    def _chosen(self) -> list[Ticket] | None:
        """The groups of the next batch, if there are so many, or all that the data gave."""
        if not self._producer.is_drained:
            return self._ledger.take()
        tickets = self._ledger.take_rest()
        if not tickets:
            raise DataExhaustedError(f"{WHO}: all data were drawn and trained.")
        return tickets

    def used(self) -> list[Ticket]:
        """What the trainer has used since it last said so."""
        taken, self._taken = self._taken, []
        return taken

    # Resume -------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The ledger, the place in the data, and the rows of the groups that wait."""
        with self._producer.changed:
            return {
                "ledger": self._ledger.state_dict(),
                "data": dict(self._prompts.data_state()),
                "waiting": [
                    {"ordinal": ticket.ordinal, "rows": list(group.rows)}
                    for ticket, group in self._producer.finished.items()
                ],
                "taken": [t.ordinal for t in self._taken] if self.is_with_caller else [],
            }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; the loader is at the first prompt that is not done.

        Raises:
            ValueError: the data are drawn in another order, or the ledger's settings differ.
        """
        rows = {each["ordinal"]: each["rows"] for each in state["waiting"]}
        self._ledger.load_state_dict(state["ledger"], restored={*rows, *state["taken"]})
        with self._producer.changed:
            for ticket, prompt in self._prompts.load_state(state["data"]).items():
                own = list(rows[ticket.ordinal])
                self._producer.finished[ticket] = Group(ticket, prompt, [], own)
            self._producer.steps = {self._producer.version: self._ledger.version}
        batches = self._ledger.batches
        self._taken = list(batches[0]) if batches else []
        assert all(
            ticket in self._producer.finished
            for ticket in self._ledger.tickets(GroupState.FINISHED)
        )

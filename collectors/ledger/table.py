"""The groups in flight, each in its state."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

from .groups import Group, GroupState, Ticket, group_from_state, group_state
from .reasons import IllegalTransition

_REMEMBERED: Final = 1024
UNFINISHED: Final = (GroupState.DISPATCHED, GroupState.RUNNING)


class GroupTable:
    """Groups in the order of admission, and the batches that steps of training have taken."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        """By ordinal, in the order of admission."""
        self.batches: deque[list[Ticket]] = deque()
        """What each step that is not over has taken, the next step to end first."""
        self.num_unfinished = 0
        self.num_finished = 0
        self._next_place = self._next_arrival = 0
        self._ends: OrderedDict[Ticket, str] = OrderedDict()

    def queue(self) -> list[Group]:
        """Groups that no step has taken, in the order of admission."""
        return [group for group in self.groups.values() if group.state is not GroupState.TAKEN]

    def of(self, ticket: Ticket) -> Group | None:
        """The group of a ticket, if it is in flight under this very one."""
        group = self.groups.get(ticket.ordinal)
        return group if group is not None and group.ticket == ticket else None

    def find(self, ticket: Ticket, event: str, allowed: Sequence[GroupState]) -> Group:
        """The group that an event happens to.

        Raises:
            IllegalTransition: it is in another state, or not in flight.
        """
        group = self.of(ticket)
        if group is not None and group.state in allowed:
            return group
        if group is not None:
            state = group.state.value
        elif ticket.ordinal in self.groups:
            state = f"in flight again as {self.groups[ticket.ordinal].ticket}"
        else:
            state = self._ends.get(ticket, "not in flight")
        may = " or ".join(state.value for state in allowed)
        raise IllegalTransition(f"GroupLedger: {event} of {ticket}: it is {state}, not {may}.")

    def add(self, ticket: Ticket, base_seed: int) -> None:
        """A group is admitted."""
        self.groups[ticket.ordinal] = Group(ticket, base_seed, self._next_place)
        self._next_place += 1
        self.num_unfinished += 1

    def finish(self, group: Group, now: float) -> None:
        """All of its episodes are over."""
        group.state = GroupState.FINISHED
        group.finished_at = now
        group.arrival = self._next_arrival
        self._next_arrival += 1
        self.num_unfinished -= 1
        self.num_finished += 1

    def take(self, groups: Iterable[Group]) -> list[Ticket]:
        """A step takes finished groups."""
        tickets = []
        for group in groups:
            group.state = GroupState.TAKEN
            self.num_finished -= 1
            tickets.append(group.ticket)
        self.batches.append(tickets)
        return list(tickets)

    def remove(self, group: Group, end: str) -> None:
        """It is no longer in flight."""
        if group.state is GroupState.TAKEN:
            batch = next(batch for batch in self.batches if group.ticket in batch)
            batch.remove(group.ticket)
        elif group.state is GroupState.FINISHED:
            self.num_finished -= 1
        else:
            self.num_unfinished -= 1
        del self.groups[group.ticket.ordinal]
        self._ends[group.ticket] = end
        if len(self._ends) > _REMEMBERED:
            self._ends.popitem(last=False)

    def state(self, now: float) -> dict[str, Any]:
        """As plain values."""
        return {
            "groups": [group_state(group, now) for group in self.groups.values()],
            "batches": [[ticket.ordinal for ticket in batch] for batch in self.batches],
            "next_place": self._next_place,
            "next_arrival": self._next_arrival,
        }

    def load_state(self, state: dict[str, Any], now: float) -> None:
        """Go back to a state."""
        groups = [group_from_state(group, now) for group in state["groups"]]
        self.groups = {group.ticket.ordinal: group for group in groups}
        self.batches = deque([self.groups[i].ticket for i in batch] for batch in state["batches"])
        self.num_unfinished = sum(group.state in UNFINISHED for group in groups)
        self.num_finished = sum(group.state is GroupState.FINISHED for group in groups)
        self._next_place = state["next_place"]
        self._next_arrival = state["next_arrival"]
        self._ends.clear()

    def put_back(self) -> None:
        """No step has taken anything: what was taken is finished again."""
        for batch in self.batches:
            for ticket in batch:
                self.groups[ticket.ordinal].state = GroupState.FINISHED
                self.num_finished += 1
        self.batches.clear()

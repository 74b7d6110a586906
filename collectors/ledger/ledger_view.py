"""The groups in flight, and which prompts are done: below the frontier all, and some above it."""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torchrl_data.checks import check_counts

from .groups import UNFINISHED, Group, GroupState, Owed, Refill, Ticket, attempt_seed, hashed_seed
from .reasons import IllegalTransition

_REMEMBERED: Final = 1024
OF_TICKET: Final = ("ordinal", "group_id", "attempt", "dispatch", "version")
"""What is written down of a ticket."""
_OF_GROUP: Final = ("base_seed", "place", "oldest_version", "version_span", "arrival")


class LedgerView:
    """View of a ledger for a staleness policy: where each group is, and which prompts are done."""

    groups_per_step: int
    """P, of a step of training."""
    num_slots: int
    """B, what the policy's ``slots`` gave: the most groups that may be in flight."""
    version: int
    """The trainer's: steps that were made."""
    pulled_version: int
    """The version that every generator has."""
    frontier: int = 0
    """The first ordinal that is not done: a resumed run draws its data from here on."""
    next_ordinal: int = 0
    """The first ordinal above all that were offered."""

    def __init__(self, *, groups_per_step: int, num_slots: int, version: int) -> None:
        self.groups_per_step, self.num_slots = groups_per_step, num_slots
        self.version = self.pulled_version = version
        self._groups: dict[int, Group] = {}  # by ordinal, in the order of admission
        self._batches: deque[list[Ticket]] = deque()
        self._num_in = Counter[GroupState]()
        self._next_place = self._next_arrival = 0
        self._ends: OrderedDict[Ticket, str] = OrderedDict()
        self._done_above: set[int] = set()
        self._owed: dict[int, Owed] = {}

    # What may be asked --------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """The step that the next groups will be trained in, which is the trainer's version then."""
        return self.version + len(self._batches)

    @property
    def _num_unfinished(self) -> int:
        """Groups that are dispatched or running."""
        return sum(self._num_in[state] for state in UNFINISHED)

    @property
    def _num_finished(self) -> int:
        """Groups that wait to be used."""
        return self._num_in[GroupState.FINISHED]

    @property
    def num_queued(self) -> int:
        """Groups in flight that no step has taken."""
        return self._num_unfinished + self._num_finished

    def queue(self) -> list[Group]:
        """Groups in flight that no step has taken, in the order of admission."""
        return [each for each in self._groups.values() if each.state is not GroupState.TAKEN]

    def tickets(self, state: GroupState | None = None) -> list[Ticket]:
        """Those of the groups in flight, in the order of admission; of a state, or all."""
        return [each.ticket for each in self._groups.values() if state in (None, each.state)]

    def state_of(self, ticket: Ticket) -> GroupState | None:
        """Return where a group is; ``None``: it is not in flight under this ticket."""
        group = self._groups.get(ticket.ordinal)
        return group.state if group is not None and group.ticket == ticket else None

    @property
    def batches(self) -> list[list[Ticket]]:
        """Groups that each step that is not over has taken, in the order of the steps."""
        return [list(batch) for batch in self._batches]

    def needs(self, ordinal: int) -> bool:
        """Return whether a prompt is to be offered: it is new or owed, neither in flight nor done.

        A resumed run draws its data from the ``frontier`` on, and offers those that are needed.
        """
        is_done = ordinal < self.frontier or ordinal in self._done_above
        return not is_done and ordinal not in self._groups

    @property
    def owed(self) -> tuple[Refill, ...]:
        """Prompts that were drawn and have to be offered again, lowest ordinal first."""
        owed = sorted(self._owed.items())
        return tuple(Refill(ordinal, each.group_id, each.attempt) for ordinal, each in owed)

    @property
    def done_above(self) -> tuple[int, ...]:
        """The ordinals above the frontier that are done."""
        return tuple(sorted(self._done_above))

    # How groups move ----------------------------------------------------------------------------

    def _find(self, ticket: Ticket, event: str, allowed: Sequence[GroupState]) -> Group:
        """The group that an event happens to.

        Raises:
            IllegalTransition: it is in another state, or not in flight.
        """
        found = self.state_of(ticket)
        if found in allowed:
            return self._groups[ticket.ordinal]
        if found is not None:
            state = found.value
        elif ticket.ordinal in self._groups:
            state = f"in flight again as {self._groups[ticket.ordinal].ticket}"
        else:
            state = self._ends.get(ticket, "not in flight")
        may = " or ".join(state.value for state in allowed)
        raise IllegalTransition(f"GroupLedger: {event} of {ticket}: it is {state}, not {may}.")

    def _admit(
        self, ordinal: int, group_id: int | str, seed: int | None, *, run_seed: int
    ) -> Ticket:
        """A group begins to be in flight, with what its prompt is owed, if it is."""
        check_counts("GroupLedger.offer", 0, ordinal=ordinal, seed=seed)
        if not isinstance(group_id, int | str):
            raise TypeError(f"GroupLedger.offer: group_id takes int or str, got {group_id!r}.")
        if (owed := self._owed.get(ordinal)) is None:
            owed = Owed(group_id, 0, hashed_seed(run_seed, ordinal) if seed is None else seed, 0)
        elif owed.group_id != group_id:
            raise ValueError(
                f"GroupLedger.offer: ordinal {ordinal} is owed as group {owed.group_id!r}, got "
                f"{group_id!r}. The data are drawn in another order than before."
            )
        self._owed.pop(ordinal, None)
        self.next_ordinal = max(self.next_ordinal, ordinal + 1)
        seed = attempt_seed(owed.base_seed, owed.attempt)
        version = self.pulled_version
        ticket = Ticket(ordinal, group_id, owed.attempt, seed, version, owed.dispatch)
        self._groups[ordinal] = Group(ticket, owed.base_seed, self._next_place)
        self._next_place += 1
        self._num_in[GroupState.DISPATCHED] += 1
        return ticket

    def _move(self, group: Group, state: GroupState) -> None:
        """A group gets into another state."""
        self._num_in[group.state] -= 1
        self._num_in[state] += 1
        group.state = state

    def _leave(self, group: Group, end: str, attempt: int | None) -> None:
        """Note that it is no longer in flight; its prompt is owed for an attempt, or done."""
        ticket = group.ticket
        if group.state is GroupState.TAKEN:
            next(batch for batch in self._batches if ticket in batch).remove(ticket)
        self._num_in[group.state] -= 1
        del self._groups[ticket.ordinal]
        self._ends[ticket] = end
        if len(self._ends) > _REMEMBERED:
            self._ends.popitem(last=False)
        if attempt is not None:
            dispatch = ticket.dispatch + 1 if attempt == ticket.attempt else 0
            owed = Owed(ticket.group_id, attempt, group.base_seed, dispatch)
            self._owed[ticket.ordinal] = owed
            return
        self._done_above.add(ticket.ordinal)
        while self.frontier in self._done_above:
            self._done_above.remove(self.frontier)
            self.frontier += 1

    def _state(self, now: float) -> dict[str, Any]:
        """Versions, prompts and groups as plain values."""
        return {
            "version": self.version,
            "pulled_version": self.pulled_version,
            "prompts": {
                "frontier": self.frontier,
                "next_ordinal": self.next_ordinal,
                "done_above": sorted(self._done_above),
                "owed": [[ordinal, *owed] for ordinal, owed in sorted(self._owed.items())],
            },
            "table": {
                "groups": [
                    {name: getattr(group.ticket, name) for name in OF_TICKET}
                    | {name: getattr(group, name) for name in _OF_GROUP}
                    | {"state": group.state.value, "waited_s": now - group.finished_at}
                    | {"lengths": [list(each) for each in group.lengths.items()]}
                    for group in self._groups.values()
                ],
                "batches": [[ticket.ordinal for ticket in batch] for batch in self._batches],
                "next_place": self._next_place,
                "next_arrival": self._next_arrival,
            },
        }

    def _load_state(self, state: Mapping[str, Any], now: float) -> None:
        """Go back to what :meth:`_state` gave."""
        prompts, table = state["prompts"], state["table"]
        self.version, self.pulled_version = state["version"], state["pulled_version"]
        self.frontier, self.next_ordinal = prompts["frontier"], prompts["next_ordinal"]
        self._done_above = set(prompts["done_above"])
        self._owed = {ordinal: Owed(*owed) for ordinal, *owed in prompts["owed"]}
        self._groups = {}
        for saved in table["groups"]:
            seed = attempt_seed(saved["base_seed"], saved["attempt"])
            self._groups[saved["ordinal"]] = Group(
                Ticket(seed=seed, **{name: saved[name] for name in OF_TICKET}),
                state=GroupState(saved["state"]),
                lengths=dict(saved["lengths"]),
                finished_at=now - saved["waited_s"],
                **{name: saved[name] for name in _OF_GROUP},
            )
        self._batches = deque([self._groups[i].ticket for i in batch] for batch in table["batches"])
        self._num_in = Counter(group.state for group in self._groups.values())
        self._next_place, self._next_arrival = table["next_place"], table["next_arrival"]
        self._ends.clear()

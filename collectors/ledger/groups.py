"""The states of a prompt group, the table of all groups, and what is counted of them."""

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from statistics import fmean
from typing import Any, Final, NamedTuple

from torchrl_data.checks import check_counts
from torchrl_data.stop_reason import kind_of

# Why a group was dropped, and what is raised when the ledger is misused.
#
# A reason may carry a detail after a colon (``"failed: no disk"``); it is counted without it.

NO_SIGNAL: Final = "no_signal"
"""All rewards of the group are equal, or fewer than two are valid."""
FAILED: Final = "failed"
"""``failed: ...``: its episodes could not be run."""
ENGINE_DIED: Final = "engine_died"
"""Its engine is gone, and what it had drawn of it."""
STALE: Final = "stale"
"""Its oldest token would be older than ``max_staleness`` when it is used."""
LOAD: Final = "load"
"""The engine had no room for it."""
SAYS_NOTHING: Final = frozenset({ENGINE_DIED, LOAD})
"""Reasons that say nothing of a prompt: it is offered again as it was, however often."""


class LedgerError(RuntimeError):
    """The ledger's promises do not hold: a fault of whoever drives it, or of the ledger."""


class IllegalTransition(LedgerError):
    """An event that does not fit the state that a group is in."""


# The records that travel: a ticket for each group in flight, and what becomes of it.


class GroupState(StrEnum):
    """Where a group in flight is."""

    DISPATCHED = "dispatched"
    """Admitted: it holds a slot, and somebody is to run it."""
    RUNNING = "running"
    """Its episodes are being run."""
    FINISHED = "finished"
    """All of its episodes are over; it waits to be used."""
    TAKEN = "taken"
    """A step of training uses it."""


UNFINISHED: Final = (GroupState.DISPATCHED, GroupState.RUNNING)


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to run one group once; every event of the group is told with it.

    Args:
        ordinal: number of the prompt in the order in which the data are drawn, from 0.
        group_id: the group's id.
        attempt: how often this prompt was given up and asked for again.
        seed: equal for the episodes of the group, another one for each attempt.
        version: the generators' policy version when the group was admitted.
        dispatch: how often this attempt had been handed out before, with the same seed.
    """

    ordinal: int
    group_id: int | str
    attempt: int
    seed: int
    version: int
    dispatch: int = 0


class Refill(NamedTuple):
    """A prompt that is to be offered again."""

    ordinal: int
    """Its number in the order in which the data are drawn."""
    group_id: int | str
    """The group's id, the same as before."""
    attempt: int
    """Which attempt it will be."""


class Eviction(NamedTuple):
    """A finished group that was dropped because it had become too old to be used."""

    ticket: Ticket
    """Whose rows are to be removed from the buffer."""
    refill: Refill | None
    """The prompt to offer again; ``None``: the next one of the data."""


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


class Owed(NamedTuple):
    """What a prompt that is to be offered again will be offered with."""

    group_id: int | str
    attempt: int
    base_seed: int
    dispatch: int


@dataclass(slots=True)
class Group:
    """A group in flight."""

    ticket: Ticket
    base_seed: int
    place: int
    """In the order of admission; what was admitted later has a higher one."""
    state: GroupState = GroupState.DISPATCHED
    begun_version: int | None = None
    """The generators' version when its episodes were started."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Tokens of each episode that is over, by its index."""
    oldest_version: int | None = None
    version_span: int = 0
    """The most versions by which the tokens of one of its episodes differ."""
    finished_at: float = 0.0
    arrival: int = -1
    """In the order in which groups were finished."""

    @property
    def num_tokens(self) -> int:
        """Of the episodes that are over."""
        return sum(self.lengths.values())

    def check_versions(
        self, oldest: int | None, newest: int | None, trainer: int
    ) -> tuple[int, int]:
        """Check the versions of some of its tokens, while the trainer has its own."""
        newest = oldest if newest is None else newest
        if oldest is None or newest is None or not oldest <= newest <= trainer:
            raise ValueError(
                f"GroupLedger: the tokens of {self.ticket} have versions {oldest} to {newest}; "
                f"they must be given, in order, and at most the trainer's {trainer}."
            )
        if oldest < self.ticket.version:
            raise ValueError(
                f"GroupLedger: a token of {self.ticket} has version {oldest}, from before its "
                "admission: its generator had not pulled the weights that weights_pulled() told of."
            )
        return oldest, newest


def shares(num_tokens: int | Sequence[int], group_size: int) -> list[int]:
    """Tokens of each episode of a group that is told at once; a sum counts as equal shares."""
    if isinstance(num_tokens, int):
        each, more = divmod(num_tokens, group_size)
        return [each + (index < more) for index in range(group_size)]
    if len(num_tokens) != group_size:
        raise ValueError(
            f"GroupLedger: finish takes num_tokens of each of group_size={group_size} episodes, "
            f"got {len(num_tokens)}."
        )
    return list(num_tokens)


def attempt_seed(base_seed: int, attempt: int) -> int:
    """The seed of an attempt; that of the first one is the prompt's own."""
    return base_seed if attempt == 0 else hashed_seed(base_seed, attempt)


def hashed_seed(*numbers: int) -> int:
    """32 bits of numbers, the same in every process."""
    text = "/".join(map(str, numbers)).encode()
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "big")


# The groups in flight, and which prompts are done: below the frontier all, and some above it.

_REMEMBERED: Final = 1024
OF_TICKET: Final = ("ordinal", "group_id", "attempt", "dispatch", "version")
"""What is written down of a ticket."""
_OF_GROUP: Final = ("base_seed", "place", "oldest_version", "version_span", "arrival")


class LedgerView:
    """Where each group is, and which prompts are done: what a staleness policy sees of a ledger."""

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
        """Where a group is; ``None``: it is not in flight under this ticket."""
        group = self._groups.get(ticket.ordinal)
        return group.state if group is not None and group.ticket == ticket else None

    @property
    def batches(self) -> list[list[Ticket]]:
        """What each step that is not over has taken, in the order of the steps."""
        return [list(batch) for batch in self._batches]

    def needs(self, ordinal: int) -> bool:
        """Whether a prompt is to be offered: it is new or owed, neither in flight nor done.

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
        """It is no longer in flight; its prompt is owed for an attempt, or done."""
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


# The books: what was offered is trained, dropped, returned or in flight, by group and by token.


class Amount(NamedTuple):
    """Groups, and the tokens that their episodes were told to have."""

    groups: int = 0
    tokens: int = 0

    def plus(self, groups: int, tokens: int) -> "Amount":
        """With so many more."""
        return Amount(self.groups + groups, self.tokens + tokens)


@dataclass(frozen=True)
class Balance:
    """What became of all groups, each an :class:`Amount` of groups and of tokens.

    Always ``offered == trained + dropped + returned + in_flight``. A prompt that is offered again
    counts again; tokens count from when an episode is over.

    Args:
        offered: all that were admitted.
        trained: that a step of training used.
        dropped: by reason, without its detail.
        returned: that were given back unfinished: at the end, or cancelled, or lost in a restart.
        in_flight: the others.
    """

    offered: Amount
    trained: Amount
    dropped: Mapping[str, Amount]
    returned: Amount
    in_flight: Amount

    @property
    def num_dropped(self) -> Amount:
        """For whatever reason."""
        every = self.dropped.values()
        return Amount(sum(a.groups for a in every), sum(a.tokens for a in every))

    def __str__(self) -> str:
        rows = [("offered", self.offered), ("trained", self.trained), ("dropped", self.num_dropped)]
        rows += [(f"  {reason}", amount) for reason, amount in sorted(self.dropped.items())]
        rows += [("returned", self.returned), ("in flight", self.in_flight)]
        lines = [f"{'':<16}{'groups':>12}{'tokens':>16}"]
        lines += [f"{name:<16}{each.groups:>12,}{each.tokens:>16,}" for name, each in rows]
        return "\n".join(lines)


# What use was like: ages, waiting times, and lengths offered beside lengths trained.

_PER_OCTAVE: Final = 8


@dataclass
class LengthHistogram:
    """Counts of lengths in tokens; a bucket's upper edge is 9 % above its lower one."""

    counts: Counter[int] = field(default_factory=Counter)
    num_tokens: int = 0

    @property
    def num_lengths(self) -> int:
        """Episodes that were counted."""
        return self.counts.total()

    def add(self, length: int) -> None:
        """Count an episode."""
        bucket = math.floor(_PER_OCTAVE * math.log2(length)) if length else -1
        self.counts[bucket] += 1
        self.num_tokens += length

    @property
    def mean(self) -> float:
        """Tokens of an episode; NaN while there is none."""
        return self.num_tokens / self.num_lengths if self.counts else math.nan

    def edges(self) -> dict[float, int]:
        """Counts by the lower edge of their bucket, in tokens; 0 is the empty ones'."""
        return {
            0.0 if bucket < 0 else 2 ** (bucket / _PER_OCTAVE): count
            for bucket, count in sorted(self.counts.items())
        }

    def distance(self, other: "LengthHistogram") -> float:
        """Kolmogorov-Smirnov distance at the edges: at most the true one. NaN if one is empty."""
        if not (self.counts and other.counts):
            return math.nan
        largest = mine = others = 0.0
        own_total, other_total = self.num_lengths, other.num_lengths
        for bucket in sorted(self.counts.keys() | other.counts.keys()):
            mine += self.counts[bucket] / own_total
            others += other.counts[bucket] / other_total
            largest = max(largest, abs(mine - others))
        return largest


class Accounts:
    """Keeps the books, and counts what use was like: over the whole run, and of the newest step."""

    def __init__(self) -> None:
        ends = ("offered", "trained", "dropped", "returned", "in_flight")
        self._amounts: dict[str, Amount] = {end: Amount() for end in ends}
        self._dropped: dict[str, Amount] = {}
        self.ages: Counter[int] = Counter()
        """Groups by the age of their oldest token at use, in versions."""
        self._stop_reasons: Counter[str] = Counter()
        self.offered, self.trained = LengthHistogram(), LengthHistogram()
        self.step: dict[str, list[Any]] = {"staleness": [], "queue_s": [], "versions_span": []}
        """Of each group that the newest step took."""

    def enter(self, groups: int, tokens: int) -> None:
        """A group came in, or tokens of one that is in flight."""
        for end in ("offered", "in_flight"):
            self._amounts[end] = self._amounts[end].plus(groups, tokens)

    def end_episode(self, tokens: int, stop_reason: str) -> None:
        """An episode of a group in flight is over."""
        self.enter(0, tokens)
        self.offered.add(tokens)
        if stop_reason:
            self._stop_reasons[stop_reason] += 1

    def leave(self, group: Group, end: str, reason: str = "") -> None:
        """A group is ``trained``, ``returned`` or ``dropped``, for a reason."""
        tokens, amounts = group.num_tokens, self._amounts
        amounts["in_flight"] = amounts["in_flight"].plus(-1, -tokens)
        amounts[end] = amounts[end].plus(1, tokens)
        if end == "dropped":
            kind = kind_of(reason)
            self._dropped[kind] = self._dropped.get(kind, Amount()).plus(1, tokens)
        if end == "trained":
            for length in group.lengths.values():
                self.trained.add(length)

    def check(self, groups_in_flight: int) -> None:
        """Check that everything is somewhere.

        Args:
            groups_in_flight: those that there really are.

        Raises:
            LedgerError: something is not, or is twice.
        """
        offered, *ends = self._amounts.values()
        groups, tokens = (sum(amounts) for amounts in zip(*ends, strict=True))
        if (groups, tokens) != offered or self._amounts["in_flight"].groups != groups_in_flight:
            raise LedgerError(
                f"GroupLedger: not balanced: {offered.groups} groups and {offered.tokens} tokens "
                f"were offered, {groups} and {tokens} are accounted for, {groups_in_flight} groups "
                f"are in flight: {self.balance!r}."
            )

    @property
    def balance(self) -> Balance:
        """A snapshot."""
        amounts = {end: amount for end, amount in self._amounts.items() if end != "dropped"}
        return Balance(dropped=dict(self._dropped), **amounts)

    def metrics(self) -> dict[str, float]:
        """All of them by name."""
        metrics: dict[str, float] = {}
        for name, values in self.step.items():
            if values:
                metrics |= {f"{name}/mean": fmean(values), f"{name}/max": float(max(values))}
        used, ended = self.ages.total(), self._stop_reasons.total()
        for age, count in sorted(self.ages.items()):
            metrics[f"staleness/at_{age}_fraction"] = count / used
        for reason, count in sorted(self._stop_reasons.items()):
            metrics[f"stop/{reason}"] = count / ended
        if self.offered.counts:
            metrics["length/offered_mean"] = self.offered.mean
        if self.trained.counts:
            metrics["length/trained_mean"] = self.trained.mean
            metrics["length/distance"] = self.trained.distance(self.offered)
        for unit in Amount._fields:
            for end, amount in self._amounts.items():
                metrics[f"{unit}/{end}"] = float(getattr(amount, unit))
        for reason, amount in sorted(self._dropped.items()):
            metrics[f"groups/dropped/{reason}"] = float(amount.groups)
        return metrics

    def state(self) -> dict[str, Any]:
        """Books and statistics as plain values."""
        amounts = {end: list(amount) for end, amount in self._amounts.items()}
        dropped = {reason: list(amount) for reason, amount in self._dropped.items()}
        lengths = {
            name: {"num_tokens": each.num_tokens, "counts": sorted(map(list, each.counts.items()))}
            for name, each in (("offered", self.offered), ("trained", self.trained))
        }
        counted = {"ages": sorted(map(list, self.ages.items())), **lengths}
        counted |= {"stop_reasons": dict(self._stop_reasons), "step": list(self.step.values())}
        return {"accounts": {**amounts, "dropped": dropped}, "statistics": counted}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to what :meth:`state` gave."""
        amounts, counted = dict(state["accounts"]), state["statistics"]
        self._dropped = {reason: Amount(*each) for reason, each in amounts["dropped"].items()}
        amounts["dropped"] = self.balance.num_dropped
        self._amounts = {end: Amount(*amounts[end]) for end in self._amounts}
        self.ages = Counter(dict(counted["ages"]))
        self._stop_reasons = Counter(counted["stop_reasons"])
        self.offered, self.trained = (
            LengthHistogram(Counter(dict(counted[name]["counts"])), counted[name]["num_tokens"])
            for name in ("offered", "trained")
        )
        self.step = dict(zip(self.step, map(list, counted["step"]), strict=True))

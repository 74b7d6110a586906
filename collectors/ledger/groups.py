"""The states of a prompt group, the table of all groups, and what is counted of them."""

import math
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from statistics import fmean
from typing import Any, Final, NamedTuple

from torchrl_data.checks import check_counts
from torchrl_data.stop_reasons import kind_of

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

    def age(self, step: int) -> int:
        """Of its oldest token, if it is used in a step; 0 where it has none."""
        return 0 if self.oldest_version is None else step - self.oldest_version

    def add_episode(
        self,
        index: int,
        tokens: int,
        versions: tuple[int | None, int | None],
        *,
        group_size: int,
        trainer: int,
    ) -> None:
        """One of its episodes is over; the trainer's version bounds those of its tokens."""
        check_counts("GroupLedger", 0, index=index, tokens=tokens)
        if index >= group_size:
            raise ValueError(
                f"GroupLedger: index must be below group_size={group_size}, got {index} for "
                f"{self.ticket}."
            )
        if index in self.lengths:
            raise IllegalTransition(
                f"GroupLedger: finish_episode of {self.ticket}: episode {index} is over already."
            )
        if tokens:
            oldest, newest = self.check_versions(*versions, trainer)
            if self.oldest_version is None or oldest < self.oldest_version:
                self.oldest_version = oldest
            self.version_span = max(self.version_span, newest - oldest)
        self.lengths[index] = tokens

    def add_cut(self, lengths: Sequence[int], group_size: int) -> None:
        """Episodes were cut short; their tokens are of the group."""
        left = [index for index in range(group_size) if index not in self.lengths]
        if len(lengths) > len(left):
            raise ValueError(
                f"GroupLedger: {len(lengths)} episodes of {self.ticket} are said to be cut short, "
                f"but only {len(left)} are not over."
            )
        check_counts("GroupLedger", 0, **{f"cut_lengths[{i}]": n for i, n in enumerate(lengths)})
        self.lengths |= dict(zip(left, lengths, strict=False))

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

    def check_complete(
        self, group_size: int, oldest_version: int | None, num_tokens: int | None
    ) -> None:
        """Check that all episodes are over, and that they had what is said of them."""
        missing = group_size - len(self.lengths)
        if missing:
            raise IllegalTransition(
                f"GroupLedger: finish of {self.ticket}: {missing} of its {group_size} episodes are "
                "not over. Tell how they ended by finish_episode(), or drop the group."
            )
        for name, told, found in (
            ("oldest_version", oldest_version, self.oldest_version),
            ("num_tokens", num_tokens, self.num_tokens),
        ):
            if None not in (told, found) and told != found:
                raise ValueError(
                    f"GroupLedger: finish of {self.ticket}: {name} is {found} by its episodes, got "
                    f"{told}."
                )


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


def group_state(group: Group, now: float) -> dict[str, Any]:
    """A finished group as plain values."""
    ticket = group.ticket
    return {
        "ordinal": ticket.ordinal,
        "group_id": ticket.group_id,
        "attempt": ticket.attempt,
        "dispatch": ticket.dispatch,
        "version": ticket.version,
        "base_seed": group.base_seed,
        "place": group.place,
        "state": group.state.value,
        "lengths": [[index, length] for index, length in group.lengths.items()],
        "oldest_version": group.oldest_version,
        "version_span": group.version_span,
        "waited_s": now - group.finished_at,
        "arrival": group.arrival,
    }


def group_from_state(state: dict[str, Any], now: float) -> Group:
    """The group of which :func:`group_state` made plain values."""
    ticket = Ticket(
        ordinal=state["ordinal"],
        group_id=state["group_id"],
        attempt=state["attempt"],
        seed=attempt_seed(state["base_seed"], state["attempt"]),
        version=state["version"],
        dispatch=state["dispatch"],
    )
    return Group(
        ticket=ticket,
        base_seed=state["base_seed"],
        place=state["place"],
        state=GroupState(state["state"]),
        lengths=dict(state["lengths"]),
        oldest_version=state["oldest_version"],
        version_span=state["version_span"],
        finished_at=now - state["waited_s"],
        arrival=state["arrival"],
    )


# Who follows a ledger hears of everything that happens to a group.


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


# Which prompts are done: the frontier of the data, and what lies above it.


class PromptBook:
    """Ordinals that are done, owed, or not drawn yet; those in flight are the ledger's."""

    def __init__(self) -> None:
        self.frontier = 0
        """Every ordinal below it is done, it is not."""
        self.next_ordinal = 0
        """Above every one that was drawn."""
        self.done_above: set[int] = set()
        """Those above the frontier that are done."""
        self.owed: dict[int, Owed] = {}
        """Those that were drawn and are to be offered again."""

    def is_done(self, ordinal: int) -> bool:
        """Whether it was trained, or dropped for good."""
        return ordinal < self.frontier or ordinal in self.done_above

    def draw(self, ordinal: int, group_id: int | str, base_seed: int | None, run_seed: int) -> Owed:
        """It is in flight now, with what is given back; what it was owed with holds."""
        check_counts("GroupLedger.offer", 0, ordinal=ordinal, seed=base_seed)
        if not isinstance(group_id, int | str):
            raise TypeError(f"GroupLedger.offer: group_id takes int or str, got {group_id!r}.")
        owed = self.owed.get(ordinal)
        if owed is None:
            owed = Owed(
                group_id, 0, hashed_seed(run_seed, ordinal) if base_seed is None else base_seed, 0
            )
        elif owed.group_id != group_id:
            raise ValueError(
                f"GroupLedger.offer: ordinal {ordinal} is owed as group {owed.group_id!r}, got "
                f"{group_id!r}. The data are drawn in another order than before."
            )
        self.owed.pop(ordinal, None)
        self.next_ordinal = max(self.next_ordinal, ordinal + 1)
        return owed

    def close(self, ordinal: int) -> None:
        """It is done."""
        self.done_above.add(ordinal)
        while self.frontier in self.done_above:
            self.done_above.remove(self.frontier)
            self.frontier += 1

    def refills(self) -> tuple[Refill, ...]:
        """What is owed, lowest ordinal first."""
        return tuple(
            Refill(ordinal, owed.group_id, owed.attempt)
            for ordinal, owed in sorted(self.owed.items())
        )

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "frontier": self.frontier,
            "next_ordinal": self.next_ordinal,
            "done_above": sorted(self.done_above),
            "owed": [[ordinal, *owed] for ordinal, owed in sorted(self.owed.items())],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.frontier = state["frontier"]
        self.next_ordinal = state["next_ordinal"]
        self.done_above = set(state["done_above"])
        self.owed = {ordinal: Owed(*owed) for ordinal, *owed in state["owed"]}


# The groups in flight, each in its state.

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
        for name, amount in rows:
            lines.append(f"{name:<16}{amount.groups:>12,}{amount.tokens:>16,}")
        return "\n".join(lines)


class Accounts:
    """Keeps the books."""

    def __init__(self) -> None:
        self.offered = self.trained = self.returned = self.in_flight = Amount()
        self.dropped: dict[str, Amount] = {}
        self._all_dropped = Amount()

    def offer(self) -> None:
        """A group came in."""
        self.offered = self.offered.plus(1, 0)
        self.in_flight = self.in_flight.plus(1, 0)

    def sample(self, tokens: int) -> None:
        """An episode of a group in flight is over."""
        self.offered = self.offered.plus(0, tokens)
        self.in_flight = self.in_flight.plus(0, tokens)

    def train(self, tokens: int) -> None:
        """A group was trained."""
        self._leave(1, tokens)
        self.trained = self.trained.plus(1, tokens)

    def drop(self, reason: str, tokens: int) -> None:
        """A group was dropped."""
        self._leave(1, tokens)
        kind = kind_of(reason)
        self._all_dropped = self._all_dropped.plus(1, tokens)
        self.dropped[kind] = self.dropped.get(kind, Amount()).plus(1, tokens)

    def give_back(self, tokens: int) -> None:
        """A group was returned."""
        self._leave(1, tokens)
        self.returned = self.returned.plus(1, tokens)

    def _leave(self, groups: int, tokens: int) -> None:
        self.in_flight = self.in_flight.plus(-groups, -tokens)

    def check(self, groups_in_flight: int) -> None:
        """Check that everything is somewhere.

        Args:
            groups_in_flight: those that there really are.

        Raises:
            LedgerError: something is not, or is twice.
        """
        dropped = self._all_dropped
        ends = (self.trained, dropped, self.returned, self.in_flight)
        groups, tokens = (sum(amounts) for amounts in zip(*ends, strict=True))
        if (groups, tokens) != self.offered or self.in_flight.groups != groups_in_flight:
            raise LedgerError(
                f"GroupLedger: not balanced: {self.offered.groups} groups and "
                f"{self.offered.tokens} tokens were offered, {groups} and {tokens} are accounted "
                f"for, {groups_in_flight} groups are in flight: {self.balance!r}."
            )

    @property
    def balance(self) -> Balance:
        """A snapshot."""
        return Balance(
            self.offered, self.trained, dict(self.dropped), self.returned, self.in_flight
        )

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "offered": list(self.offered),
            "trained": list(self.trained),
            "returned": list(self.returned),
            "in_flight": list(self.in_flight),
            "dropped": {reason: list(amount) for reason, amount in self.dropped.items()},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        for name in ("offered", "trained", "returned", "in_flight"):
            setattr(self, name, Amount(*state[name]))
        self.dropped = {reason: Amount(*amount) for reason, amount in state["dropped"].items()}
        self._all_dropped = self.balance.num_dropped


# What use was like: ages, waiting times, and lengths offered beside lengths trained.

_PER_OCTAVE: Final = 8


class LengthHistogram:
    """Counts of lengths in tokens; a bucket's upper edge is 9 % above its lower one."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.num_lengths = 0
        self.num_tokens = 0

    def add(self, length: int) -> None:
        """Count an episode."""
        bucket = math.floor(_PER_OCTAVE * math.log2(length)) if length else -1
        self.counts[bucket] += 1
        self.num_lengths += 1
        self.num_tokens += length

    @property
    def mean(self) -> float:
        """Tokens of an episode; NaN while there is none."""
        return self.num_tokens / self.num_lengths if self.num_lengths else math.nan

    def edges(self) -> dict[float, int]:
        """Counts by the lower edge of their bucket, in tokens; 0 is the empty ones'."""
        return {
            0.0 if bucket < 0 else 2 ** (bucket / _PER_OCTAVE): count
            for bucket, count in sorted(self.counts.items())
        }

    def distance(self, other: "LengthHistogram") -> float:
        """Kolmogorov-Smirnov distance at the edges: at most the true one. NaN if one is empty."""
        if not (self.num_lengths and other.num_lengths):
            return math.nan
        largest = mine = others = 0.0
        for bucket in sorted(self.counts.keys() | other.counts.keys()):
            mine += self.counts[bucket] / self.num_lengths
            others += other.counts[bucket] / other.num_lengths
            largest = max(largest, abs(mine - others))
        return largest

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {"num_tokens": self.num_tokens, "counts": sorted(map(list, self.counts.items()))}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.num_tokens = state["num_tokens"]
        self.counts = Counter(dict(state["counts"]))
        self.num_lengths = self.counts.total()


class Statistics:
    """Counts over the whole run, and the newest step that was taken."""

    def __init__(self) -> None:
        self.ages: Counter[int] = Counter()
        """Groups by the age of their oldest token at use, in versions."""
        self.stop_reasons: Counter[str] = Counter()
        self.offered, self.trained = LengthHistogram(), LengthHistogram()
        self.step_ages: list[int] = []
        self.step_waits: list[float] = []
        self.step_spans: list[int] = []

    def end_episode(self, length: int, stop_reason: str) -> None:
        """An episode is over."""
        self.offered.add(length)
        if stop_reason:
            self.stop_reasons[stop_reason] += 1

    def take(self, ages: list[int], waits: list[float], spans: list[int]) -> None:
        """A step took its groups."""
        self.ages.update(ages)
        self.step_ages, self.step_waits, self.step_spans = ages, waits, spans

    def train(self, lengths: Iterable[int]) -> None:
        """A group was trained."""
        for length in lengths:
            self.trained.add(length)

    def metrics(self) -> dict[str, float]:
        """All of them by name."""
        metrics: dict[str, float] = {}
        for name, values in (
            ("staleness", self.step_ages),
            ("queue_s", self.step_waits),
            ("versions_span", self.step_spans),
        ):
            if values:
                metrics |= {f"{name}/mean": fmean(values), f"{name}/max": float(max(values))}
        used = self.ages.total()
        for age in sorted(self.ages):
            metrics[f"staleness/at_{age}_fraction"] = self.ages[age] / used
        ended = self.stop_reasons.total()
        for reason in sorted(self.stop_reasons):
            metrics[f"stop/{reason}"] = self.stop_reasons[reason] / ended
        if self.offered.num_lengths:
            metrics["length/offered_mean"] = self.offered.mean
        if self.trained.num_lengths:
            metrics["length/trained_mean"] = self.trained.mean
            metrics["length/distance"] = self.trained.distance(self.offered)
        return metrics

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "ages": sorted([age, count] for age, count in self.ages.items()),
            "stop_reasons": dict(self.stop_reasons),
            "offered": self.offered.state(),
            "trained": self.trained.state(),
            "step": [self.step_ages, self.step_waits, self.step_spans],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.ages = Counter(dict(state["ages"]))
        self.stop_reasons = Counter(state["stop_reasons"])
        self.offered.load_state(state["offered"])
        self.trained.load_state(state["trained"])
        self.step_ages, self.step_waits, self.step_spans = map(list, state["step"])

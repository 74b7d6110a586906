"""The records that travel: a ticket for each group in flight, and what becomes of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, NamedTuple

from torchrl_data.validation import check_counts

from .reasons import IllegalTransition


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

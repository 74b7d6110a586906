"""The records that travel: a ticket for each group in flight, and what becomes of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Final, NamedTuple


class GroupState(StrEnum):
    """The state of a group in flight."""

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
    """The number and seed with which a prompt is to be offered again."""

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
        """Tokens of the episodes that are over."""
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

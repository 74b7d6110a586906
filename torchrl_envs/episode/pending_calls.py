"""Calls that an episode's event waits for; its coroutine awaits them, and nothing else."""

from collections.abc import (
    Coroutine,
    Generator,
    Hashable,
    Sequence,
)
from typing import NamedTuple

from torchrl_envs.concurrency.outcome import Call, Outcome

EventCoroutine = Coroutine["PendingCalls", list[Outcome], None]


class PendingCall(NamedTuple):
    """A call that an event waits for."""

    call: Call
    """Takes no arguments; sync, or ``async``."""
    timeout_s: float
    """Deadline, in seconds from when it starts."""
    lane: Hashable
    """Calls of one lane run one after the other, also those of several episodes; none starts after
    one that missed its deadline."""


class PendingCalls(NamedTuple):
    """Calls that an event waits for, all of them; awaiting it gives an outcome for each."""

    calls: Sequence[PendingCall]

    def __await__(self) -> Generator["PendingCalls", list[Outcome], list[Outcome]]:
        return (yield self)

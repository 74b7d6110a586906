"""The half of the ledger that hears of generation: until a group is finished, or given up.

The letters: P groups per step of training, N episodes of a group, B slots.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final, Literal

from torchrl_data.stop_reasons import kind_of
from torchrl_data.validation import check_counts, one_of

from .accounts import Accounts
from .events import TellsEvents
from .groups import (
    Eviction,
    Group,
    GroupState,
    Owed,
    Refill,
    Ticket,
    attempt_seed,
    shares,
)
from .policies import StalenessPolicy, Wait
from .prompts import PromptBook
from .reasons import FAILED, SAYS_NOTHING, IllegalTransition, LedgerError
from .statistics import Statistics
from .table import GroupTable

REFILLS: Final = ("same", "next")


class GenerationLedger(TellsEvents):
    """What is offered, run, finished and dropped; see :class:`GroupLedger` for all of it."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        group_size: int,
        policy: StalenessPolicy | None = None,
        weight_sync_steps: int = 1,
        max_inflight_groups: int = -1,
        buffer_capacity: int | None = None,
        refill: Literal["same", "next"] = "same",
        max_attempts: int = 3,
        seed: int = 0,
        version: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        who = "GroupLedger"
        check_counts(who, groups_per_step=groups_per_step, group_size=group_size)
        check_counts(who, weight_sync_steps=weight_sync_steps, max_attempts=max_attempts)
        check_counts(who, 0, seed=seed, version=version, buffer_capacity=buffer_capacity)
        if max_inflight_groups != -1:
            check_counts(who, max_inflight_groups=max_inflight_groups)
        self.groups_per_step = groups_per_step
        self.group_size = group_size
        self.policy = Wait() if policy is None else policy
        self.weight_sync_steps = weight_sync_steps
        self.num_slots = self.policy.slots(groups_per_step, weight_sync_steps)
        """B, the most groups that may be in flight."""
        self.max_inflight_groups = (
            self.num_slots if max_inflight_groups == -1 else max_inflight_groups
        )
        self.required_capacity = self.policy.required_capacity(groups_per_step, weight_sync_steps)
        """Finished groups that the buffer has to hold."""
        if buffer_capacity is not None and buffer_capacity < self.required_capacity:
            raise ValueError(_too_small(buffer_capacity, self))
        self.buffer_capacity = buffer_capacity
        self.refill = one_of("refill", refill, REFILLS, who=who)
        self.max_attempts = max_attempts
        self.seed = seed
        self.version = version
        """The trainer's: steps that were made."""
        self.pulled_version = version
        """The version that every generator has."""
        self._clock = clock
        self._accounts = Accounts()
        self._prompts = PromptBook()
        self._statistics = Statistics()
        self._table = GroupTable()
        self._evicted: list[Eviction] = []
        self._schedule: list[tuple[int, ...]] = []

    # What may begin -----------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """The step that :meth:`take` takes groups for; their age counts from here."""
        return self.version + len(self._table.batches)

    @property
    def num_queued(self) -> int:
        """Groups in flight that no step has taken."""
        return self._table.num_unfinished + self._table.num_finished

    def queue(self) -> list[Group]:
        """Groups in flight that no step has taken, in the order of admission."""
        return self._table.queue()

    def can_admit(self) -> bool:
        """Whether :meth:`offer` may be called: a slot is free, and no cap is reached."""
        return (
            self._table.num_unfinished < self.max_inflight_groups
            and (self.buffer_capacity is None or self.num_queued < self.buffer_capacity)
            and self.policy.admit(self)
        )

    def needs(self, ordinal: int) -> bool:
        """Whether a prompt is to be offered: it is new or owed, neither in flight nor done.

        A resumed run draws its data from the ``frontier`` on, and offers those that are needed.
        """
        return ordinal not in self._table.groups and not self._prompts.is_done(ordinal)

    @property
    def owed(self) -> tuple[Refill, ...]:
        """Prompts that were drawn and have to be offered again, lowest ordinal first."""
        return self._prompts.refills()

    @property
    def frontier(self) -> int:
        """The first ordinal that is not done: a resumed run draws its data from here on."""
        return self._prompts.frontier

    @property
    def done_above(self) -> tuple[int, ...]:
        """The ordinals above the frontier that are done."""
        return tuple(sorted(self._prompts.done_above))

    @property
    def next_ordinal(self) -> int:
        """The first ordinal above all that were offered."""
        return self._prompts.next_ordinal

    def offer(self, group_id: int | str, ordinal: int, *, seed: int | None = None) -> Ticket:
        """Admit a group: it holds a slot from now on.

        Args:
            group_id: of the group; where the prompt is owed, the same as before.
            ordinal: number of the prompt in the order in which the data are drawn, from 0.
            seed: of the first attempt, if the data have one; ``None``: made of the ledger's.

        Returns:
            What the group's events are told with.

        Raises:
            LedgerError: no slot is free.
            IllegalTransition: the prompt is in flight or done.
            ValueError: it is owed under another ``group_id``.
        """
        if not self.needs(ordinal):
            group = self._table.groups.get(ordinal)
            state = "done" if group is None else f"{group.state.value} as {group.ticket}"
            raise IllegalTransition(f"GroupLedger: offer of ordinal {ordinal}: it is {state}.")
        if not self.can_admit():
            raise LedgerError(
                f"GroupLedger: offer of ordinal {ordinal}: no slot is free. Ask can_admit() first. "
                f"({self._table.num_unfinished} of at most {self.max_inflight_groups} groups are "
                f"unfinished, {self._table.num_finished} wait, {self.num_slots} slots, a buffer of "
                f"{self.buffer_capacity}, next step {self.next_step}, generators at version "
                f"{self.pulled_version}.)"
            )
        owed = self._prompts.draw(ordinal, group_id, seed, self.seed)
        ticket = Ticket(
            ordinal=ordinal,
            group_id=group_id,
            attempt=owed.attempt,
            seed=attempt_seed(owed.base_seed, owed.attempt),
            version=self.pulled_version,
            dispatch=owed.dispatch,
        )
        self._table.add(ticket, owed.base_seed)
        self._accounts.offer()
        self._happened("offered", ticket)
        return ticket

    # What runs ----------------------------------------------------------------------------------

    def state_of(self, ticket: Ticket) -> GroupState | None:
        """Where a group is; ``None``: it is not in flight under this ticket."""
        group = self._table.of(ticket)
        return None if group is None else group.state

    def start(self, ticket: Ticket) -> None:
        """The first of its episodes is about to run.

        Raises:
            IllegalTransition: it is not dispatched.
        """
        group = self._table.find(ticket, "start", (GroupState.DISPATCHED,))
        group.state = GroupState.RUNNING
        group.begun_version = self.pulled_version
        self._happened("started", ticket)

    def finish_episode(
        self,
        ticket: Ticket,
        index: int,
        *,
        tokens: int,
        oldest_version: int | None,
        stop_reason: str = "",
        newest_version: int | None = None,
    ) -> None:
        """One of its episodes is over.

        Args:
            ticket: of its group.
            index: which of the N, from 0.
            tokens: that the policy sampled in it.
            oldest_version: of these tokens; ``None`` where there are none.
            stop_reason: see ``torchrl_data.stop_reasons``; only counted.
            newest_version: of these tokens; ``None``: the oldest.

        Raises:
            IllegalTransition: the group is not running, or the episode is over already.
            ValueError: a value has no meaning, or a token is older than the group's admission.
        """
        group = self._table.find(ticket, "finish_episode", (GroupState.RUNNING,))
        group.add_episode(
            index,
            tokens,
            (oldest_version, newest_version),
            group_size=self.group_size,
            trainer=self.version,
        )
        self._accounts.sample(tokens)
        self._statistics.end_episode(tokens, kind_of(stop_reason))
        self._check()

    def finish(
        self,
        ticket: Ticket,
        oldest_version: int | None = None,
        num_tokens: int | Sequence[int] | None = None,
    ) -> None:
        """All N episodes are over: the group waits to be used.

        Either each was told by :meth:`finish_episode`, or all are told here at once.

        Args:
            ticket: of the group.
            oldest_version: of its tokens.
            num_tokens: that the policy sampled, of each episode; or of all together, which then
                count as equal shares.

        Raises:
            IllegalTransition: it is not running, or episodes are missing.
            ValueError: a value has no meaning, or is not what the episodes had.
        """
        group = self._table.find(ticket, "finish", (GroupState.RUNNING,))
        if num_tokens is not None:
            each = shares(num_tokens, self.group_size)
            num_tokens = sum(each)
            if any(each):
                group.check_versions(oldest_version, None, self.version)
            for index, tokens in enumerate(() if group.lengths else each):
                self.finish_episode(ticket, index, tokens=tokens, oldest_version=oldest_version)
        group.check_complete(self.group_size, oldest_version, num_tokens)
        self._table.finish(group, self._clock())
        self._happened("finished", ticket)

    # What is given up ---------------------------------------------------------------------------

    def drop(
        self,
        ticket: Ticket,
        reason: str,
        *,
        refill: Literal["same", "next"] | None = None,
        cut_lengths: Sequence[int] = (),
    ) -> Refill | None:
        """Nothing will be trained on a group that is in flight, in whatever state.

        Args:
            ticket: of the group.
            reason: see ``collectors.ledger.reasons``, or one of your own; counted without what
                stands after a colon.
            refill: ``None``: what the ledger was told.
            cut_lengths: tokens of each episode that was cut short.

        Returns:
            The prompt to offer again, which is owed from now on; ``None``: the next one of the
            data, this one is done.

        Raises:
            IllegalTransition: it is not in flight.
        """
        group = self._table.find(ticket, f"drop ({reason})", tuple(GroupState))
        if not kind_of(reason):
            raise ValueError(f"GroupLedger: drop of {ticket} takes a reason, got {reason!r}.")
        attempt = _next_attempt(self, ticket, reason, refill)
        self._add_cut(group, cut_lengths)
        self._accounts.drop(reason, group.num_tokens)
        self._leave(group, f"dropped ({reason})", attempt)
        self._happened("dropped", ticket, reason=reason)
        return Refill(ticket.ordinal, ticket.group_id, attempt) if attempt is not None else None

    def fail(
        self, ticket: Ticket, reason: str, *, cut_lengths: Sequence[int] = ()
    ) -> Refill | None:
        """Its episodes could not be run: :meth:`drop` for ``"failed: <reason>"``."""
        return self.drop(ticket, f"{FAILED}: {reason}", cut_lengths=cut_lengths)

    def cancel(self, ticket: Ticket, *, cut_lengths: Sequence[int] = ()) -> Refill:
        """It is given back undone, for its prompt to be offered again with the same seed.

        Args:
            ticket: of the group, in whatever state.
            cut_lengths: tokens of each episode that was cut short.

        Returns:
            The prompt, which is owed from now on.

        Raises:
            IllegalTransition: it is not in flight.
        """
        group = self._table.find(ticket, "cancel", tuple(GroupState))
        self._add_cut(group, cut_lengths)
        self._accounts.give_back(group.num_tokens)
        self._leave(group, "returned", ticket.attempt)
        self._happened("returned", ticket)
        return Refill(ticket.ordinal, ticket.group_id, ticket.attempt)

    def return_all(self) -> list[Ticket]:
        """Give back whatever is in flight, at the end of a run.

        Returns:
            The tickets, in the order of admission; nothing may be told of them any more.
        """
        tickets = [group.ticket for group in self._table.groups.values()]
        for ticket in tickets:
            self.cancel(ticket)
        self._table.batches.clear()
        return tickets

    def _add_cut(self, group: Group, lengths: Sequence[int]) -> None:
        """The tokens of episodes that were cut are of the group, and were sampled."""
        group.add_cut(lengths, self.group_size)
        for tokens in lengths:
            self._accounts.sample(tokens)
            self._statistics.end_episode(tokens, "cut")

    def _leave(self, group: Group, end: str, attempt: int | None) -> None:
        """It is no longer in flight; its prompt is owed for an attempt, or done."""
        ticket = group.ticket
        self._table.remove(group, end)
        if attempt is None:
            self._prompts.close(ticket.ordinal)
        else:
            dispatch = ticket.dispatch + 1 if attempt == ticket.attempt else 0
            self._prompts.owed[ticket.ordinal] = Owed(
                ticket.group_id, attempt, group.base_seed, dispatch
            )

    def _check(self) -> None:
        """Raise unless the books are balanced and agree with the groups that there are."""
        self._accounts.check(len(self._table.groups))


def _too_small(buffer_capacity: int, ledger: GenerationLedger) -> str:
    return (
        f"GroupLedger: buffer_capacity must be at least {ledger.required_capacity} groups "
        f"({ledger.required_capacity * ledger.group_size} episodes) for {ledger.policy!r} and "
        f"groups_per_step={ledger.groups_per_step}, got {buffer_capacity}: it would fill up with "
        "groups that wait for an older one, which has no room then."
    )


def _next_attempt(
    ledger: GenerationLedger, ticket: Ticket, reason: str, refill: str | None
) -> int | None:
    """The number under which a dropped prompt is offered again; ``None`` if it is not."""
    if refill is None and kind_of(reason) in SAYS_NOTHING:
        return ticket.attempt
    way = one_of("refill", refill or ledger.refill, REFILLS, who="GroupLedger.drop")
    again = way == "same" and ticket.attempt + 1 < ledger.max_attempts
    return ticket.attempt + 1 if again else None

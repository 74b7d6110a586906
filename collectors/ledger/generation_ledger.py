"""The half of the ledger that hears of generation: until a group is finished, or given up.

The letters: P groups per step of training, N episodes of a group, B slots.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from torchrl_data.checks import check_counts, check_type, one_of
from torchrl_data.stop_reason import kind_of

from .accounts import Accounts
from .groups import Eviction, Group, GroupEvent, GroupState, Refill, Ticket, shares
from .ledger_view import LedgerView
from .reasons import FAILED, SAYS_NOTHING, IllegalTransition, LedgerError
from .staleness_policies import StalenessPolicy, Wait

REFILLS: Final = ("same", "next")
_MAX_SCHEDULE: Final = 1 << 16


class GenerationLedger(LedgerView):
    """Ledger of groups that are offered, run, finished and dropped; see :class:`GroupLedger`."""

    on_event: Callable[[GroupEvent], None] | None = None
    """Told of whatever happens to a group, on the thread that told the ledger."""
    unwritten: Callable[[], Sequence[dict[str, Any]]] | None = None
    """Gives what who follows it has not written down yet, which is saved with the ledger."""
    unwritten_before: Sequence[dict[str, Any]] = ()
    """That of the run that goes on here."""

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
        self.group_size = group_size
        self.policy = Wait() if policy is None else policy
        check_type("policy", self.policy, StalenessPolicy, who=who)
        self.weight_sync_steps = weight_sync_steps
        slots = self.policy.slots(groups_per_step, weight_sync_steps)
        super().__init__(groups_per_step=groups_per_step, num_slots=slots, version=version)
        limit = self.num_slots if max_inflight_groups == -1 else max_inflight_groups
        self.max_inflight_groups = limit
        self.required_capacity = self.policy.required_capacity(groups_per_step, weight_sync_steps)
        """Finished groups that the buffer has to hold."""
        if buffer_capacity is not None and buffer_capacity < self.required_capacity:
            raise ValueError(
                f"GroupLedger: buffer_capacity must be at least {self.required_capacity} groups "
                f"({self.required_capacity * group_size} episodes) for {self.policy!r} and "
                f"groups_per_step={groups_per_step}, got {buffer_capacity}: it would fill up with "
                "groups that wait for an older one, which has no room then."
            )
        self.buffer_capacity = buffer_capacity
        self.refill = one_of("refill", refill, REFILLS, who=who)
        self.max_attempts = max_attempts
        self.seed = seed
        self._clock = clock
        self._accounts = Accounts()
        self._evicted: list[Eviction] = []
        self._schedule: deque[tuple[int, ...]] = deque(maxlen=_MAX_SCHEDULE)

    # What may begin -----------------------------------------------------------------------------

    def can_admit(self) -> bool:
        """Return whether :meth:`offer` may be called: a slot is free, and no cap is reached."""
        return (
            self._num_unfinished < self.max_inflight_groups
            and (self.buffer_capacity is None or self.num_queued < self.buffer_capacity)
            and self.policy.admit(self)
        )

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
            group = self._groups.get(ordinal)
            state = "done" if group is None else f"{group.state.value} as {group.ticket}"
            raise IllegalTransition(f"GroupLedger: offer of ordinal {ordinal}: it is {state}.")
        if not self.can_admit():
            raise LedgerError(
                f"GroupLedger: offer of ordinal {ordinal}: no slot is free. Ask can_admit() first. "
                f"({self._num_unfinished} of at most {self.max_inflight_groups} groups are "
                f"unfinished, {self._num_finished} wait, {self.num_slots} slots, a buffer of "
                f"{self.buffer_capacity}, next step {self.next_step}, generators at version "
                f"{self.pulled_version}.)"
            )
        ticket = self._admit(ordinal, group_id, seed, run_seed=self.seed)
        self._accounts.enter(1, 0)
        self._happened("offered", ticket)
        return ticket

    # What runs ----------------------------------------------------------------------------------

    def start(self, ticket: Ticket) -> None:
        """The first of its episodes is about to run.

        Raises:
            IllegalTransition: it is not dispatched.
        """
        group = self._find(ticket, "start", (GroupState.DISPATCHED,))
        self._move(group, GroupState.RUNNING)
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
        """Note that one of its episodes is over.

        Args:
            ticket: of its group.
            index: which of the N, from 0.
            tokens: that the policy sampled in it.
            oldest_version: of these tokens; ``None`` where there are none.
            stop_reason: see ``torchrl_data.conversation``; only counted.
            newest_version: of these tokens; ``None``: the oldest.

        Raises:
            IllegalTransition: the group is not running, or the episode is over already.
            ValueError: a value has no meaning, or a token is older than the group's admission.
        """
        group = self._find(ticket, "finish_episode", (GroupState.RUNNING,))
        check_counts("GroupLedger", 0, index=index, tokens=tokens)
        if index >= self.group_size:
            raise ValueError(
                f"GroupLedger: index must be below group_size={self.group_size}, got {index} for "
                f"{ticket}."
            )
        if index in group.lengths:
            raise IllegalTransition(
                f"GroupLedger: finish_episode of {ticket}: episode {index} is over already."
            )
        if tokens:
            oldest, newest = group.check_versions(oldest_version, newest_version, self.version)
            if group.oldest_version is None or oldest < group.oldest_version:
                group.oldest_version = oldest
            group.version_span = max(group.version_span, newest - oldest)
        group.lengths[index] = tokens
        self._accounts.end_episode(tokens, kind_of(stop_reason))
        self._happened()

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
        group = self._find(ticket, "finish", (GroupState.RUNNING,))
        if num_tokens is not None:
            each = shares(num_tokens, self.group_size)
            num_tokens = sum(each)
            if any(each):
                group.check_versions(oldest_version, None, self.version)
            for index, tokens in enumerate(() if group.lengths else each):
                self.finish_episode(ticket, index, tokens=tokens, oldest_version=oldest_version)
        missing = self.group_size - len(group.lengths)
        if missing:
            raise IllegalTransition(
                f"GroupLedger: finish of {ticket}: {missing} of its {self.group_size} episodes are "
                "not over. Tell how they ended by finish_episode(), or drop the group."
            )
        for name, told, found in (
            ("oldest_version", oldest_version, group.oldest_version),
            ("num_tokens", num_tokens, group.num_tokens),
        ):
            if None not in (told, found) and told != found:
                raise ValueError(
                    f"GroupLedger: finish of {ticket}: {name} is {found} by its episodes, got "
                    f"{told}."
                )
        self._move(group, GroupState.FINISHED)
        group.finished_at, group.arrival = self._clock(), self._next_arrival
        self._next_arrival += 1
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
            reason: see ``collectors.ledger.groups``, or one of your own; counted without what
                stands after a colon.
            refill: ``None``: what the ledger was told.
            cut_lengths: tokens of each episode that was cut short.

        Returns:
            The prompt to offer again, which is owed from now on; ``None``: the next one of the
            data, this one is done.

        Raises:
            IllegalTransition: it is not in flight.
        """
        group = self._find(ticket, f"drop ({reason})", tuple(GroupState))
        if not kind_of(reason):
            raise ValueError(f"GroupLedger: drop of {ticket} takes a reason, got {reason!r}.")
        way = one_of("refill", refill or self.refill, REFILLS, who="GroupLedger.drop")
        attempt: int | None = ticket.attempt
        if refill is not None or kind_of(reason) not in SAYS_NOTHING:
            again = way == "same" and ticket.attempt + 1 < self.max_attempts
            attempt = ticket.attempt + 1 if again else None
        self._give_up(group, "dropped", attempt, cut_lengths, reason)
        return Refill(ticket.ordinal, ticket.group_id, attempt) if attempt is not None else None

    def fail(
        self, ticket: Ticket, reason: str, *, cut_lengths: Sequence[int] = ()
    ) -> Refill | None:
        """Note that its episodes could not be run: :meth:`drop` for ``"failed: <reason>"``."""
        return self.drop(ticket, f"{FAILED}: {reason}", cut_lengths=cut_lengths)

    def cancel(self, ticket: Ticket, *, cut_lengths: Sequence[int] = ()) -> Refill:
        """Give it back undone, for its prompt to be offered again with the same seed.

        Args:
            ticket: of the group, in whatever state.
            cut_lengths: tokens of each episode that was cut short.

        Returns:
            The prompt, which is owed from now on.

        Raises:
            IllegalTransition: it is not in flight.
        """
        group = self._find(ticket, "cancel", tuple(GroupState))
        self._give_up(group, "returned", ticket.attempt, cut_lengths)
        return Refill(ticket.ordinal, ticket.group_id, ticket.attempt)

    def return_all(self) -> list[Ticket]:
        """Give back whatever is in flight, at the end of a run.

        Returns:
            The tickets, in the order of admission; nothing may be told of them any more.
        """
        tickets = self.tickets()
        for ticket in tickets:
            self.cancel(ticket)
        self._batches.clear()
        return tickets

    def _give_up(
        self, group: Group, end: str, attempt: int | None, cut: Sequence[int], reason: str = ""
    ) -> None:
        """A group leaves untrained; the tokens of episodes that were cut were sampled, too."""
        left = [index for index in range(self.group_size) if index not in group.lengths]
        if len(cut) > len(left):
            raise ValueError(
                f"GroupLedger: {len(cut)} episodes of {group.ticket} are said to be cut short, "
                f"but only {len(left)} are not over."
            )
        check_counts("GroupLedger", 0, **{f"cut_lengths[{i}]": n for i, n in enumerate(cut)})
        group.lengths |= dict(zip(left, cut, strict=False))
        for tokens in cut:
            self._accounts.end_episode(tokens, "cut")
        self._accounts.leave(group, end, reason)
        self._leave(group, f"{end} ({reason})" if reason else end, attempt)
        self._happened(end, group.ticket, reason=reason)

    def _happened(
        self, event: str = "", *tickets: Ticket, step: int | None = None, reason: str = ""
    ) -> None:
        """Check that the books agree with the groups there are, and tell of an event of each."""
        self._accounts.check(len(self._groups))
        if self.on_event is not None:
            for ticket in tickets:
                at = self.version if step is None else step
                self.on_event(GroupEvent(event, ticket, at, reason))

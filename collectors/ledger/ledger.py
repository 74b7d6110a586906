"""The ledger: each group from its draw to its training, across restarts."""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Literal

from torchrl_data.checks import check_counts, check_type, one_of
from torchrl_data.stop_reason import kind_of

from .groups import (
    FAILED,
    SAYS_NOTHING,
    STALE,
    UNFINISHED,
    Accounts,
    Balance,
    Eviction,
    Group,
    GroupEvent,
    GroupState,
    IllegalTransition,
    LedgerError,
    LedgerView,
    LengthHistogram,
    Refill,
    Ticket,
    shares,
)
from .policies import OnPolicy, StalenessPolicy, Wait

# The half of the ledger that hears of generation: until a group is finished, or given up.
#
# The letters: P groups per step of training, N episodes of a group, B slots.

REFILLS: Final = ("same", "next")
_MAX_SCHEDULE: Final = 1 << 16


class GenerationLedger(LedgerView):
    """What is offered, run, finished and dropped; see :class:`GroupLedger` for all of it."""

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
        """Whether :meth:`offer` may be called: a slot is free, and no cap is reached."""
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
        """One of its episodes is over.

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


# One state machine for every prompt group, from its draw to its training.
#
# The letters: P groups per step of training, N episodes of a group, B slots.


class GroupLedger(GenerationLedger):
    """Knows where each prompt group is, how many may begin, and which are trained next.

    It does nothing itself: who draws prompts, runs episodes, trains and pushes weights tells it.
    It is not for several threads at once::

        ledger = GroupLedger(groups_per_step=8, group_size=16, policy=Wait(max_staleness=4))
        while ledger.can_admit():
            ticket = ledger.offer(group_id, ordinal)
        ledger.start(ticket)  # its episodes run
        ledger.finish_episode(ticket, 0, tokens=312, oldest_version=7, stop_reason="answered")
        ledger.finish(ticket)  # all are over
        tickets = ledger.take()  # None: not yet
        ledger.trained(tickets, step)
        ledger.weights_pulled(step + 1)  # by every generator; now the slots are free

    A version is the number of steps of training in the weights, also where ``weight_sync_steps``
    leaves some out. Always ``offered == trained + dropped + returned + in flight``, by group and by
    token, which is checked after every event; ``print(ledger)`` shows it.

    Args:
        groups_per_step: P.
        group_size: N.
        policy: ``Wait()`` (the default), ``Drop()``, ``OnPolicy()``, or one of your own.
        weight_sync_steps: the generators pull weights every so many steps.
        max_inflight_groups: the most groups that are dispatched or running at once; -1: as many as
            the policy has slots.
        buffer_capacity: the most finished groups that may wait for a step of training; before they
            could be more, no further one begins. ``None``: any number.
        refill: what takes the place of a dropped group: the ``"same"`` prompt, or the ``"next"``
            one of the data.
        max_attempts: a prompt that was given up so often is dropped for good.
        seed: of the groups' seeds, where :meth:`offer` is given none.
        version: of the trainer and of the generators at the beginning.
        clock: seconds, from any beginning.

    Raises:
        ValueError: nothing would move, because the buffer is too small for the policy or the
            policy's knobs for ``weight_sync_steps``; or a setting has no meaning.
    """

    # What is trained ----------------------------------------------------------------------------

    def take(self, num_groups: int | None = None) -> list[Ticket] | None:
        """The groups of the next step of training, if there are enough that may be used.

        Finished groups that have become too old are evicted first (by policies that do so), see
        :meth:`take_evicted`. May be called again before a step is over, for the one after it.

        Args:
            num_groups: ``None``: P. Fewer, where the data have ended: all that is left.

        Returns:
            Their tickets; ``None``: wait.

        Raises:
            ValueError: more than P are asked for, or fewer while more are in flight.
            LedgerError: the policy chose a token that is older than ``max_staleness``.
        """
        count = self.groups_per_step if num_groups is None else num_groups
        check_counts("GroupLedger.take", num_groups=count)
        self._evict()
        if count > self.groups_per_step or count < min(self.groups_per_step, self.num_queued):
            raise ValueError(
                f"GroupLedger.take: a step trains groups_per_step={self.groups_per_step} groups, "
                f"fewer only when no more are in flight; got num_groups={count} while "
                f"{self.num_queued} are."
            )
        if self._num_finished < count:
            return None
        chosen = self.policy.select(self, count)
        if chosen is None:
            return None
        now, step = self._clock(), self.next_step
        ages = [
            0 if group.oldest_version is None else step - group.oldest_version for group in chosen
        ]
        if max(ages) > self.policy.max_staleness:
            worst = chosen[ages.index(max(ages))]
            raise LedgerError(
                f"GroupLedger: {self.policy!r} chose {worst.ticket} for step {step}, whose oldest "
                f"token has version {worst.oldest_version}: more than max_staleness old."
            )
        for group in chosen:
            self._move(group, GroupState.TAKEN)
        tickets = [group.ticket for group in chosen]
        self._batches.append(list(tickets))
        self._accounts.ages.update(ages)
        self._accounts.step = {
            "staleness": ages,
            "queue_s": [now - group.finished_at for group in chosen],
            "versions_span": [group.version_span for group in chosen],
        }
        self._schedule.append(tuple(ticket.ordinal for ticket in tickets))
        self._happened("taken", *tickets, step=step)
        return tickets

    def take_rest(self) -> list[Ticket] | None:
        """The last groups, once the data have ended: a full step, or else all that is left.

        Returns:
            Their tickets, none if nothing is left; ``None``: wait.
        """
        self._evict()
        count = min(self.groups_per_step, self.num_queued)
        return self.take(count) if count else []

    def put_back(self) -> None:
        """What steps have taken and not trained is finished again, and may be taken again."""
        for batch in self._batches:
            for ticket in batch:
                self._move(self._groups[ticket.ordinal], GroupState.FINISHED)
        self._batches.clear()
        self._happened()

    def _evict(self) -> None:
        for group in self.policy.evict(self):
            if group.state is GroupState.FINISHED:
                self._evicted.append(Eviction(group.ticket, self.drop(group.ticket, STALE)))

    def take_evicted(self) -> list[Eviction]:
        """The finished groups that :meth:`take` evicted; asked once, then forgotten."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def stale_tickets(self) -> list[Ticket]:
        """Running groups that can't be trained any more: cancel their episodes and drop them.

        None where the policy never evicts.
        """
        return [group.ticket for group in self.policy.evict(self) if group.state in UNFINISHED]

    def trained(self, tickets: Collection[Ticket], step: int) -> None:
        """A step of training is over. The slots are free once its weights are pulled.

        Args:
            tickets: what :meth:`take` gave for this step, without what was dropped since.
            step: which one, from 0; the trainer's version is ``step + 1`` now.

        Raises:
            IllegalTransition: it is not the next step, or these are not its groups.
        """
        batch = self._batches[0] if self._batches else []
        if step != self.version or not self._batches or set(tickets) != set(batch):
            raise IllegalTransition(
                f"GroupLedger: trained at step {step} {list(tickets)}: the next step is "
                f"{self.version}, and it has taken {batch}."
            )
        for ticket in list(batch):
            group = self._find(ticket, "trained", (GroupState.TAKEN,))
            self._accounts.leave(group, "trained")
            self._leave(group, f"trained at step {step}", None)
        self._batches.popleft()
        self.version = step + 1
        self._happened("trained", *tickets, step=step)

    def weights_pulled(self, version: int) -> None:
        """Every generator has these weights: what they sample from now on is of them.

        Args:
            version: the number of steps of training in the weights.

        Raises:
            IllegalTransition: the trainer has not made it yet, or it is older than the last one.
        """
        if not self.pulled_version <= version <= self.version:
            raise IllegalTransition(
                f"GroupLedger: weights_pulled({version}): the generators are at version "
                f"{self.pulled_version}, the trainer at {self.version}."
            )
        self.pulled_version = version
        self._happened()

    # What it was like ---------------------------------------------------------------------------

    @property
    def is_on_policy(self) -> bool:
        """Whether generation and training take turns, because no token may be older."""
        return self.policy.max_staleness == 0

    @property
    def balance(self) -> Balance:
        """What became of all groups and tokens so far."""
        return self._accounts.balance

    @property
    def lengths(self) -> tuple[LengthHistogram, LengthHistogram]:
        """Tokens of the episodes that were offered, and of those that were trained."""
        return self._accounts.offered, self._accounts.trained

    @property
    def schedule(self) -> list[tuple[int, ...]]:
        """The ordinals that each step has taken, in the order of the steps since it was made.

        Of more than 65,536 steps the first ones are forgotten.

        :class:`~collectors.Replay` trains them in this order again.
        """
        return list(self._schedule)

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger.

        Returns:
            Of the newest step that was taken: ``staleness/mean`` and ``/max`` of the oldest token
            of each group at use, in versions; ``versions_span/mean`` and ``/max``, by how many
            versions the tokens of one episode differ (of each group, the most); ``queue_s/mean``
            and ``/max``, seconds that a group waited. Over the whole run:
            ``staleness/at_<n>_fraction`` of the groups used at that age; ``length/offered_mean``
            and ``length/trained_mean`` of an episode in tokens, and ``length/distance`` between
            the two distributions (Kolmogorov-Smirnov); ``stop/<reason>``, the fraction of the
            episodes; ``groups/<end>`` and ``tokens/<end>``, see :class:`Balance`, with
            ``groups/dropped/<reason>``. At the moment: ``in_flight/unfinished``,
            ``in_flight/waiting`` and ``in_flight/taken`` groups, ``prompts_owed``, and
            ``versions_ahead`` of the trainer before the generators.
        """
        metrics = self._accounts.metrics()
        metrics["in_flight/unfinished"] = float(self._num_unfinished)
        metrics["in_flight/waiting"] = float(self._num_finished)
        metrics["in_flight/taken"] = float(len(self._groups) - self.num_queued)
        metrics["prompts_owed"] = float(len(self._owed))
        metrics["versions_ahead"] = float(self.version - self.pulled_version)
        return metrics

    def __str__(self) -> str:
        taken = sum(map(len, self._batches))
        lines = [
            f"GroupLedger at step {self.version}, generators at version {self.pulled_version}",
            str(self.balance),
        ]
        if self.balance.in_flight.groups:
            unfinished = [
                str(group.ticket.ordinal) for group in self.queue() if group.state in UNFINISHED
            ]
            oldest = f" (oldest: ordinal {unfinished[0]})" if unfinished else ""
            lines.append(
                f"in flight: {len(unfinished)} unfinished{oldest}, "
                f"{self._num_finished} waiting, {taken} in training"
            )
        return "\n".join(lines)

    # Resume -------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        """What a resumed run has to have in common with the saved one."""
        # Wait(0) is the same, however it is written.
        policy = OnPolicy() if type(self.policy) is Wait and self.is_on_policy else self.policy
        return {
            "groups_per_step": self.groups_per_step,
            "group_size": self.group_size,
            "weight_sync_steps": self.weight_sync_steps,
            "policy": repr(policy),
            "seed": self.seed,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as plain values that JSON can hold."""
        return {
            "settings": self._settings(),
            **self._accounts.state(),
            **self._state(self._clock()),
            "unwritten": [] if self.unwritten is None else list(self.unwritten()),
        }

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, restored: Collection[int] | None = None
    ) -> None:
        """Go on where a run was: in a ledger that has seen nothing, with the same settings.

        What was unfinished counts as returned, and is owed with the same seeds. The generators
        count as being at the version that they had; tell :meth:`weights_pulled` once they have the
        trainer's. What the steps that were not over had taken stays in :attr:`batches`.

        Args:
            state_dict: what :meth:`state_dict` gave.
            restored: ordinals of the finished groups whose rows are there again; ``None``: of all.
                The others are owed too, and if the batch of a step lacks one, no step has taken
                any.

        Raises:
            LedgerError: it has been used already.
            ValueError: a setting differs.
        """
        if self.next_ordinal:
            raise LedgerError("GroupLedger: load_state_dict takes a ledger that has seen nothing.")
        for name, value in self._settings().items():
            if state_dict["settings"][name] != value:
                raise ValueError(
                    f"GroupLedger: the saved run had {name}={state_dict['settings'][name]!r}, "
                    f"this one has {value!r}."
                )
        self._accounts.load_state(state_dict)
        self._load_state(state_dict, self._clock())
        self.unwritten_before = state_dict["unwritten"]
        lost = [
            group
            for group in self._groups.values()
            if group.state in UNFINISHED
            or (restored is not None and group.ticket.ordinal not in restored)
        ]
        if any(group.state is GroupState.TAKEN for group in lost):
            self.put_back()
        for group in lost:
            self.cancel(group.ticket)
        self._happened()

"""A state machine for every prompt group, from its draw to its training.

The letters: P groups per step of training, N episodes of a group, B slots.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torchrl_data.checks import check_counts

from .accounts import LengthHistogram
from .balance import Balance
from .generation_ledger import GenerationLedger
from .groups import UNFINISHED, Eviction, Group, GroupState, Ticket
from .reasons import STALE, IllegalTransition, LedgerError
from .staleness_policies import OnPolicy, Wait


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
        ages = _ages(chosen, step)
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
        """Put back the groups that steps have taken and not trained: they may be taken again."""
        for step, batch in enumerate(self._batches, self.version):
            groups = [self._groups[ticket.ordinal] for ticket in batch]
            for group in groups:
                self._move(group, GroupState.FINISHED)
            self._accounts.ages -= Counter(_ages(groups, step))
            if self._schedule:  # a ledger that goes on where another was has none of its steps
                self._schedule.pop()
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
        """Fates of all groups and tokens so far."""
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
        """Return what a resumed run has to have in common with the saved one."""
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


def _ages(groups: Sequence[Group], step: int) -> list[int]:
    """Return the age of each group's oldest token when a step trains it, in versions."""
    return [0 if each.oldest_version is None else step - each.oldest_version for each in groups]

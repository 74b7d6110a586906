"""A run's order of training, once more: which groups each step trained, whatever finishes first."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .groups import Group, GroupState
from .policies import LedgerView, Wait


@dataclass(frozen=True)
class Replay:
    """Trains in each step the groups that it trained in a run before.

    Groups are admitted in the order of the data as ever, and a step waits for its own, however long
    they take. The same data, sizes and policy are needed; steps after the recorded ones choose as
    the policy does::

        first = StreamingCollector(env, policy, staleness=Wait(4))
        ...
        again = StreamingCollector(env, policy, staleness=Replay(first.ledger.schedule, Wait(4)))

    Args:
        schedule: of each step from the first on, the ordinals of the prompts that it trained, see
            :attr:`~collectors.GroupLedger.schedule`.
        policy: of the run before; nothing may be dropped for its age, because when that happens is
            a matter of time.

    Raises:
        TypeError: the policy is none that waits.
        ValueError: a prompt is in the schedule twice.
    """

    schedule: Sequence[Sequence[int]]
    policy: Wait = field(default_factory=Wait)

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Wait):
            raise TypeError(
                f"Replay: policy takes Wait(...) or OnPolicy(), got {self.policy!r}: what others "
                "drop depends on the time it takes."
            )
        ordinals = [ordinal for step in self.schedule for ordinal in step]
        twice = sorted({ordinal for ordinal in ordinals if ordinals.count(ordinal) > 1})
        if twice:
            raise ValueError(f"Replay: the schedule trains the prompts {twice[:8]} twice.")

    @property
    def max_staleness(self) -> int:
        """See :class:`StalenessPolicy`."""
        return self.policy.max_staleness

    @property
    def recompute(self) -> bool:
        """See :class:`Wait`."""
        return self.policy.recompute

    def slots(self, groups_per_step: int, weight_sync_steps: int) -> int:
        """See :class:`StalenessPolicy`."""
        return self.policy.slots(groups_per_step, weight_sync_steps)

    def required_capacity(self, groups_per_step: int, weight_sync_steps: int) -> int:
        """See :class:`StalenessPolicy`."""
        return self.policy.required_capacity(groups_per_step, weight_sync_steps)

    def admit(self, view: LedgerView) -> bool:
        """See :class:`StalenessPolicy`."""
        return self.policy.admit(view)

    def select(self, view: LedgerView, num_groups: int) -> list[Group] | None:
        """The groups of the recorded step, once all of them are finished.

        Raises:
            ValueError: the step trained another number of groups.
        """
        if view.next_step >= len(self.schedule):
            return self.policy.select(view, num_groups)
        wanted = self.schedule[view.next_step]
        if len(wanted) != num_groups:
            raise ValueError(
                f"Replay: step {view.next_step} trained {len(wanted)} groups, and {num_groups} are "
                "asked for. Replay with the groups_per_step and the data of the run before."
            )
        finished = {
            group.ticket.ordinal: group
            for group in view.queue()
            if group.state is GroupState.FINISHED
        }
        if any(ordinal not in finished for ordinal in wanted):
            return None
        return [finished[ordinal] for ordinal in wanted]

    def evict(self, view: LedgerView) -> list[Group]:
        """See :class:`StalenessPolicy`."""
        return self.policy.evict(view)

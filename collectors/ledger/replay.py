"""A run's order of training, once more: which groups each step trained, whatever finishes first."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .groups import Group, GroupState
from .ledger_view import LedgerView
from .staleness_policies import Wait


@dataclass(frozen=True)
class Replay(Wait):
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

    max_staleness: int = field(init=False, repr=False)
    pipeline_depth: int | None = field(init=False, repr=False)
    window: float = field(init=False, repr=False)
    recompute: bool = field(init=False, repr=False)
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

        # What a subclass of Wait does in its own way, too.
        settings = ("max_staleness", "pipeline_depth", "window", "recompute")
        for name in (*settings, "slots", "required_capacity", "admit", "evict"):
            object.__setattr__(self, name, getattr(self.policy, name))

    def select(self, view: LedgerView, num_groups: int) -> list[Group] | None:
        """The groups of the recorded step, once all of them are finished.

        Raises:
            ValueError: the step trained another number of groups, or some that can't come any more:
                the schedule is that of a run that was resumed, say, and lacks the first steps.
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
        missing = [ordinal for ordinal in wanted if ordinal not in finished]
        is_full = len(finished) == len(view.queue()) and not self.admit(view)
        if missing and is_full and view.pulled_version == view.next_step:
            raise ValueError(
                f"Replay: step {view.next_step} trained the prompts {missing}, and waits for them "
                f"in vain: {sorted(finished)} take all room. Give the schedule from the first step."
            )
        return None if missing else [finished[ordinal] for ordinal in wanted]

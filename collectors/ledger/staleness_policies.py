"""Policies of staleness: how far generation may run ahead, and which groups a step trains.

The letters: P groups per step of training, B slots, W the window, all in groups; versions count
steps of training, so that step s is made at version s and gives version s + 1.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torchrl_data.checks import check_counts, check_numbers

from .groups import Group, GroupState
from .ledger_view import LedgerView


@runtime_checkable
class StalenessPolicy(Protocol):
    """Protocol of a staleness policy. It keeps no state: all that it may know is in the view.

    It may have ``recompute``, see :class:`Wait`.
    """

    @property
    def max_staleness(self) -> int:
        """The most versions by which any token may be older than the trainer that uses it."""
        ...

    def slots(self, groups_per_step: int, weight_sync_steps: int) -> int:
        """B, the groups that may be admitted before the first step; raises where it can't work."""
        ...

    def required_capacity(self, groups_per_step: int, weight_sync_steps: int) -> int:
        """Finished groups that a buffer has to hold, or nothing would move any more."""
        ...

    def admit(self, view: LedgerView) -> bool:
        """Return whether another group may begin."""
        ...

    def select(self, view: LedgerView, num_groups: int) -> list[Group] | None:
        """The finished groups to train next; ``None``: wait. There are at least so many."""
        ...

    def evict(self, view: LedgerView) -> list[Group]:
        """Groups, running or finished, that nothing can be trained on any more."""
        ...


@dataclass(frozen=True)
class Wait:
    """Never too old by construction, so that nothing is thrown away and no slow prompt starves.

    A group is admitted where a slot is free: there are ``B = (pipeline_depth + 1) * P``, each step
    of training holds P of them until the generators have pulled its weights. Finished groups are
    trained in the order of admission, but at most ``W - 1`` younger ones overtake a group,
    ``W = max(1, floor(window * B))``. The age of a token at use is at most
    ``pipeline_depth + ceil((W - 1) / P)``; where that is more than ``max_staleness``, fewer may
    overtake.

    Args:
        max_staleness: the most versions by which any token may be older than the trainer that
            uses it, when it is used.
        pipeline_depth: how many steps generation may run ahead, at most ``max_staleness``.
            ``None``: one less, which leaves room for overtaking; but at least 1, and as many as
            ``weight_sync_steps`` takes.
        window: the fraction of the slots within which groups may overtake. 0: first in, first out.
        recompute: new weights read again what responses in flight have so far, so that the
            log-prob of each further token is exactly that of its version. ``False``: they go on
            with the keys and values of the old ones, as old as the response. That is faster; the
            log-probs are those that the tokens were drawn with, but of no version alone.

    Raises:
        ValueError: a number is out of its range, or too large for another one; or
            ``recompute=False`` where nothing is in flight when weights are replaced.

    Example:
        >>> staleness = Wait(max_staleness=4)  # for StreamingCollector(..., staleness=staleness)
        >>> staleness.slots(groups_per_step=8, weight_sync_steps=1)  # (depth 3 + 1) * 8
        32
    """

    max_staleness: int = 4
    pipeline_depth: int | None = None
    window: float = 0.3
    recompute: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        _check_knobs("Wait", self.max_staleness, self.pipeline_depth, self.recompute)
        check_numbers("Wait", "[0, 1]", window=self.window)
        if self.pipeline_depth is not None and self.pipeline_depth > self.max_staleness:
            raise ValueError(
                f"Wait: pipeline_depth={self.pipeline_depth} is more than "
                f"max_staleness={self.max_staleness}: groups would become too old, and nothing may "
                "be dropped. Lower the one, raise the other, or use Drop."
            )

    def slots(self, groups_per_step: int, weight_sync_steps: int) -> int:
        """B; see :class:`StalenessPolicy`."""
        _check_sync(self, "max_staleness", self.max_staleness, weight_sync_steps)
        depth = self.pipeline_depth
        if depth is None:
            depth = max(self.max_staleness - 1, min(1, self.max_staleness), weight_sync_steps - 1)
        _check_sync(self, "pipeline_depth", depth, weight_sync_steps)
        return (depth + 1) * groups_per_step

    def required_capacity(self, groups_per_step: int, weight_sync_steps: int) -> int:
        """All slots: the oldest group may be the last to finish, and the others wait for it."""
        return self.slots(groups_per_step, weight_sync_steps)

    def admit(self, view: LedgerView) -> bool:
        """Admit if a slot is free; a step holds P until the generators have pulled its weights."""
        held = view.groups_per_step * (view.next_step - view.pulled_version)
        return view.num_queued + held < view.num_slots

    def select(self, view: LedgerView, num_groups: int) -> list[Group] | None:
        """The oldest finished groups within the window, if none of the others becomes too old."""
        queue = view.queue()
        unfinished = (group.place for group in queue if group.state is not GroupState.FINISHED)
        anchor = next(unfinished, None)
        window = max(1, math.floor(self.window * view.num_slots))
        end = math.inf if anchor is None else anchor + window
        chosen, left = [], []
        for group in queue:
            fits = group.state is GroupState.FINISHED and group.place < end
            (chosen if fits and len(chosen) < num_groups else left).append(group)
        # Those who stay have to be trained within the bound, too, oldest first.
        following = view.next_step + 1
        in_time = all(
            following + number // view.groups_per_step <= group.ticket.version + self.max_staleness
            for number, group in enumerate(left)
        )
        return chosen if len(chosen) == num_groups and in_time else None

    def evict(self, view: LedgerView) -> list[Group]:
        """Never any."""
        del view
        return []


@dataclass(frozen=True)
class OnPolicy(Wait):
    """Every token is of the version that is trained: generation and training take turns.

    The same as ``Wait(max_staleness=0)``: a run that was saved with the one goes on with the other.

    Example:
        >>> OnPolicy().max_staleness
        0
        >>> OnPolicy().slots(groups_per_step=8, weight_sync_steps=1)  # depth 0
        8
    """

    max_staleness: int = field(default=0, init=False)
    pipeline_depth: int | None = field(default=0, init=False)
    window: float = field(default=0.0, init=False)
    recompute: bool = field(default=True, init=False)


@dataclass(frozen=True)
class Drop:
    """Policy that drops groups that are too old, asks for them again, and uses the first finished.

    TRL's meaning of ``max_staleness``. Generation runs ahead freely, and slow prompts pay for it:
    they are dropped more often than quick ones, and the trained lengths are no longer those of the
    data. See :class:`Wait`.

    Args:
        max_staleness: the most versions by which any token may be older than the trainer that
            uses it, when it is used.
        pipeline_depth: ``(pipeline_depth + 1) * P`` groups may be in flight. ``None``:
            ``max_staleness``.
        recompute: as for :class:`Wait`.

    Raises:
        ValueError: a number is out of its range; or ``recompute=False`` where nothing is in flight
            when weights are replaced.

    Example:
        >>> staleness = Drop(max_staleness=4)  # for StreamingCollector(..., staleness=staleness)
        >>> staleness.slots(groups_per_step=8, weight_sync_steps=1)  # (depth 4 + 1) * 8
        40
    """

    max_staleness: int = 4
    pipeline_depth: int | None = None
    recompute: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        _check_knobs("Drop", self.max_staleness, self.pipeline_depth, self.recompute)

    def slots(self, groups_per_step: int, weight_sync_steps: int) -> int:
        """B; see :class:`StalenessPolicy`."""
        _check_sync(self, "max_staleness", self.max_staleness, weight_sync_steps)
        depth = self.max_staleness if self.pipeline_depth is None else self.pipeline_depth
        return (depth + 1) * groups_per_step

    def required_capacity(self, groups_per_step: int, weight_sync_steps: int) -> int:
        """Those of a step: any that are finished can be trained."""
        del weight_sync_steps
        return groups_per_step

    def admit(self, view: LedgerView) -> bool:
        """Return whether a slot is free; a group frees its own when a step takes it."""
        return view.num_queued < view.num_slots

    def select(self, view: LedgerView, num_groups: int) -> list[Group] | None:
        """Those that were finished first."""
        finished = [group for group in view.queue() if group.state is GroupState.FINISHED]
        return sorted(finished, key=lambda group: group.arrival)[:num_groups]

    def evict(self, view: LedgerView) -> list[Group]:
        """Those with a token that is too old for the next step."""
        oldest = view.next_step - self.max_staleness
        return [group for group in view.queue() if _first_version(group) < oldest]


def _first_version(group: Group) -> float:
    """Version of the oldest token that a group has, or will have as things are."""
    if group.oldest_version is not None:
        return group.oldest_version
    if group.state is GroupState.FINISHED or group.begun_version is None:
        return math.inf
    return group.begun_version


def _check_knobs(who: str, max_staleness: int, pipeline_depth: int | None, recompute: bool) -> None:
    check_counts(who, 0, max_staleness=max_staleness, pipeline_depth=pipeline_depth)
    if max_staleness == 0 and not recompute:
        raise ValueError(
            f"{who}: with max_staleness=0 nothing is in flight when weights are replaced, so "
            "recompute=False can't take effect. Leave it out, or allow some staleness."
        )


def _check_sync(policy: object, name: str, value: int, weight_sync_steps: int) -> None:
    least = weight_sync_steps - 1
    if value < least:
        raise ValueError(
            f"{type(policy).__name__}: {name} must be at least {least}, got {value}: weights are "
            f"pulled every weight_sync_steps={weight_sync_steps} steps, and the last of these "
            "trains what was sampled at the first one's version. Pull more often, or allow for it."
        )

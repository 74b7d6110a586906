"""Selection of the best rows of each group, as they go into a replay buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final, Literal

from tensordict import NestedKey, TensorDictBase

from torchrl_data import keys
from torchrl_data.checks import check_counts, check_numbers, one_of

from .estimators import TrajectoryReturn
from .group_refill import GroupRefill
from .group_selector import GroupSelector

Above = Literal["median", "mean", "any"]
ABOVE: Final[tuple[Above, ...]] = ("median", "mean", "any")


class TopKRewardSelector(GroupSelector):
    """Releases the best k rows of each complete group (rejection sampling, expert iteration).

    An episode with several rows, because its past was rewritten, counts as one, and all of its
    rows are kept or none. Rows at or below the group's median are never kept, nor those that
    could not be scored, so a group whose rewards are all equal gives nothing. Of rewards that are
    0 or 1, a group of which more than half are right gives nothing either: ``above="mean"`` keeps
    its right rows. Rows come out best first, ties in the order of their arrival. Incomplete groups
    and counts are part of ``state_dict``. An ``extend`` that raises takes none of its rows in.

    Args:
        total_dialog_turns: rows of a complete group (TorchRL's name; ``group_size`` is the same).
        topk_size: rows kept of it, at most.
        group_size: rows of a complete group.
        group_key: int64, the group's id.
        reward_key: ``[1, 1]``, or dense ``[T, 1]``.
        scorable_key: bool; False where no reward could be given. Optional in the rows.
        trajectory_return: how a dense reward becomes one number: ``"sum"``, ``"mean"``,
            ``"max"``.
        above: what a row's return has to be above: ``"median"`` or ``"mean"`` of its group, a
            number, or ``"any"``, where nothing is asked of it. With a number a group is kept of
            which all rows are right, too.
        refill: another group is asked for in the place of one that gives nothing, which all
            collectors answer; ``None``: none is.
        max_pending_groups: more incomplete groups than this, and the oldest expires.
        expire_after_rows: a group expires once so many rows have come in since its first one.

    Raises:
        ValueError: a number is not positive, k is above the group's size, or a name is unknown.

    Example:
        >>> from tensordict import lazy_stack
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> selector = TopKRewardSelector(group_size=4, topk_size=2)
        >>> buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=selector)
        >>> rewards = [torch.tensor([[value]]) for value in (0.25, 0.75, 0.0, 0.5)]
        >>> rows = [TensorDict({"reward": each, "group_id": torch.tensor(7)}) for each in rewards]
        >>> _ = buffer.extend(lazy_stack(rows))
        >>> buffer[:]["reward"].shape, buffer[:]["reward"].flatten()  # the best come first
        (torch.Size([2, 1, 1]), tensor([0.7500, 0.5000]))
    """

    def __init__(
        self,
        total_dialog_turns: int | None = None,
        topk_size: int = 1,
        *,
        group_size: int | None = None,
        group_key: NestedKey = keys.GROUP_ID,
        reward_key: NestedKey = keys.REWARD,
        scorable_key: NestedKey = keys.SCORABLE,
        trajectory_return: TrajectoryReturn | str = "sum",
        above: Above | str | float = "median",
        refill: GroupRefill | None = None,
        max_pending_groups: int = 1024,
        expire_after_rows: int | None = None,
    ) -> None:
        super().__init__(
            refill=refill,
            group_key=group_key,
            reward_key=reward_key,
            scorable_key=scorable_key,
            trajectory_return=trajectory_return,
            max_pending_groups=max_pending_groups,
            expire_after_rows=expire_after_rows,
            group_size=group_size,
            total_dialog_turns=total_dialog_turns,
        )
        self.topk_size: int = self._checked_change("topk_size", topk_size)
        self.above: Above | float = self._checked_change("above", above)

    changeable = frozenset({"topk_size", "above", "refill"})

    def _checked_change(self, name: str, value: Any) -> Any:
        if name == "topk_size":
            check_counts(topk_size=value)
            if value > self.group_size:
                raise ValueError(f"topk_size must lie in [1, {self.group_size}], got {value}.")
        elif name == "refill":
            return super()._checked_change(name, value)
        elif isinstance(value, str):
            return one_of("above", value, ABOVE)
        else:
            check_numbers(above=value)
        return value

    @property
    def num_released(self) -> int:
        """See the base class."""
        return self.topk_size

    def _select(self, members: Sequence[TensorDictBase]) -> list[TensorDictBase]:
        scored = [(self._return(member), member) for member in members]
        falling = sorted((p for p in scored if not math.isnan(p[0])), key=lambda p: -p[0])
        if self.above != "any" and falling:
            bound = self._bound([value for value, _ in falling])
            falling = [pair for pair in falling if pair[0] > bound]
        return [member for _, member in falling[: self.topk_size]]

    def _bound(self, falling: Sequence[float]) -> float:
        if not isinstance(self.above, str):
            return self.above
        if self.above == "median":  # The lower of the two middle values, as torch.median has it.
            return falling[len(falling) // 2]
        # The rounded mean of equal values can lie below them: that of 0.7 three times does.
        return max(fmean(falling), falling[-1])

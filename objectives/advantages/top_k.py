"""Keep the best rows of each group, as they go into a replay buffer."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final, Literal

from tensordict import NestedKey, TensorDictBase, lazy_stack
from torchrl.envs.transforms import Transform

from torchrl_data import keys
from torchrl_data.validation import check_counts, check_numbers, one_of

from .estimators import (
    TRAJECTORY_RETURNS,
    TrajectoryReturn,
    read_entry,
    read_group,
    trajectory_return,
)
from .group_queue import GroupQueue, GroupStats

Above = Literal["median", "mean", "any"]
ABOVE: Final[tuple[Above, ...]] = ("median", "mean", "any")


class TopKRewardSelector(Transform):
    """Releases the best k rows of each complete group (rejection sampling, expert iteration).

    Rows at or below the group's median are never kept, nor those that could not be scored, so a
    group whose rewards are all equal gives nothing. Of rewards that are 0 or 1, a group of which
    more than half are right gives nothing either: ``above="mean"`` keeps its right rows. Rows come
    out best first, ties in the order of their arrival. Incomplete groups and counts are part of
    ``state_dict``. An ``extend`` that raises takes none of its rows in.

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
        max_pending_groups: more incomplete groups than this, and the oldest expires.
        expire_after_rows: a group expires once so many rows have come in since its first one.

    Raises:
        ValueError: a number is not positive, k is above the group's size, or a name is unknown.
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
        max_pending_groups: int = 1024,
        expire_after_rows: int | None = None,
    ) -> None:
        super().__init__()
        if (group_size is None) == (total_dialog_turns is None):
            raise ValueError(
                "TopKRewardSelector needs group_size (or total_dialog_turns, the same): give one."
            )
        size = group_size if total_dialog_turns is None else total_dialog_turns
        check_counts(group_size=size, topk_size=topk_size)
        assert size is not None
        if not 1 <= topk_size <= size:
            raise ValueError(f"topk_size must lie in [1, {size}], got {topk_size}.")
        self.queue = GroupQueue(
            size, max_pending_groups=max_pending_groups, expire_after_rows=expire_after_rows
        )
        self.topk_size = topk_size
        self.group_key = group_key
        self.reward_key = reward_key
        self.scorable_key = scorable_key
        self.trajectory_return: TrajectoryReturn = one_of(
            "trajectory_return", trajectory_return, TRAJECTORY_RETURNS
        )
        self.above: Above | float
        if isinstance(above, str):
            self.above = one_of("above", above, ABOVE)
        else:
            check_numbers(above=above)
            self.above = float(above)
        self._lock = threading.Lock()

    @property
    def stats(self) -> GroupStats:
        """Counts of what came in and what became of it."""
        return self.queue.stats

    def get_extra_state(self) -> dict[str, Any]:
        """Incomplete groups and counts, for ``state_dict``."""
        with self._lock:
            return self.queue.state()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go back to a state.

        Args:
            state: what :meth:`get_extra_state` gave.

        Raises:
            ValueError: it belongs to groups of another size.
        """
        with self._lock:
            self.queue.load_state(state)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_lock"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = threading.Lock()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Leave sampled rows as they are."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Take rows in, give the best of complete groups out; None while there are none."""
        if tensordict is None:
            return None
        rows = tensordict.reshape(-1).unbind(0) if tensordict.ndim != 1 else tensordict.unbind(0)
        released: list[TensorDictBase] = []
        with self._lock, self.queue.unchanged_on_error():
            for row in rows:
                group_id = read_group(row, self.group_key, "TopKRewardSelector")
                members = self.queue.add(group_id, row)
                if members is not None:
                    released += self._best(members)
            for _, late in self.queue.expire():
                self.stats.rows_expired += len(late)
            self.stats.rows_released += len(released)
        return lazy_stack(released) if released else None

    def _best(self, rows: list[TensorDictBase]) -> list[TensorDictBase]:
        returns = [self._return(row) for row in rows]
        order = [index for index, value in enumerate(returns) if not math.isnan(value)]
        order.sort(key=lambda index: -returns[index])
        if self.above != "any" and order:
            bound = self._bound([returns[index] for index in order])
            order = [index for index in order if returns[index] > bound]
        best = order[: self.topk_size]
        self.stats.rows_dropped_unselected += len(rows) - len(best)
        return [rows[index] for index in best]

    def _bound(self, falling: Sequence[float]) -> float:
        if not isinstance(self.above, str):
            return self.above
        if self.above == "median":  # The lower of the two middle values, as torch.median has it.
            return falling[len(falling) // 2]
        # The rounded mean of equal values can lie below them: that of 0.7 three times does.
        return max(fmean(falling), falling[-1])

    def _return(self, row: TensorDictBase) -> float:
        reward = read_entry(row, self.reward_key, "TopKRewardSelector")
        return trajectory_return(reward, row.get(self.scorable_key, None), self.trajectory_return)

"""Base of the parts of a replay buffer that let some rows of each group in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase

from torchrl_data.checks import check_type

from .estimators import read_entry
from .group_queue import num_rows, rows_of_member
from .group_refill import MAX_DRAWS, GroupRefill
from .mc_advantage import ByGroups


class GroupSelector(ByGroups):
    """Releases some episodes of each complete group; see :class:`ByGroups` for the arguments.

    Args:
        refill: another group is asked for in the place of one that gives nothing, which all
            collectors answer; ``None``: none is.
        **groups: of the base class.
    """

    def __init__(self, *, refill: GroupRefill | None, **groups: Any) -> None:
        super().__init__(**groups)
        self.refill: GroupRefill | None = self._checked_change("refill", refill)

    changeable = frozenset({"refill"})

    def _checked_change(self, name: str, value: Any) -> Any:
        if name == "refill" and value is not None:
            check_type("refill", value, GroupRefill, who=self._get_name())
        return value

    @property
    def num_released(self) -> int:
        """Episodes that a group gives at most."""
        raise NotImplementedError

    def _select(self, members: Sequence[TensorDictBase]) -> list[TensorDictBase]:
        """The episodes of a complete group that are kept, in the order in which they are given."""
        raise NotImplementedError

    def _released(self, selected: Sequence[TensorDictBase]) -> list[TensorDictBase]:
        """The rows of the episodes that are kept."""
        return [row for member in selected for row in rows_of_member(member)]

    def _take(self, rows: Sequence[TensorDictBase]) -> list[TensorDictBase]:
        """Queue rows; give those that are kept of complete groups."""
        released: list[TensorDictBase] = []
        for row in rows:
            group_id = int(read_entry(row, self.group_key, self._get_name()))
            if (members := self.queue.add(group_id, row)) is None:
                continue
            kept = self._released(self._select(members))
            self.stats.rows_dropped_unselected += sum(map(num_rows, members)) - len(kept)
            released += kept
        for _, late in self.queue.expire():
            self.stats.rows_expired += sum(map(num_rows, late))
        return released

    @property
    def asks_for_groups(self) -> bool:
        """See the base class."""
        return self.refill is not None

    @property
    def max_draws(self) -> int:
        """See :class:`GroupRefill`."""
        return MAX_DRAWS if self.refill is None else self.refill.max_draws

    def asks_again(self, rows: Sequence[TensorDictBase]) -> bool:
        """See the base class; here, where nothing of the group would be kept."""
        return self.refill is not None and not self._select(self._members(rows))

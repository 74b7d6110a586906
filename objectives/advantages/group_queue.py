"""Queue of rollouts that wait until their group is complete."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from tensordict import TensorDictBase

from torchrl_data.checks import check_counts
from torchrl_data.keys import EPISODE_ID, NUM_SEGMENTS, SEGMENT
from torchrl_data.saved_rows import row_from_state, row_state

_EARLIER: Final = "earlier_segments"
_LOG = logging.getLogger(__name__)


@dataclass
class GroupStats:
    """Counts since the queue was made; ``rows_in`` is the sum of what became of the rows."""

    rows_in: int = 0
    rows_released: int = 0
    rows_dropped_unscorable: int = 0
    rows_dropped_zero_variance: int = 0
    rows_dropped_bounds: int = 0
    rows_dropped_unselected: int = 0
    rows_expired: int = 0
    groups_completed: int = 0
    groups_zero_variance: int = 0
    groups_expired: int = 0

    def ledger(self, rows_pending: int) -> bool:
        """Return whether every row is accounted for."""
        dropped = sum(n for name, n in asdict(self).items() if name.startswith("rows_dropped_"))
        return self.rows_in == self.rows_released + dropped + self.rows_expired + rows_pending


class GroupQueue:
    """Collects rows by group id until a group has all of its members.

    Groups may arrive interleaved and out of order. Groups that stay incomplete expire, oldest
    first, when too many wait, or when a group has waited too long; each is logged and counted.

    Args:
        group_size: members of a complete group.
        max_pending_groups: more incomplete groups than this, and the oldest expires.
        expire_after_rows: a group expires once so many rows have come in since its first one;
            None for never.

    Raises:
        ValueError: a number is not whole, or not positive.
    """

    def __init__(
        self,
        group_size: int,
        *,
        max_pending_groups: int = 1024,
        expire_after_rows: int | None = None,
    ) -> None:
        check_counts(
            group_size=group_size,
            max_pending_groups=max_pending_groups,
            expire_after_rows=expire_after_rows,
        )
        self.group_size = group_size
        self.max_pending_groups = max_pending_groups
        self.expire_after_rows = expire_after_rows
        self.stats = GroupStats()
        self.expired: deque[tuple[Hashable, int]] = deque(maxlen=1000)
        """The latest expired groups: id, and how many rows it had."""
        self._pending: dict[Hashable, list[TensorDictBase]] = {}
        self._first_row: dict[Hashable, int] = {}
        self._waiting: Waiting = {}

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def num_rows(self) -> int:
        """Rows that wait for others of their group."""
        return sum(num_rows(row) for rows in self._pending.values() for row in rows)

    def missing(self) -> dict[Hashable, int]:
        """Return how many rows each incomplete group still lacks, oldest group first."""
        return {group: self.group_size - len(rows) for group, rows in self._pending.items()}

    def add(self, group: Hashable, row: TensorDictBase) -> list[TensorDictBase] | None:
        """Add a row.

        Args:
            group: its group's id.
            row: the row; kept as it is. Where an episode has several, the group gets one for all of
                them, with the others inside, once they are there.

        Returns:
            The group's rows in the order of their arrival once it is complete, else None.

        Raises:
            ValueError: a row of an episode of several came before.
        """
        member = member_of(group, row, self._waiting)
        if member is None:
            return None
        self.stats.rows_in += num_rows(member)
        rows = self._pending.get(group)
        if rows is None:
            rows = self._pending[group] = []
            self._first_row[group] = self.stats.rows_in
        rows.append(member)
        if len(rows) < self.group_size:
            return None
        del self._pending[group], self._first_row[group]
        self.stats.groups_completed += 1
        return rows

    def expire(self) -> list[tuple[Hashable, list[TensorDictBase]]]:
        """Take out the groups that have waited too long.

        Returns:
            Ids and rows, oldest group first. Whoever calls it counts what becomes of the rows.
        """
        late = []
        if self.expire_after_rows is not None:
            limit = self.stats.rows_in - self.expire_after_rows
            late = [group for group, first in self._first_row.items() if first <= limit]
        surplus = len(self._pending) - len(late) - self.max_pending_groups
        if surplus > 0:
            gone = set(late)
            rest = (group for group in self._pending if group not in gone)
            late += [group for group, _ in zip(rest, range(surplus), strict=False)]
        taken = [(group, self._pending.pop(group)) for group in late]
        for group, rows in taken:
            del self._first_row[group]
            self.expired.append((group, len(rows)))
            _LOG.warning("Group %r expired with %d of %d rows.", group, len(rows), self.group_size)
        self.stats.groups_expired += len(taken)
        return taken

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """Whatever is done within has not happened if it raises; the error goes on."""
        pending = {group: list(rows) for group, rows in self._pending.items()}
        waiting = {episode: dict(rows) for episode, rows in self._waiting.items()}
        first_row, stats, expired = dict(self._first_row), replace(self.stats), self.expired.copy()
        try:
            yield
        except BaseException:
            self._pending, self._first_row, self._waiting = pending, first_row, waiting
            self.stats, self.expired = stats, expired
            raise

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs: what JSON can hold, and tensors."""
        pending = [
            {
                "group": group,
                "first_row": self._first_row[group],
                "rows": list(map(row_state, rows)),
            }
            for group, rows in self._pending.items()
        ]
        expired = [list(item) for item in self.expired]
        about = {"group_size": self.group_size, "stats": asdict(self.stats)}
        segments = [
            {"group": group, "episode": episode, "segment": segment, "row": row_state(row)}
            for (group, episode), rows in self._waiting.items()
            for segment, row in rows.items()
        ]
        return {**about, "pending": pending, "expired": expired, "segments": segments}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to a state.

        Args:
            state: what :meth:`state` gave.

        Raises:
            ValueError: it belongs to groups of another size.
        """
        if state["group_size"] != self.group_size:
            raise ValueError(
                f"GroupQueue: the saved groups have {state['group_size']} members, these have "
                f"{self.group_size}. Resume with the group_size of the saved run."
            )
        self._pending, self._first_row, self._waiting = {}, {}, {}
        for item in state["segments"]:
            rows = self._waiting.setdefault((item["group"], item["episode"]), {})
            rows[item["segment"]] = row_from_state(item["row"])
        for item in state["pending"]:
            self._pending[item["group"]] = [row_from_state(row) for row in item["rows"]]
            self._first_row[item["group"]] = item["first_row"]
        self.stats = GroupStats(**state["stats"])
        self.expired = deque(map(tuple, state["expired"]), maxlen=self.expired.maxlen)


def row_place(row: TensorDictBase) -> tuple[int, int]:
    """Return which row of its episode it is, and how many there are."""
    count = row.get(NUM_SEGMENTS, None)
    return (0, 1) if count is None else (int(row.get(SEGMENT)), int(count))


def num_rows(member: TensorDictBase) -> int:
    """Return how many rows an episode has."""
    earlier = member.get(_EARLIER, None)
    return 1 if earlier is None else 1 + len(list(earlier.keys()))


def rows_of_member(member: TensorDictBase) -> Iterator[TensorDictBase]:
    """The rows of an episode, in order; its last row is as it came."""
    earlier = member.get(_EARLIER, None)
    if earlier is not None:
        member = member.exclude(_EARLIER)
        yield from (earlier.get(str(number)) for number in range(len(list(earlier.keys()))))
    yield member


Waiting = dict[tuple[Hashable, int], dict[int, TensorDictBase]]
"""Rows that wait for the others of their episode, by group and episode and by their number."""


def member_of(group: Hashable, row: TensorDictBase, waiting: Waiting) -> TensorDictBase | None:
    """A row for the whole episode of a row, once all of its rows are there."""
    segment, count = row_place(row)
    if count == 1:
        return row
    episode = int(row.get(EPISODE_ID))
    rows = waiting.setdefault((group, episode), {})
    if segment in rows:
        raise ValueError(f"Row {segment} of episode {episode} in group {group!r} came twice.")
    rows[segment] = row
    if len(rows) < count:
        return None
    del waiting[group, episode]
    member = rows[count - 1].copy()
    for number in range(count - 1):
        member.set((_EARLIER, str(number)), rows[number])
    return member

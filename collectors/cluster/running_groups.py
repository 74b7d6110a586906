"""The groups that a collector runs, and how many it may."""

import asyncio
import math

from collectors.ledger.reasons import LOAD
from collectors.streaming.group_runner import Group


class RunningGroups:
    """Counts groups, and gives the youngest back where they are too many; for one event loop."""

    def __init__(self) -> None:
        self._groups: list[Group] = []  # the oldest first
        self._most: float = math.inf
        self._changed = asyncio.Event()
        self.num_ended = 0
        """Groups whose episodes have all run to their ends."""

    @property
    def num_running(self) -> int:
        """Groups whose episodes are not all over."""
        return len(self._groups)

    async def wait_for_room(self) -> None:
        """Until another group may run."""
        while self.num_running >= self._most:
            self._changed.clear()
            await self._changed.wait()

    def limit_groups(self, most: int) -> None:
        """Let at most so many groups run; the youngest of those that do are cancelled.

        Args:
            most: at least 1.
        """
        self._most = most
        for group in self._groups[most:]:
            group.cancel(LOAD)
        self._changed.set()

    def add(self, group: Group) -> None:
        """It begins to run."""
        self._groups.append(group)

    def note_end(self, group: Group) -> None:
        """An episode of a group is over, or was cancelled."""
        group.num_open -= 1
        if not group.num_open:
            self.num_ended += not group.cancelled_for
            self.remove(group)

    def remove(self, group: Group) -> None:
        """It runs no more, if it did."""
        # By identity: equality would compare rows.
        self._groups = [each for each in self._groups if each is not group]
        self._changed.set()

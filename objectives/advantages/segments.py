"""Episodes of several rows: one member of their group, one advantage for all their rows.

An episode has several rows where its past was rewritten (a summary, dropped reasoning). They come
with ``episode_id``, ``segment`` and ``num_segments``. The last row stands for the episode; the
others travel inside it until the group is complete.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final

from tensordict import TensorDictBase

from torchrl_data.keys import EPISODE_ID, NUM_SEGMENTS, SEGMENT
from torchrl_data.layout.row_state import row_from_state, row_state

_EARLIER: Final = "earlier_segments"


def place_of(row: TensorDictBase) -> tuple[int, int]:
    """Which row of its episode it is, and how many there are."""
    count = row.get(NUM_SEGMENTS, None)
    return (0, 1) if count is None else (int(row.get(SEGMENT)), int(count))


def num_rows(member: TensorDictBase) -> int:
    """How many rows an episode has."""
    earlier = member.get(_EARLIER, None)
    return 1 if earlier is None else 1 + len(list(earlier.keys()))


def rows_of(member: TensorDictBase) -> Iterator[TensorDictBase]:
    """The rows of an episode, in order; its last row is as it came."""
    earlier = member.get(_EARLIER, None)
    if earlier is not None:
        member = member.exclude(_EARLIER)
        yield from (earlier.get(str(number)) for number in range(len(list(earlier.keys()))))
    yield member


class SegmentQueue:
    """Rows of episodes that wait for the other rows of their episode."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[Hashable, int], dict[int, TensorDictBase]] = {}

    @property
    def num_rows(self) -> int:
        """Rows that wait."""
        return sum(map(len, self._waiting.values()))

    def add(self, group: Hashable, row: TensorDictBase) -> TensorDictBase | None:
        """Add a row."""
        # Gives one row for the whole episode once all are there, else `None`.
        segment, count = place_of(row)
        if count == 1:
            return row
        episode = int(row.get(EPISODE_ID))
        rows = self._waiting.setdefault((group, episode), {})
        if segment in rows:
            raise ValueError(
                f"MCAdvantage: row {segment} of episode {episode} in group {group!r} came twice."
            )
        rows[segment] = row
        if len(rows) < count:
            return None
        del self._waiting[group, episode]
        member = rows[count - 1].copy()
        for number in range(count - 1):
            member.set((_EARLIER, str(number)), rows[number])
        return member

    def copy(self) -> "SegmentQueue":
        """The same rows, waiting."""
        copy = SegmentQueue()
        copy._waiting = {key: dict(rows) for key, rows in self._waiting.items()}
        return copy

    def state(self) -> list[dict[str, Any]]:
        """The rows that wait, with their place: what JSON can hold, and tensors."""
        return [
            {"group": group, "episode": episode, "segment": segment, "row": row_state(row)}
            for (group, episode), rows in self._waiting.items()
            for segment, row in rows.items()
        ]

    def load_state(self, state: Sequence[dict[str, Any]]) -> None:
        """Go back to what :meth:`state` gave."""
        self._waiting = {}
        for item in state:
            rows = self._waiting.setdefault((item["group"], item["episode"]), {})
            rows[item["segment"]] = row_from_state(item["row"])

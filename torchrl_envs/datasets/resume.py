"""Which groups were drawn and which of them have ended: where a resumed run goes on."""

from typing import Any, Final

Place = tuple[int, int]
"""Epoch, and place in the order of the epoch."""
COUNTS: Final = ("drawn", "ended", "abandoned")


class Frontier:
    """Follows the groups that are under way, and counts rollouts."""

    # `drawn == ended + abandoned + in flight` holds after every event.

    def __init__(self) -> None:
        self._open: dict[Place, int] = {}
        self._ended_after: set[Place] = set()
        self._last: Place = (-1, -1)
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)

    @property
    def num_in_flight(self) -> int:
        """Rollouts that were drawn and have neither ended nor been abandoned."""
        return self.counts["drawn"] - self.counts["ended"] - self.counts["abandoned"]

    def open(self, place: Place, size: int) -> None:
        """A group was drawn, of as many rollouts."""
        self._open[place] = size
        self._last = max(self._last, place)

    def draw(self) -> None:
        """A rollout of an open group begins."""
        self.counts["drawn"] += 1

    def close(self, place: Place, how: str) -> None:
        """A rollout is over: ``"ended"``, or ``"abandoned"`` by a reset before its end."""
        self.counts[how] += 1
        self._open[place] -= 1
        if not self._open[place]:
            del self._open[place]
            self._ended_after.add(place)
            first = min(self._open, default=self._last)
            self._ended_after = {p for p in self._ended_after if p > first}

    def has_ended(self, place: Place) -> bool:
        """Whether a group after the frontier is done, here or before the state was saved."""
        return place in self._ended_after

    def state(self, next_place: Place) -> dict[str, Any]:
        """What a resumed run needs: it draws again what was under way, and nothing that ended."""
        counts = {**self.counts, "drawn": self.counts["drawn"] - self.num_in_flight}
        return {
            "next": list(min(self._open, default=next_place)),
            "ended_after": sorted(map(list, self._ended_after)),
            "counts": counts,
        }

    def load(self, state: dict[str, Any]) -> Place:
        """Take a state over; gives the place to go on from."""
        self._open = {}
        self._last = (-1, -1)
        self._ended_after = {(int(epoch), int(place)) for epoch, place in state["ended_after"]}
        self.counts = {name: int(state["counts"][name]) for name in COUNTS}
        epoch, place = state["next"]
        return int(epoch), int(place)

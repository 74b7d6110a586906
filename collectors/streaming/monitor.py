"""What a streaming collection was like: waiting, queues, the time split, and a verdict."""

import time
from collections.abc import Mapping

from collectors.ledger import GroupLedger

from .load_follower import LoadFollower
from .producer import Producer
from .trace import Timeline


class Monitor:
    """Counts what the trainer and the episodes did with their time.

    Args:
        producer: of the episodes.
        ledger: its metrics are among those here.
        timeline: of both.
        follower: of the engine's load, if it is followed.
    """

    def __init__(
        self,
        producer: Producer,
        ledger: GroupLedger,
        timeline: Timeline,
        follower: LoadFollower | None = None,
    ) -> None:
        self._follower = follower
        self._producer = producer
        self._ledger = ledger
        self._timeline = timeline
        self._wait_s = 0.0
        self._num_queued = 0
        self._since = time.monotonic()

    def taken(self, begin_s: float, end_s: float, num_queued: int) -> None:
        """The trainer has got its groups.

        Args:
            begin_s: when it asked for them.
            end_s: when it had them.
            num_queued: finished groups that were left.
        """
        self._wait_s += end_s - begin_s
        self._num_queued = num_queued
        self._timeline.add("wait for rollouts", "trainer", 0, begin_s, end_s)

    def metrics(self) -> dict[str, float]:
        """See :meth:`StreamingCollector.metrics`."""
        now = time.monotonic()
        elapsed, self._since = now - self._since, now
        waited, self._wait_s = self._wait_s, 0.0
        seconds = self._timeline.take_totals()
        generated = seconds.get("generate", 0.0)
        with self._producer.changed:
            ledger = {f"ledger/{name}": value for name, value in self._ledger.metrics().items()}
        followed = {} if self._follower is None else self._follower.metrics()
        return (
            ledger
            | followed
            | {
                "collect/trainer_wait_fraction": waited / elapsed if elapsed else 0.0,
                "collect/queued_groups": float(self._num_queued),
                "collect/open_episodes": float(self._producer.num_open),
                "collect/generate_s": generated,
                "collect/environment_s": seconds.get("episode", 0.0) - generated,
                "collect/score_s": seconds.get("score", 0.0),
            }
        )


def verdict(metrics: Mapping[str, float]) -> str:
    """What the speed of a run depends on.

    Args:
        metrics: what :meth:`StreamingCollector.metrics` gave.

    Returns:
        ``"generation-bound"``: the trainer waits for rollouts; ``"trainer-bound"``: finished groups
        wait for the trainer; ``"balanced"``: neither.
    """
    if metrics["collect/trainer_wait_fraction"] > 0.1:
        return "generation-bound"
    return "trainer-bound" if metrics["collect/queued_groups"] > 0 else "balanced"

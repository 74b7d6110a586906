"""Lets as many groups run as an engine has room for."""

import asyncio
from typing import Any, cast

from collectors.ledger import GroupLedger
from torchrl_modules.engines.load import TellsLoad, tells_load
from torchrl_modules.engines.protocol import EngineDied

from .checks import WHO
from .load_cap import GroupCap, LoadCap
from .producer import Producer


class LoadFollower:
    """Looks at an engine again and again, and tells the producer how many groups may run.

    Args:
        engine: tells its load.
        cap: what follows from that.
        interval_s: between two looks.
    """

    def __init__(self, engine: Any, cap: GroupCap, interval_s: float) -> None:
        self._engine = engine
        self._cap = cap
        self._interval_s = interval_s

    async def run(self, producer: Producer) -> None:
        """Follow until it is cancelled."""
        while True:
            producer.limit_groups(self._cap.num_groups)
            await asyncio.sleep(self._interval_s)
            try:
                load = await cast("TellsLoad", self._engine).measure_load()
            except (EngineDied, ConnectionError):
                continue  # Its requests hear of it.
            running, ended = producer.num_running, producer.num_ended
            self._cap.observe(load, running, ended, self._engine.version)

    def metrics(self) -> dict[str, float]:
        """How it is now."""
        return {
            "collect/max_groups": float(self._cap.num_groups),
            "collect/cache_use": self._cap.load.cache_use,
            "collect/preemptions": float(self._cap.load.num_preemptions),
        }


def follower_of(
    engine: Any, ledger: GroupLedger, max_inflight_tasks: int | LoadCap
) -> LoadFollower | None:
    """What follows the load of an engine; ``None`` where that is not asked for.

    Args:
        engine: draws.
        ledger: admits groups.
        max_inflight_tasks: a number is kept whatever the load.

    Raises:
        ValueError: the engine can't tell its load, or all episodes are drawn at once.
    """
    if not isinstance(max_inflight_tasks, LoadCap):
        return None
    if ledger.is_on_policy:
        raise ValueError(
            f"{WHO}: on policy all episodes of a step are drawn in one batch, so "
            f"{max_inflight_tasks} can't be kept. Leave it out, or allow some staleness."
        )
    if not tells_load(engine):
        raise ValueError(
            f"{WHO}: {type(engine).__name__} does not tell how full its cache is, so LoadCap can't "
            "follow it (AsyncVLLMEngine and vLLM servers do). Give max_inflight_tasks a number."
        )
    cap = GroupCap(max_inflight_tasks, ledger.num_slots)
    return LoadFollower(engine, cap, max_inflight_tasks.interval_s)

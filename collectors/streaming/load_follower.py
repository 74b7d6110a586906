"""Lets as many groups run as an engine has room for."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from torchrl_modules.engines.load import TellsLoad, tells_load
from torchrl_modules.engines.protocol import EngineDied

from .checks import WHO
from .load_cap import GroupCap, LoadCap


class RunsGroups(Protocol):
    """What is told how many groups may run."""

    @property
    def num_running(self) -> int:
        """Groups whose episodes are not all over."""
        ...

    @property
    def num_ended(self) -> int:
        """Groups whose episodes have all run to their ends, ever."""
        ...

    def limit_groups(self, most: int) -> None:
        """Let at most so many groups run; the youngest of those that do are given back."""
        ...


class LoadFollower:
    """Looks at an engine again and again, and tells who runs groups how many may run.

    Args:
        engine: tells its load.
        cap: what follows from that.
        interval_s: between two looks.
    """

    def __init__(self, engine: Any, cap: GroupCap, interval_s: float) -> None:
        self._engine = engine
        self._cap = cap
        self._interval_s = interval_s

    async def run(self, groups: RunsGroups) -> None:
        """Follow until it is cancelled."""
        while True:
            groups.limit_groups(self._cap.num_groups)
            await asyncio.sleep(self._interval_s)
            try:
                load = await cast("TellsLoad", self._engine).measure_load()
            except (EngineDied, ConnectionError):
                continue  # Its requests hear of it.
            self._cap.observe(load, groups.num_running, groups.num_ended, self._engine.version)

    def metrics(self) -> dict[str, float]:
        """How it is now."""
        return {
            "collect/max_groups": float(self._cap.num_groups),
            "collect/cache_use": self._cap.load.cache_use,
            "collect/preemptions": float(self._cap.load.num_preemptions),
        }


def together(loads: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What followers of several engines tell, as one; empty where there is none.

    Args:
        loads: of each, see :meth:`LoadFollower.metrics`.
    """
    reduced = {"max_groups": sum, "cache_use": max, "preemptions": sum}
    names = [(f"collect/{name}", of) for name, of in reduced.items() if loads]
    return {name: float(of([load[name] for load in loads])) for name, of in names}


def follower_of(
    engine: Any, most: int, max_inflight_tasks: int | LoadCap, *, who: str = WHO
) -> LoadFollower | None:
    """What follows the load of an engine; ``None`` where that is not asked for.

    Args:
        engine: draws.
        most: groups that run at once.
        max_inflight_tasks: a number is kept whatever the load.
        who: asks.

    Raises:
        ValueError: the engine can't tell its load.
    """
    if not isinstance(max_inflight_tasks, LoadCap):
        return None
    if not tells_load(engine):
        raise ValueError(
            f"{who}: {type(engine).__name__} does not tell how full its cache is, so LoadCap can't "
            "follow it (AsyncVLLMEngine and vLLM servers do). Give max_inflight_tasks a number."
        )
    cap = GroupCap(max_inflight_tasks, most)
    return LoadFollower(engine, cap, max_inflight_tasks.interval_s)

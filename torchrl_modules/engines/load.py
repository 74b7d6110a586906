"""How full an engine is, for who decides how much is asked of it."""

from typing import Any, NamedTuple, Protocol


class EngineLoad(NamedTuple):
    """How full an engine is, as its ``measure_load()`` tells, where ``tells_load`` is true."""

    cache_use: float
    """Fraction of its cache of keys and values that requests in flight hold, from 0 to 1."""
    num_preemptions: int
    """How often, ever, a request was put off because the cache was full, to be read again."""


class TellsLoad(Protocol):
    """An engine that can tell how full it is."""

    async def measure_load(self) -> EngineLoad:
        """How full it is now.

        Raises:
            EngineDied: the engine is gone or stuck.
            ConnectionError: it did not answer.
            RuntimeError: it is closed.
        """
        ...


def tells_load(engine: Any) -> bool:
    """Whether an engine can tell how full it is; of a server, it is asked."""
    return bool(getattr(engine, "tells_load", False))

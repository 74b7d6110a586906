"""How full an engine is, for who decides how much is asked of it."""

from typing import Any, Final, NamedTuple, Protocol

_CACHE_USE: Final = "vllm:kv_cache_usage_perc"
_PREEMPTIONS: Final = "vllm:num_preemptions_total"


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


def read_load(text: str) -> EngineLoad | None:
    r"""What the metrics of a vLLM server tell of its load, of all its engines; or ``None``.

    Example:
        >>> read_load("vllm:kv_cache_usage_perc{a=1} 0.5\nvllm:num_preemptions_total 3.0")
        EngineLoad(cache_use=0.5, num_preemptions=3)
    """
    uses, preemptions = (
        [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)]
        for name in (_CACHE_USE, _PREEMPTIONS)
    )
    if not (uses and preemptions):
        return None
    return EngineLoad(max(uses), int(sum(preemptions)))

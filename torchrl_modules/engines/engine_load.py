"""Load of an engine, as it tells it itself or in vLLM's metrics."""

from typing import Any, Final

from .engine import EngineLoad

_CACHE_USE: Final = "vllm:kv_cache_usage_perc"
_PREEMPTIONS: Final = "vllm:num_preemptions_total"


def tells_load(engine: Any) -> bool:
    """Return whether an engine can tell how full it is; of a server, it is asked."""
    return bool(getattr(engine, "tells_load", False))


def read_load(text: str) -> EngineLoad | None:
    r"""Return what the metrics of a vLLM server tell of its load, of all its engines; or ``None``.

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

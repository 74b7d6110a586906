"""Load of an engine, as it tells it itself or in the metrics of its server."""

from typing import Any, Final

from .engine import EngineLoad

_VLLM: Final = ("vllm:kv_cache_usage_perc", "vllm:num_preemptions_total")


def tells_load(engine: Any) -> bool:
    """Return whether an engine can tell how full it is; of a server, it is asked."""
    return bool(getattr(engine, "tells_load", False))


def read_load(
    text: str, names: tuple[str, str] = _VLLM, *, counts_late: bool = False
) -> EngineLoad | None:
    r"""Return what the metrics of a server tell of its load, of all its engines; or ``None``.

    Args:
        text: the metrics.
        names: with which the lines begin of the share of the cache that is in use, and of the
            requests that were put off; vLLM's.
        counts_late: the server says nothing of the latter until there is one.

    Example:
        >>> read_load("vllm:kv_cache_usage_perc{a=1} 0.5\nvllm:num_preemptions_total 3.0")
        EngineLoad(cache_use=0.5, num_preemptions=3)
    """
    uses, preemptions = (
        [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)]
        for name in names
    )
    if not (uses and (preemptions or counts_late)):
        return None
    return EngineLoad(max(uses), int(sum(preemptions)))

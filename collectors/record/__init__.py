"""The record of a run: rollouts, groups and metrics of each step, and what shows them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .recorder import RolloutRecorder
    from .samples import (
        GroupSummary,
        RecordedToolCall,
        RolloutSample,
        RunRecord,
        SampleTokens,
        StepSummary,
        TokenSpan,
    )
    from .view import write_html

_HOMES = {
    "GroupSummary": ".samples",
    "RecordedToolCall": ".samples",
    "RolloutRecorder": ".recorder",
    "RolloutSample": ".samples",
    "RunRecord": ".samples",
    "SampleTokens": ".samples",
    "StepSummary": ".samples",
    "TokenSpan": ".samples",
    "write_html": ".view",
}

__all__ = [
    "GroupSummary",
    "RecordedToolCall",
    "RolloutRecorder",
    "RolloutSample",
    "RunRecord",
    "SampleTokens",
    "StepSummary",
    "TokenSpan",
    "write_html",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)

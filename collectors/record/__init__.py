"""The record of a run: rollouts, groups and metrics of each step, and what shows them."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

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

__getattr__ = lazy_names(__name__, __file__)

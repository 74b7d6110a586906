"""The record of a run: rollouts, groups and metrics of each step, and what shows them."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from .html import write_html as write_html
    from .preference_pair import LeftOut as LeftOut
    from .preference_pair import PairsFound as PairsFound
    from .preference_pair import PreferencePair as PreferencePair
    from .preference_pair import preference_pairs as preference_pairs
    from .recorder import RolloutRecorder as RolloutRecorder
    from .run_record import RunRecord as RunRecord
    from .samples import GroupSummary as GroupSummary
    from .samples import RecordedToolCall as RecordedToolCall
    from .samples import RolloutSample as RolloutSample
    from .samples import SampleTokens as SampleTokens
    from .samples import StepSummary as StepSummary
    from .samples import TokenSpan as TokenSpan


__getattr__ = lazy_names(__name__, __file__)

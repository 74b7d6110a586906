"""The record of a run: rollouts, groups and metrics of each step, and what shows them."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from .html import write_html as write_html
    from .recorder import RolloutRecorder as RolloutRecorder
    from .rollout_label import LabelledRollout as LabelledRollout
    from .rollout_label import LabelsFound as LabelsFound
    from .rollout_label import labelled_rollouts as labelled_rollouts
    from .rollout_pair import LeftOut as LeftOut
    from .rollout_pair import PairsFound as PairsFound
    from .rollout_pair import RolloutPair as RolloutPair
    from .rollout_pair import preference_pairs as preference_pairs
    from .run_record import RunRecord as RunRecord
    from .samples import GroupSummary as GroupSummary
    from .samples import RecordedToolCall as RecordedToolCall
    from .samples import RolloutSample as RolloutSample
    from .samples import SampleTokens as SampleTokens
    from .samples import StepSummary as StepSummary
    from .samples import TokenSpan as TokenSpan


__getattr__ = lazy_names(__name__, __file__)

"""Losses and advantages for language models: the GRPO family, fine-tuning, distillation.

The arithmetic is in :mod:`objectives.functional`, which needs nothing but torch; the modules here
read a batch, score its tokens, and call it. Names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .advantage_estimators import (
        AdvantageEstimator,
        DecoupledSources,
        GroupMean,
        LeaveOneOut,
        PassAtK,
    )
    from .distillation import DistillationLoss
    from .group_queue import GroupQueue
    from .grpo import GRPOLoss
    from .keys import DistillationLossKeys, GRPOLossKeys, SFTLossKeys
    from .mc_advantage import MCAdvantage
    from .non_finite_gate import NonFiniteGate, NonFiniteStepError, StepOutcome
    from .outputs import DistillationLossOutput, GRPOLossOutput, SFTLossOutput
    from .packed_batch import MaskingStrategy, PackedBatch
    from .parts import (
        CispoSurrogate,
        ClippedSurrogate,
        GmpoSurrogate,
        SamplerCorrection,
        SapoSurrogate,
        TokenFilters,
        VespoSurrogate,
    )
    from .presets import (
        BNPO,
        CISPO,
        DAPO,
        GMPO,
        GRPO,
        GSPO,
        LUSPO,
        SAPO,
        VESPO,
        CISPOLoss,
        DrGRPO,
    )
    from .ray_mc_advantage import RayMCAdvantage
    from .sft import SFTLoss
    from .top_k import TopKRewardSelector
    from .window import Window

_HOME = {
    "AdvantageEstimator": "advantage_estimators",
    "DecoupledSources": "advantage_estimators",
    "GroupMean": "advantage_estimators",
    "LeaveOneOut": "advantage_estimators",
    "PassAtK": "advantage_estimators",
    "BNPO": "presets",
    "CISPO": "presets",
    "CISPOLoss": "presets",
    "CispoSurrogate": "parts",
    "ClippedSurrogate": "parts",
    "DAPO": "presets",
    "DistillationLoss": "distillation",
    "DistillationLossKeys": "keys",
    "DistillationLossOutput": "outputs",
    "DrGRPO": "presets",
    "GMPO": "presets",
    "GRPO": "presets",
    "GRPOLoss": "grpo",
    "GRPOLossKeys": "keys",
    "GRPOLossOutput": "outputs",
    "GSPO": "presets",
    "GmpoSurrogate": "parts",
    "GroupQueue": "group_queue",
    "LUSPO": "presets",
    "MCAdvantage": "mc_advantage",
    "MaskingStrategy": "packed_batch",
    "NonFiniteGate": "non_finite_gate",
    "NonFiniteStepError": "non_finite_gate",
    "StepOutcome": "non_finite_gate",
    "PackedBatch": "packed_batch",
    "RayMCAdvantage": "ray_mc_advantage",
    "SAPO": "presets",
    "SFTLoss": "sft",
    "SFTLossKeys": "keys",
    "SFTLossOutput": "outputs",
    "SamplerCorrection": "parts",
    "SapoSurrogate": "parts",
    "TokenFilters": "parts",
    "TopKRewardSelector": "top_k",
    "VESPO": "presets",
    "VespoSurrogate": "parts",
    "Window": "window",
}

__all__ = [
    "BNPO",
    "CISPO",
    "DAPO",
    "GMPO",
    "GRPO",
    "GSPO",
    "LUSPO",
    "SAPO",
    "VESPO",
    "AdvantageEstimator",
    "CISPOLoss",
    "CispoSurrogate",
    "ClippedSurrogate",
    "DecoupledSources",
    "DistillationLoss",
    "DistillationLossKeys",
    "DistillationLossOutput",
    "DrGRPO",
    "GRPOLoss",
    "GRPOLossKeys",
    "GRPOLossOutput",
    "GmpoSurrogate",
    "GroupMean",
    "GroupQueue",
    "LeaveOneOut",
    "MCAdvantage",
    "MaskingStrategy",
    "NonFiniteGate",
    "NonFiniteStepError",
    "PackedBatch",
    "PassAtK",
    "RayMCAdvantage",
    "SFTLoss",
    "SFTLossKeys",
    "SFTLossOutput",
    "SamplerCorrection",
    "SapoSurrogate",
    "StepOutcome",
    "TokenFilters",
    "TopKRewardSelector",
    "VespoSurrogate",
    "Window",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'objectives' has no attribute {name!r}; it has {__all__}.")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__

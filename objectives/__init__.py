"""Losses and advantages for language models: the GRPO family, fine-tuning, distillation.

The arithmetic is in :mod:`objectives.functional`, which needs nothing but torch; the modules here
read a batch, score its tokens, and call it. Names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from objectives.losses.base import Window

    from .advantages.estimators import (
        AdvantageEstimator,
        DecoupledSources,
        GroupMean,
        GroupQueue,
        LeaveOneOut,
        LengthPenalty,
        MaxRL,
        PassAtK,
        RoleBaseline,
    )
    from .advantages.mc_advantage import MCAdvantage, RayMCAdvantage, TopKRewardSelector
    from .batching.non_finite_gate import NonFiniteGate, NonFiniteStepError, StepOutcome
    from .batching.packed_batch import (
        DistillationLossKeys,
        GRPOLossKeys,
        MaskingStrategy,
        PackedBatch,
        SFTLossKeys,
        write_streams,
    )
    from .batching.ranks import RankFailedError, Ranks
    from .losses.base import DistillationLossOutput, GRPOLossOutput, SFTLossOutput
    from .losses.grpo import (
        BNPO,
        CISPO,
        DAPO,
        DPPO,
        GMPO,
        GRPO,
        GSPO,
        IPO,
        LUSPO,
        SAPO,
        VESPO,
        CISPOLoss,
        DrGRPO,
        GRPOLoss,
        KPop,
        OriginalGRPO,
        PolicyDistillation,
    )
    from .losses.mixed import MixedLoss, MixedLossOutput
    from .losses.options import (
        CispoSurrogate,
        ClippedSurrogate,
        DivergenceSurrogate,
        GmpoSurrogate,
        GRPOOptions,
        SamplerCorrection,
        SapoSurrogate,
        TokenFilters,
        VespoSurrogate,
    )
    from .losses.supervised import DistillationLoss, SFTLoss

__all__ = [
    "BNPO",
    "CISPO",
    "DAPO",
    "DPPO",
    "GMPO",
    "GRPO",
    "GSPO",
    "IPO",
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
    "DivergenceSurrogate",
    "DrGRPO",
    "GRPOLoss",
    "GRPOLossKeys",
    "GRPOLossOutput",
    "GRPOOptions",
    "GmpoSurrogate",
    "GroupMean",
    "GroupQueue",
    "KPop",
    "LeaveOneOut",
    "LengthPenalty",
    "MCAdvantage",
    "MaskingStrategy",
    "MaxRL",
    "MixedLoss",
    "MixedLossOutput",
    "NonFiniteGate",
    "NonFiniteStepError",
    "OriginalGRPO",
    "PackedBatch",
    "PassAtK",
    "PolicyDistillation",
    "RankFailedError",
    "Ranks",
    "RayMCAdvantage",
    "RoleBaseline",
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
    "write_streams",
]


def __getattr__(name: str) -> Any:  # `objectives.functional` needs nothing of ours
    return import_module("torchrl_data").lazy_names(__name__, __file__)(name)


def __dir__() -> list[str]:
    return __all__

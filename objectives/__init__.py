"""Losses and advantages for language models: the GRPO family, fine-tuning, distillation.

The arithmetic is in :mod:`objectives.functional`, which needs nothing but torch; the modules here
read a batch, score its tokens, and call it. Names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from objectives.losses.base import Window

    from .advantages.estimators import (
        AdvantageEstimator,
        DecoupledSources,
        GroupMean,
        LeaveOneOut,
        LengthPenalty,
        MaxRL,
        PassAtK,
        RoleBaseline,
    )
    from .advantages.group_queue import GroupQueue
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

_HOME = {
    "AdvantageEstimator": "advantages.estimators",
    "DecoupledSources": "advantages.estimators",
    "GroupMean": "advantages.estimators",
    "LeaveOneOut": "advantages.estimators",
    "PassAtK": "advantages.estimators",
    "RankFailedError": "batching.ranks",
    "Ranks": "batching.ranks",
    "BNPO": "losses.grpo",
    "CISPO": "losses.grpo",
    "CISPOLoss": "losses.grpo",
    "CispoSurrogate": "losses.options",
    "ClippedSurrogate": "losses.options",
    "DAPO": "losses.grpo",
    "DistillationLoss": "losses.supervised",
    "DistillationLossKeys": "batching.packed_batch",
    "DistillationLossOutput": "losses.base",
    "DPPO": "losses.grpo",
    "DivergenceSurrogate": "losses.options",
    "DrGRPO": "losses.grpo",
    "IPO": "losses.grpo",
    "KPop": "losses.grpo",
    "PolicyDistillation": "losses.grpo",
    "GMPO": "losses.grpo",
    "GRPO": "losses.grpo",
    "GRPOLoss": "losses.grpo",
    "GRPOLossKeys": "batching.packed_batch",
    "GRPOOptions": "losses.options",
    "OriginalGRPO": "losses.grpo",
    "GRPOLossOutput": "losses.base",
    "GSPO": "losses.grpo",
    "GmpoSurrogate": "losses.options",
    "GroupQueue": "advantages.group_queue",
    "LUSPO": "losses.grpo",
    "LengthPenalty": "advantages.estimators",
    "MaxRL": "advantages.estimators",
    "RoleBaseline": "advantages.estimators",
    "MCAdvantage": "advantages.mc_advantage",
    "MixedLoss": "losses.mixed",
    "MixedLossOutput": "losses.mixed",
    "write_streams": "batching.packed_batch",
    "MaskingStrategy": "batching.packed_batch",
    "NonFiniteGate": "batching.non_finite_gate",
    "NonFiniteStepError": "batching.non_finite_gate",
    "StepOutcome": "batching.non_finite_gate",
    "PackedBatch": "batching.packed_batch",
    "RayMCAdvantage": "advantages.mc_advantage",
    "SAPO": "losses.grpo",
    "SFTLoss": "losses.supervised",
    "SFTLossKeys": "batching.packed_batch",
    "SFTLossOutput": "losses.base",
    "SamplerCorrection": "losses.options",
    "SapoSurrogate": "losses.options",
    "TokenFilters": "losses.options",
    "TopKRewardSelector": "advantages.mc_advantage",
    "VESPO": "losses.grpo",
    "VespoSurrogate": "losses.options",
    "Window": "losses.base",
}

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


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("torchrl_data").__version__
    if name not in _HOME:
        raise AttributeError(f"module 'objectives' has no attribute {name!r}; it has {__all__}.")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return import_module("torchrl_data.checks").knows_torchrl(value)


def __dir__() -> list[str]:
    return __all__

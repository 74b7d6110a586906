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
        MaxRL,
        PassAtK,
    )
    from .advantages.group_queue import GroupQueue
    from .advantages.length_penalty import LengthPenalty
    from .advantages.mc_advantage import MCAdvantage
    from .advantages.ray_mc_advantage import RayMCAdvantage
    from .advantages.role_baseline import RoleBaseline
    from .advantages.top_k import TopKRewardSelector
    from .batching.non_finite_gate import NonFiniteGate, NonFiniteStepError, StepOutcome
    from .batching.packed_batch import MaskingStrategy, PackedBatch
    from .batching.ranks import RankFailedError, Ranks
    from .batching.streams import write_streams
    from .keys import DistillationLossKeys, GRPOLossKeys, SFTLossKeys
    from .losses.distillation import DistillationLoss
    from .losses.grpo import GRPOLoss
    from .losses.grpo_options import GRPOOptions
    from .losses.mixed import MixedLoss, MixedLossOutput
    from .losses.outputs import DistillationLossOutput, GRPOLossOutput, SFTLossOutput
    from .losses.presets import (
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
        KPop,
        OriginalGRPO,
        PolicyDistillation,
    )
    from .losses.sft import SFTLoss
    from .losses.surrogate_options import (
        CispoSurrogate,
        ClippedSurrogate,
        DivergenceSurrogate,
        GmpoSurrogate,
        SamplerCorrection,
        SapoSurrogate,
        TokenFilters,
        VespoSurrogate,
    )

_HOME = {
    "AdvantageEstimator": "advantages.estimators",
    "DecoupledSources": "advantages.estimators",
    "GroupMean": "advantages.estimators",
    "LeaveOneOut": "advantages.estimators",
    "PassAtK": "advantages.estimators",
    "RankFailedError": "batching.ranks",
    "Ranks": "batching.ranks",
    "BNPO": "losses.presets",
    "CISPO": "losses.presets",
    "CISPOLoss": "losses.presets",
    "CispoSurrogate": "losses.surrogate_options",
    "ClippedSurrogate": "losses.surrogate_options",
    "DAPO": "losses.presets",
    "DistillationLoss": "losses.distillation",
    "DistillationLossKeys": "keys",
    "DistillationLossOutput": "losses.outputs",
    "DPPO": "losses.presets",
    "DivergenceSurrogate": "losses.surrogate_options",
    "DrGRPO": "losses.presets",
    "IPO": "losses.presets",
    "KPop": "losses.presets",
    "PolicyDistillation": "losses.presets",
    "GMPO": "losses.presets",
    "GRPO": "losses.presets",
    "GRPOLoss": "losses.grpo",
    "GRPOLossKeys": "keys",
    "GRPOOptions": "losses.grpo_options",
    "OriginalGRPO": "losses.presets",
    "GRPOLossOutput": "losses.outputs",
    "GSPO": "losses.presets",
    "GmpoSurrogate": "losses.surrogate_options",
    "GroupQueue": "advantages.group_queue",
    "LUSPO": "losses.presets",
    "LengthPenalty": "advantages.length_penalty",
    "MaxRL": "advantages.estimators",
    "RoleBaseline": "advantages.role_baseline",
    "MCAdvantage": "advantages.mc_advantage",
    "MixedLoss": "losses.mixed",
    "MixedLossOutput": "losses.mixed",
    "write_streams": "batching.streams",
    "MaskingStrategy": "batching.packed_batch",
    "NonFiniteGate": "batching.non_finite_gate",
    "NonFiniteStepError": "batching.non_finite_gate",
    "StepOutcome": "batching.non_finite_gate",
    "PackedBatch": "batching.packed_batch",
    "RayMCAdvantage": "advantages.ray_mc_advantage",
    "SAPO": "losses.presets",
    "SFTLoss": "losses.sft",
    "SFTLossKeys": "keys",
    "SFTLossOutput": "losses.outputs",
    "SamplerCorrection": "losses.surrogate_options",
    "SapoSurrogate": "losses.surrogate_options",
    "TokenFilters": "losses.surrogate_options",
    "TopKRewardSelector": "advantages.top_k",
    "VESPO": "losses.presets",
    "VespoSurrogate": "losses.surrogate_options",
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
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__

"""Losses and advantages for language models: the GRPO family, fine-tuning, distillation.

The arithmetic is in :mod:`objectives.functional`, which needs nothing but torch; the modules here
read a batch, score its tokens, and call it. Names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from objectives.losses.window import Window as Window

    from . import functional as functional
    from .advantages.baselines import BatchMean as BatchMean
    from .advantages.baselines import SourceMean as SourceMean
    from .advantages.estimators import AdvantageEstimator as AdvantageEstimator
    from .advantages.estimators import DecoupledSources as DecoupledSources
    from .advantages.estimators import GroupMean as GroupMean
    from .advantages.estimators import LeaveOneOut as LeaveOneOut
    from .advantages.estimators import MaxRL as MaxRL
    from .advantages.estimators import PassAtK as PassAtK
    from .advantages.gae import GAE as GAE
    from .advantages.group_queue import GroupQueue as GroupQueue
    from .advantages.group_refill import GroupRefill as GroupRefill
    from .advantages.length_penalty import LengthPenalty as LengthPenalty
    from .advantages.mc_advantage import MCAdvantage as MCAdvantage
    from .advantages.pair_selector import PairSelector as PairSelector
    from .advantages.ray_mc_advantage import RayMCAdvantage as RayMCAdvantage
    from .advantages.role_baseline import RoleBaseline as RoleBaseline
    from .advantages.rollout_tree import RolloutTreeCredit as RolloutTreeCredit
    from .advantages.row_tree import RowTree as RowTree
    from .advantages.top_k_reward_selector import TopKRewardSelector as TopKRewardSelector
    from .advantages.tree_credit import AgentCredit as AgentCredit
    from .advantages.tree_credit import BranchCredit as BranchCredit
    from .advantages.tree_credit import FunctionCredit as FunctionCredit
    from .batching.loss_keys import CriticLossKeys as CriticLossKeys
    from .batching.loss_keys import DistillationLossKeys as DistillationLossKeys
    from .batching.loss_keys import DPOLossKeys as DPOLossKeys
    from .batching.loss_keys import GRPOLossKeys as GRPOLossKeys
    from .batching.loss_keys import KTOLossKeys as KTOLossKeys
    from .batching.loss_keys import PairLossKeys as PairLossKeys
    from .batching.loss_keys import RewardModelLossKeys as RewardModelLossKeys
    from .batching.loss_keys import SFTLossKeys as SFTLossKeys
    from .batching.masking_strategy import MaskingStrategy as MaskingStrategy
    from .batching.non_finite_gate import NonFiniteGate as NonFiniteGate
    from .batching.non_finite_gate import NonFiniteStepError as NonFiniteStepError
    from .batching.non_finite_gate import StepOutcome as StepOutcome
    from .batching.packed_batch import PackedBatch as PackedBatch
    from .batching.ranks import RankFailedError as RankFailedError
    from .batching.ranks import Ranks as Ranks
    from .batching.token_streams import write_streams as write_streams
    from .losses.critic import CriticLoss as CriticLoss
    from .losses.critic import CriticLossOutput as CriticLossOutput
    from .losses.critic import CriticOptions as CriticOptions
    from .losses.distillation import DistillationLoss as DistillationLoss
    from .losses.distillation import DistillationLossOutput as DistillationLossOutput
    from .losses.distillation import DistillationOptions as DistillationOptions
    from .losses.dpo import DPOLoss as DPOLoss
    from .losses.dpo import DPOLossOutput as DPOLossOutput
    from .losses.dpo_options import DPOOptions as DPOOptions
    from .losses.grpo import GRPOLoss as GRPOLoss
    from .losses.grpo import GRPOLossOutput as GRPOLossOutput
    from .losses.grpo_options import GRPOOptions as GRPOOptions
    from .losses.grpo_presets import BNPO as BNPO
    from .losses.grpo_presets import CISPO as CISPO
    from .losses.grpo_presets import DAPO as DAPO
    from .losses.grpo_presets import DPPO as DPPO
    from .losses.grpo_presets import GMPO as GMPO
    from .losses.grpo_presets import GRPO as GRPO
    from .losses.grpo_presets import GSPO as GSPO
    from .losses.grpo_presets import IPO as IPO
    from .losses.grpo_presets import LUSPO as LUSPO
    from .losses.grpo_presets import SAPO as SAPO
    from .losses.grpo_presets import VESPO as VESPO
    from .losses.grpo_presets import CISPOLoss as CISPOLoss
    from .losses.grpo_presets import DrGRPO as DrGRPO
    from .losses.grpo_presets import KPop as KPop
    from .losses.grpo_presets import OriginalGRPO as OriginalGRPO
    from .losses.grpo_presets import PolicyDistillation as PolicyDistillation
    from .losses.kto import KTOLoss as KTOLoss
    from .losses.kto import KTOLossOutput as KTOLossOutput
    from .losses.kto_options import KTOOptions as KTOOptions
    from .losses.mixed import MixedLoss as MixedLoss
    from .losses.mixed import MixedLossOutput as MixedLossOutput
    from .losses.reward_model import RewardModelLoss as RewardModelLoss
    from .losses.reward_model import RewardModelLossOutput as RewardModelLossOutput
    from .losses.reward_model_options import RewardModelOptions as RewardModelOptions
    from .losses.sampler_correction import SamplerCorrection as SamplerCorrection
    from .losses.sft import SFTLoss as SFTLoss
    from .losses.sft import SFTLossOutput as SFTLossOutput
    from .losses.sft import SFTOptions as SFTOptions
    from .losses.surrogates import CispoSurrogate as CispoSurrogate
    from .losses.surrogates import ClippedSurrogate as ClippedSurrogate
    from .losses.surrogates import DivergenceSurrogate as DivergenceSurrogate
    from .losses.surrogates import GmpoSurrogate as GmpoSurrogate
    from .losses.surrogates import SapoSurrogate as SapoSurrogate
    from .losses.surrogates import VespoSurrogate as VespoSurrogate
    from .losses.surrogates import reads as reads
    from .losses.token_filters import TokenFilters as TokenFilters


def __getattr__(name: str) -> Any:  # `objectives.functional` needs nothing of ours
    return import_module("torchrl_data").lazy_names(__name__, __file__)(name)


def __dir__() -> list[str]:
    return __getattr__("__all__")

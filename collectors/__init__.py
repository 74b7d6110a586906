"""Collectors: a policy in an environment fills a replay buffer."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from .checkpoint.files import CheckpointError, CheckpointWarning
    from .checkpoint.reading import Checkpoint
    from .checkpoint.store import CheckpointStore
    from .cluster.collector import RayLLMCollector
    from .cluster.ledger_service import CollectorDied
    from .evaluation import (
        Estimate,
        bootstrap_interval,
        evaluation_estimates,
        majority_at_n,
        mean_at_n,
        pass_at_k,
        pass_hat_k,
    )
    from .ledger.ledger import GroupLedger
    from .ledger.policies import Drop, OnPolicy, Replay, Wait
    from .llm_collector import LLMCollector
    from .metrics import PhaseTimer, StepMetrics, rollout_metrics, update_metrics
    from .resume import CheckpointMismatch, RunState, ShardedModel, ShardedOptimizer, identity_of
    from .rollout_func import RolloutFunctionCollector, generate_rollout_completions
    from .streaming.collector import StreamingCollector
    from .streaming.load import LoadCap
    from .streaming.producer import EvaluationPoint
    from .text_environment import TextEnvironment
    from .weight_update.updaters import InProcessUpdater, WeightUpdater, vLLMUpdater
    from .weight_update.weights import contribute_weights

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointStore",
    "CheckpointWarning",
    "CollectorDied",
    "Drop",
    "Estimate",
    "EvaluationPoint",
    "GroupLedger",
    "InProcessUpdater",
    "LLMCollector",
    "LoadCap",
    "OnPolicy",
    "PhaseTimer",
    "RayLLMCollector",
    "Replay",
    "RolloutFunctionCollector",
    "RunState",
    "ShardedModel",
    "ShardedOptimizer",
    "StepMetrics",
    "StreamingCollector",
    "TextEnvironment",
    "Wait",
    "WeightUpdater",
    "bootstrap_interval",
    "contribute_weights",
    "evaluation_estimates",
    "generate_rollout_completions",
    "identity_of",
    "majority_at_n",
    "mean_at_n",
    "pass_at_k",
    "pass_hat_k",
    "rollout_metrics",
    "update_metrics",
    "vLLMUpdater",
]

__getattr__ = lazy_names(__name__, __file__)

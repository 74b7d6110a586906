"""Collectors: a policy in an environment fills a replay buffer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_HOMES = {
    "CollectorDied": ".cluster.ledger_service",
    "Checkpoint": ".checkpoint.reading",
    "CheckpointError": ".checkpoint.files",
    "CheckpointMismatch": ".resume",
    "CheckpointStore": ".checkpoint.store",
    "CheckpointWarning": ".checkpoint.files",
    "Drop": ".ledger.policies",
    "Estimate": ".evaluation",
    "EvaluationPoint": ".streaming.producer",
    "GroupLedger": ".ledger.ledger",
    "InProcessUpdater": ".weight_update.updaters",
    "LLMCollector": ".llm_collector",
    "LoadCap": ".streaming.load",
    "OnPolicy": ".ledger.policies",
    "PhaseTimer": ".metrics",
    "Replay": ".ledger.policies",
    "RayLLMCollector": ".cluster.collector",
    "RolloutFunctionCollector": ".rollout_func",
    "RunState": ".resume",
    "ShardedModel": ".resume",
    "ShardedOptimizer": ".resume",
    "StepMetrics": ".metrics",
    "StreamingCollector": ".streaming.collector",
    "TextEnvironment": ".text_environment",
    "Wait": ".ledger.policies",
    "WeightUpdater": ".weight_update.updaters",
    "bootstrap_interval": ".evaluation",
    "evaluation_estimates": ".evaluation",
    "contribute_weights": ".weight_update.weights",
    "generate_rollout_completions": ".rollout_func",
    "majority_at_n": ".evaluation",
    "mean_at_n": ".evaluation",
    "pass_at_k": ".evaluation",
    "pass_hat_k": ".evaluation",
    "identity_of": ".resume",
    "rollout_metrics": ".metrics",
    "update_metrics": ".metrics",
    "vLLMUpdater": ".weight_update.updaters",
}

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


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("torchrl_data").__version__
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    return import_module("torchrl_data.checks").knows_torchrl(value)

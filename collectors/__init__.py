"""Collectors: a policy in an environment fills a replay buffer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint.errors import CheckpointError, CheckpointWarning
    from .checkpoint.reading import Checkpoint
    from .checkpoint.store import CheckpointStore
    from .cluster.collector import RayLLMCollector
    from .cluster.door import CollectorDied
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
    from .ledger.policies import Drop, OnPolicy, Wait
    from .ledger.replay import Replay
    from .llm_collector import LLMCollector
    from .metrics import PhaseTimer, StepMetrics, rollout_metrics, update_metrics
    from .resume.identity import CheckpointMismatch, identity_of
    from .resume.run_state import RunState
    from .resume.sharded_parts import ShardedModel, ShardedOptimizer
    from .rollout_func import RolloutFunctionCollector, generate_rollout_completions
    from .streaming.collector import StreamingCollector
    from .streaming.evaluation import EvaluationPoint
    from .streaming.load_cap import LoadCap
    from .text_environment.environment import TextEnvironment
    from .weight_update.in_process import InProcessUpdater
    from .weight_update.interface import WeightUpdater
    from .weight_update.sharded import contribute_weights
    from .weight_update.vllm_updater import vLLMUpdater

_HOMES = {
    "CollectorDied": ".cluster.door",
    "Checkpoint": ".checkpoint.reading",
    "CheckpointError": ".checkpoint.errors",
    "CheckpointMismatch": ".resume.identity",
    "CheckpointStore": ".checkpoint.store",
    "CheckpointWarning": ".checkpoint.errors",
    "Drop": ".ledger.policies",
    "Estimate": ".evaluation",
    "EvaluationPoint": ".streaming.evaluation",
    "GroupLedger": ".ledger.ledger",
    "InProcessUpdater": ".weight_update.in_process",
    "LLMCollector": ".llm_collector",
    "LoadCap": ".streaming.load_cap",
    "OnPolicy": ".ledger.policies",
    "PhaseTimer": ".metrics",
    "Replay": ".ledger.replay",
    "RayLLMCollector": ".cluster.collector",
    "RolloutFunctionCollector": ".rollout_func",
    "RunState": ".resume.run_state",
    "ShardedModel": ".resume.sharded_parts",
    "ShardedOptimizer": ".resume.sharded_parts",
    "StepMetrics": ".metrics",
    "StreamingCollector": ".streaming.collector",
    "TextEnvironment": ".text_environment.environment",
    "Wait": ".ledger.policies",
    "WeightUpdater": ".weight_update.interface",
    "bootstrap_interval": ".evaluation",
    "evaluation_estimates": ".evaluation",
    "contribute_weights": ".weight_update.sharded",
    "generate_rollout_completions": ".rollout_func",
    "majority_at_n": ".evaluation",
    "mean_at_n": ".evaluation",
    "pass_at_k": ".evaluation",
    "pass_hat_k": ".evaluation",
    "identity_of": ".resume.identity",
    "rollout_metrics": ".metrics",
    "update_metrics": ".metrics",
    "vLLMUpdater": ".weight_update.vllm_updater",
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
    return getattr(import_module(_HOMES[name], __name__), name)

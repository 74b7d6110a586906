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

_NAMES = {
    ".checkpoint.files": "CheckpointError CheckpointWarning",
    ".checkpoint.reading": "Checkpoint",
    ".checkpoint.store": "CheckpointStore",
    ".cluster.collector": "RayLLMCollector",
    ".cluster.ledger_service": "CollectorDied",
    ".evaluation": "Estimate bootstrap_interval evaluation_estimates majority_at_n mean_at_n "
    "pass_at_k pass_hat_k",
    ".ledger.ledger": "GroupLedger",
    ".ledger.policies": "Drop OnPolicy Replay Wait",
    ".llm_collector": "LLMCollector",
    ".metrics": "PhaseTimer StepMetrics rollout_metrics update_metrics",
    ".resume": "CheckpointMismatch RunState ShardedModel ShardedOptimizer identity_of",
    ".rollout_func": "RolloutFunctionCollector generate_rollout_completions",
    ".streaming.collector": "StreamingCollector",
    ".streaming.load": "LoadCap",
    ".streaming.producer": "EvaluationPoint",
    ".text_environment": "TextEnvironment",
    ".weight_update.updaters": "InProcessUpdater WeightUpdater vLLMUpdater",
    ".weight_update.weights": "contribute_weights",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

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

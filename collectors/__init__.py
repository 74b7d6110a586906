"""Collectors: a policy in an environment fills a replay buffer."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from .checkpoint.files import CheckpointError as CheckpointError
    from .checkpoint.files import CheckpointWarning as CheckpointWarning
    from .checkpoint.reading import Checkpoint as Checkpoint
    from .checkpoint.store import CheckpointStore as CheckpointStore
    from .cluster.collector import RayLLMCollector as RayLLMCollector
    from .cluster.ledger_service import CollectorDied as CollectorDied
    from .evaluation import Estimate as Estimate
    from .evaluation import bootstrap_interval as bootstrap_interval
    from .evaluation import evaluation_estimates as evaluation_estimates
    from .evaluation import majority_at_n as majority_at_n
    from .evaluation import mean_at_n as mean_at_n
    from .evaluation import pass_at_k as pass_at_k
    from .evaluation import pass_hat_k as pass_hat_k
    from .ledger.ledger import GroupLedger as GroupLedger
    from .ledger.policies import Drop as Drop
    from .ledger.policies import OnPolicy as OnPolicy
    from .ledger.policies import Replay as Replay
    from .ledger.policies import Wait as Wait
    from .llm_collector import LLMCollector as LLMCollector
    from .metrics import PhaseTimer as PhaseTimer
    from .metrics import StepMetrics as StepMetrics
    from .metrics import rollout_metrics as rollout_metrics
    from .metrics import update_metrics as update_metrics
    from .resume import CheckpointMismatch as CheckpointMismatch
    from .resume import RunState as RunState
    from .resume import ShardedModel as ShardedModel
    from .resume import ShardedOptimizer as ShardedOptimizer
    from .resume import identity_of as identity_of
    from .rollout_func import RolloutFunctionCollector as RolloutFunctionCollector
    from .rollout_func import generate_rollout_completions as generate_rollout_completions
    from .streaming.collector import StreamingCollector as StreamingCollector
    from .streaming.load import LoadCap as LoadCap
    from .streaming.producer import EvaluationPoint as EvaluationPoint
    from .text_environment import TextEnvironment as TextEnvironment
    from .weight_update.updaters import InProcessUpdater as InProcessUpdater
    from .weight_update.updaters import WeightUpdater as WeightUpdater
    from .weight_update.updaters import vLLMUpdater as vLLMUpdater
    from .weight_update.weights import contribute_weights as contribute_weights


__getattr__ = lazy_names(__name__, __file__)

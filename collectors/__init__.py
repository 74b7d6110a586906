"""Collectors: a policy in an environment fills a replay buffer."""

from typing import TYPE_CHECKING

from torchrl_data import lazy_names

if TYPE_CHECKING:
    from .checkpoint.checkpoint import Checkpoint as Checkpoint
    from .checkpoint.errors import CheckpointError as CheckpointError
    from .checkpoint.errors import CheckpointWarning as CheckpointWarning
    from .checkpoint.store import CheckpointStore as CheckpointStore
    from .cluster.collector import RayLLMCollector as RayLLMCollector
    from .cluster.ray_door import CollectorDied as CollectorDied
    from .evaluation import Estimate as Estimate
    from .evaluation import bootstrap_interval as bootstrap_interval
    from .evaluation import evaluation_estimates as evaluation_estimates
    from .evaluation import majority_at_n as majority_at_n
    from .evaluation import mean_at_n as mean_at_n
    from .evaluation import pass_at_k as pass_at_k
    from .evaluation import pass_hat_k as pass_hat_k
    from .ledger.ledger import GroupLedger as GroupLedger
    from .ledger.replay import Replay as Replay
    from .ledger.staleness_policies import Drop as Drop
    from .ledger.staleness_policies import OnPolicy as OnPolicy
    from .ledger.staleness_policies import Wait as Wait
    from .llm_collector import LLMCollector as LLMCollector
    from .metrics import StepMetrics as StepMetrics
    from .metrics import rollout_metrics as rollout_metrics
    from .metrics import update_metrics as update_metrics
    from .phase_timer import PhaseTimer as PhaseTimer
    from .resume.identity import CheckpointMismatch as CheckpointMismatch
    from .resume.identity import identity_of as identity_of
    from .resume.run_state import RunState as RunState
    from .resume.sharded import ShardedModel as ShardedModel
    from .resume.sharded import ShardedOptimizer as ShardedOptimizer
    from .rollout_func import RolloutFunctionCollector as RolloutFunctionCollector
    from .rollout_func import generate_rollout_completions as generate_rollout_completions
    from .streaming.collector import StreamingCollector as StreamingCollector
    from .streaming.evaluation_point import EvaluationPoint as EvaluationPoint
    from .streaming.load_cap import LoadCap as LoadCap
    from .text_environment.environment import TextEnvironment as TextEnvironment
    from .weight_update.in_process_updater import InProcessUpdater as InProcessUpdater
    from .weight_update.sharded_weights import contribute_weights as contribute_weights
    from .weight_update.vllm_updater import vLLMUpdater as vLLMUpdater
    from .weight_update.weight_updater import WeightUpdater as WeightUpdater


__getattr__ = lazy_names(__name__, __file__)

"""Rollouts collected in batches between the steps, or beside training."""

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Transform

from collectors import (
    Drop,
    EvaluationPoint,
    LLMCollector,
    LoadCap,
    OnPolicy,
    RayLLMCollector,
    StreamingCollector,
    Wait,
)
from collectors.collector import PostProcessing
from collectors.ledger import StalenessPolicy
from collectors.resume.random_numbers import random_state, set_random_state
from collectors.streaming.background_collector import verdict
from objectives import GroupRefill
from torchrl_data.token_scorer import TokenScorer
from torchrl_envs import DataLoadingPrimer
from torchrl_envs.entries.rewards import reward_of_row
from torchrl_envs.rewards.kl import RetrieveLogProb
from torchrl_envs.tasks.task import TaskEnv
from torchrl_modules import LLMWrapperBase

from .models.vllm_policy import engines_of_collector
from .settings.schema import CollectorConfig, RolloutsConfig, TrainingConfig

_LOG = logging.getLogger("torchrl_agents")
AnyCollector = LLMCollector | StreamingCollector | RayLLMCollector


def staleness_of(cfg: CollectorConfig) -> StalenessPolicy:
    """Return how old tokens may be.

    Raises:
        ValueError: the settings don't go together.
    """
    if cfg.max_staleness == 0 and cfg.recompute:
        return OnPolicy()
    kind = {"wait": Wait, "drop": Drop}[cfg.staleness_policy]
    return kind(cfg.max_staleness, pipeline_depth=cfg.pipeline_depth, recompute=cfg.recompute)


def tasks_of(cfg: CollectorConfig) -> int | LoadCap:
    """Return how many episodes may run at once."""
    return LoadCap(cfg.max_inflight_tasks) if cfg.follow_load else cfg.max_inflight_tasks


def refill_of(cfg: CollectorConfig) -> GroupRefill | None:
    """What asks for other groups in the place of those without a signal, if anything does.

    Raises:
        ValueError: the bound is no whole number of at least 1.
    """
    return GroupRefill(max_draws=cfg.max_draws) if cfg.refill else None


def rollout_buffer(transform: Transform | None = None) -> ReplayBuffer:
    """A buffer of the rollouts of a step, which ``transform`` gives advantages, or selects."""
    # Without a size: a rollout whose past was rewritten is several rows.
    return ReplayBuffer(storage=LazyStackStorage(), transform=transform)


def build_collector(
    cfg: RolloutsConfig,
    env: TaskEnv,
    policy: LLMWrapperBase,
    *,
    transform: Transform | None = None,
    postproc: PostProcessing | None = None,
) -> AnyCollector:
    """The collector and its buffer, as the settings say.

    Args:
        cfg: the settings.
        env: of the rollouts.
        policy: samples.
        transform: of the buffer, see :func:`rollout_buffer`.
        postproc: what is done to rollouts before they go into the buffer.
    """
    settings = cfg.collector
    common: dict[str, Any] = {"replay_buffer": rollout_buffer(transform), "postproc": postproc}
    if settings.mode == "sync":
        return LLMCollector(env, policy, **common)
    common |= {
        "groups_per_step": settings.num_prompts,
        "staleness": staleness_of(settings),
        "max_inflight_tasks": tasks_of(settings),
    }
    if settings.mode == "streaming":
        return StreamingCollector(env, policy, **common)
    return RayLLMCollector(
        env,
        policy=policy,
        policy_factory=engines_of_collector(cfg, policy) if cfg.engine.name == "vllm" else None,
        num_collectors=settings.num_collectors,
        remote_config=settings.remote_config,
        **common,
    )


@dataclass
class HeldOut:
    """Evaluates before, after and every so many steps, then beside training where that goes on.

    Args:
        cfg: how often.
        collector: of the run.
        env: with held-out data.
        policy: what is evaluated, sampled as in training.
    """

    cfg: TrainingConfig
    collector: AnyCollector
    env: TaskEnv
    policy: LLMWrapperBase
    points: list[EvaluationPoint] = field(default_factory=list)
    """Those that are over, and were not given yet."""
    latest: EvaluationPoint | None = None

    def now(self, step: int) -> TensorDictBase:
        """Evaluate, and wait for it; what was evaluated at this very step is given again.

        The random numbers of the training stay where they are.
        """
        if self.latest is not None and self.latest.step == step:
            assert self.latest.trajectories is not None
            return self.latest.trajectories
        if isinstance(self.collector, StreamingCollector):  # which has the point itself
            point = self.collector.evaluate(self.env, wait=True)
            assert point is not None
            assert point.trajectories is not None
            return point.trajectories
        for data in self.env.transforms_of(DataLoadingPrimer):
            data.rewind()
        before = random_state()
        try:
            batches = [*LLMCollector(self.env, self.policy)]
        finally:
            set_random_state(before)
        rows = lazy_stack([row for batch in batches for row in batch.unbind(0)])
        self.latest = EvaluationPoint(step, self.collector.policy_version, rows)
        self.points.append(self.latest)
        return rows

    def after(self, step: int) -> None:
        """A step is over: begin a point if it is time."""
        every = self.cfg.evaluate.every
        if every is None or step % every or step == self.cfg.train.num_steps:
            return
        if isinstance(self.collector, StreamingCollector):
            self.collector.evaluate(self.env)
        else:
            self.now(step)

    def take(self) -> list[EvaluationPoint]:
        """The points that are over, as they ended; given once."""
        points, self.points = self.points, []
        if isinstance(self.collector, StreamingCollector):
            points = self.collector.take_evaluations()
        return points


def end_collection(collector: AnyCollector, folder: Path, last: dict[str, float]) -> None:
    """Stop collecting, and say what became of every group.

    Args:
        collector: of the run.
        folder: of the run; gets ``timeline.json``.
        last: metrics of the last step.
    """
    if isinstance(collector, LLMCollector):
        return
    collector.shutdown()
    if isinstance(collector, StreamingCollector):
        collector.write_trace(folder / "timeline.json")
    _LOG.info("%s", collector.ledger)
    if "collect/trainer_wait_fraction" in last:
        _LOG.info("This run was %s.", verdict(last))


def before_buffer(
    cfg: Any, reference: TokenScorer | None, *first: PostProcessing
) -> PostProcessing | None:
    """Return what is done to rollouts before they go into the buffer, if anything is.

    Args:
        cfg: the settings; with ``train.shuffle_rewards`` the rewards are dealt out at random.
        reference: the model that a KL term compares with, if there is one.
        *first: what comes before these two.
    """
    steps = [*first]
    if cfg.train.shuffle_rewards:
        steps.append(shuffle_rewards)
    if reference is not None:
        steps.append(RetrieveLogProb(reference, temperature=cfg.policy.temperature))

    def apply(trajectories: TensorDictBase) -> TensorDictBase:
        for step in steps:
            trajectories = step(trajectories)
        return trajectories

    return apply if steps else None


def shuffle_rewards(trajectories: TensorDictBase) -> TensorDictBase:
    """Deal the rewards out at random, among the rollouts that have one."""
    rows = [row for row in trajectories.unbind(0) if not math.isnan(reward_of_row(row))]
    rewards = [row["reward"] for row in rows]
    for row, index in zip(rows, torch.randperm(len(rows)).tolist(), strict=True):
        row["reward"] = rewards[index]
    return trajectories

"""How rollouts are collected: in batches between the steps, or beside training."""

import logging
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

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
from collectors.base import PostProcessing
from collectors.ledger import StalenessPolicy
from collectors.resume.random_state import random_state, set_random_state
from collectors.streaming.monitor import verdict
from torchrl_agents.engines.own_engines import OwnEngines
from torchrl_agents.settings.schema import CollectorConfig, RolloutsConfig
from torchrl_envs import DataLoadingPrimer
from torchrl_envs.tasks.task import TaskEnv
from torchrl_modules import LLMWrapperBase

_LOG = logging.getLogger("torchrl_agents")
MODES = ("sync", "streaming", "ray")
AnyCollector = LLMCollector | StreamingCollector | RayLLMCollector
POLICIES = ("wait", "drop")


def staleness_of(cfg: CollectorConfig) -> StalenessPolicy:
    """How old tokens may be.

    Raises:
        ValueError: the settings don't go together.
    """
    if cfg.max_staleness == 0 and cfg.recompute:
        return OnPolicy()
    kind = {"wait": Wait, "drop": Drop}[cfg.staleness_policy]
    depth = cfg.pipeline_depth
    return kind(cfg.max_staleness, pipeline_depth=depth, recompute=cfg.recompute)


def tasks_of(cfg: CollectorConfig) -> int | LoadCap:
    """How many episodes may run at once."""
    return LoadCap(cfg.max_inflight_tasks) if cfg.follow_load else cfg.max_inflight_tasks


def build_collector(
    cfg: RolloutsConfig,
    env: TaskEnv,
    policy: LLMWrapperBase,
    *,
    replay_buffer: ReplayBuffer,
    postproc: PostProcessing | None,
) -> AnyCollector:
    """The collector, as the settings say."""
    settings = cfg.collector
    common: dict[str, Any] = {"replay_buffer": replay_buffer, "postproc": postproc}
    if settings.mode == "sync":
        return LLMCollector(env, policy, **common)
    common |= {
        "groups_per_step": settings.num_prompts,
        "staleness": staleness_of(settings),
        "max_inflight_tasks": tasks_of(settings),
    }
    if settings.mode == "ray":
        return RayLLMCollector(
            env,
            policy=policy,
            policy_factory=OwnEngines.of(cfg, policy) if cfg.engine.name == "vllm" else None,
            num_collectors=settings.num_collectors,
            remote_config=settings.remote_config,
            **common,
        )
    return StreamingCollector(env, policy, **common)


def evaluate(collector: AnyCollector, env: TaskEnv, policy: LLMWrapperBase) -> TensorDictBase:
    """One rollout of each held-out prompt, sampled as in training; now.

    The random numbers of the training stay where they are.
    """
    if isinstance(collector, StreamingCollector):
        point = collector.evaluate(env, wait=True)
        assert point is not None
        assert point.trajectories is not None
        return point.trajectories
    for data in env.transforms_of(DataLoadingPrimer):
        data.rewind()
    before = random_state()
    try:
        return LLMCollector(env, policy).collect()
    finally:
        set_random_state(before)


class HeldOut:
    """Evaluates before, after and every so many steps, then beside training where that goes on.

    Args:
        collector: of the run.
        env: with held-out data.
        policy: what is evaluated.
        every: steps; ``None``: never.
        last: the number of the last step, after which it is evaluated anyway.
    """

    def __init__(
        self,
        collector: AnyCollector,
        env: TaskEnv,
        policy: LLMWrapperBase,
        *,
        every: int | None,
        last: int,
    ) -> None:
        self._collector = collector
        self._env = env
        self._policy = policy
        self._every = every
        self._last = last
        self._points: list[EvaluationPoint] = []
        self._latest: EvaluationPoint | None = None

    def now(self, step: int) -> TensorDictBase:
        """Evaluate, and wait for it; what was evaluated at this very step is given again."""
        if self._latest is not None and self._latest.step == step:
            assert self._latest.trajectories is not None
            return self._latest.trajectories
        rows = evaluate(self._collector, self._env, self._policy)
        if not isinstance(self._collector, StreamingCollector):  # which has the point itself
            self._latest = EvaluationPoint(step, self._collector.policy_version, rows)
            self._points.append(self._latest)
        return rows

    def after(self, step: int) -> None:
        """A step is over: begin a point if it is time."""
        if self._every is None or step % self._every or step == self._last:
            return
        if isinstance(self._collector, StreamingCollector):
            self._collector.evaluate(self._env)
        else:
            self.now(step)

    def take(self) -> list[EvaluationPoint]:
        """The points that are over, as they ended; given once."""
        points, self._points = self._points, []
        if isinstance(self._collector, StreamingCollector):
            points = self._collector.take_evaluations()
        return points


def collection_metrics(collector: AnyCollector) -> dict[str, float]:
    """What collection was like in a step, where it goes on beside training."""
    return {} if isinstance(collector, LLMCollector) else collector.metrics()


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


def shuffle_rewards(trajectories: TensorDictBase) -> TensorDictBase:
    """Deal the rewards out at random."""
    rows = trajectories.unbind(0)
    rewards = [row["reward"] for row in rows]
    for row, index in zip(rows, torch.randperm(len(rows)).tolist(), strict=True):
        row["reward"] = rewards[index]
    return trajectories

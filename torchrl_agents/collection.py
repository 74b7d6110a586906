"""Rollouts collected in batches between the steps, or beside training."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Transform

from collectors import (
    Drop,
    Estimate,
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
from torchrl_envs.tasks.task import Task, TaskEnv
from torchrl_modules import LLMWrapperBase

from .held_out import HeldOut
from .models.vllm_policy import engines_of_collector
from .recorder import scores_of, show_rollouts
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


class HeldOutPrompts(HeldOut):
    """Lets the policy answer held-out prompts, beside training where collection goes on.

    Args:
        cfg: how often, and how the answers are counted.
        collector: of the run.
        env: with held-out data.
        policy: what is tested, sampled as in training.
        task: may have answers.
    """

    score_name = "reward"
    labels = ("training rollouts", "held-out prompts")

    def __init__(
        self,
        cfg: TrainingConfig,
        collector: AnyCollector,
        env: TaskEnv,
        policy: LLMWrapperBase,
        task: Task,
    ) -> None:
        super().__init__(cfg)
        self.collector = collector
        self.env = env
        self.policy = policy
        self._answer = task.final_answer

    def now(self, step: int) -> TensorDictBase:
        """See the base class."""
        if isinstance(self.collector, StreamingCollector):  # which has the point itself
            point = self.collector.evaluate(self.env, wait=True)
            assert point is not None
            assert point.trajectories is not None
            return point.trajectories
        return super().now(step)

    def _test(self, step: int) -> tuple[int, TensorDictBase]:
        """The random numbers of the training stay where they are."""
        del step
        for data in self.env.transforms_of(DataLoadingPrimer):
            data.rewind()
        before = random_state()
        try:
            batches = [*LLMCollector(self.env, self.policy)]
        finally:
            set_random_state(before)
        rows = lazy_stack([row for batch in batches for row in batch.unbind(0)])
        return self.collector.policy_version, rows

    def _begin(self, step: int) -> None:
        if isinstance(self.collector, StreamingCollector):
            self.collector.evaluate(self.env)
        else:
            self.now(step)

    def take(self) -> list[EvaluationPoint]:
        """See the base class."""
        if isinstance(self.collector, StreamingCollector):
            return self.collector.take_evaluations()
        return super().take()

    def score(self, rows: TensorDictBase) -> tuple[dict[str, float], dict[str, Estimate]]:
        """See the base class and :func:`.scores_of`."""
        return scores_of(rows, self.cfg.evaluate, self._answer)

    def caption(self, estimates: Mapping[str, Estimate]) -> str:
        """See the base class."""
        test, count = self.cfg.evaluate, estimates["reward"].num_prompts
        return (
            f"{count} prompts, {test.num_samples} rollout(s) of each; in brackets "
            f"{100 * test.level:g} % intervals over the prompts."
        )

    def identity(self) -> dict[str, Any]:
        """See the base class."""
        return {"held_out_rows": [x.content for x in self.env.transforms_of(DataLoadingPrimer)]}

    def show(self, tests: Mapping[str, TensorDictBase | None]) -> None:
        """See the base class."""
        show_rollouts(tests, self.cfg.evaluate.num_shown)

    def sampled(self, rows: TensorDictBase) -> TensorDictBase:
        """See the base class."""
        return rows


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

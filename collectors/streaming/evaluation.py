"""Evaluation beside training: every token of a point is drawn by one version of the weights."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from concurrent import futures
from typing import NamedTuple

from tensordict import TensorDictBase, lazy_stack

from collectors.composition_checks import check_fit
from torchrl_data.keys import TOKEN_POLICY_VERSION
from torchrl_data.stop_reasons import NO_DATA
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.episode.async_runner import AsyncEpisodeRunner
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_modules.engines.protocol import EngineDied
from torchrl_modules.policies.async_policy import AsyncPolicy

from .group_runner import run_together, scored_rows
from .producer import MAX_DEATHS, Producer
from .trace import Timeline

_log = logging.getLogger(__name__)


class EvaluationPoint(NamedTuple):
    """One evaluation."""

    step: int
    """Of the training when it was asked for."""
    version: int
    """Of the weights that drew every token of it."""
    trajectories: TensorDictBase | None
    """Rows ``[n]`` as a collector gives them; ``None`` where it was skipped."""
    skipped: str = ""
    """Why there are none."""


class Evaluator:
    """Runs the episodes of an environment once, with whatever weights serve.

    Args:
        env: with held-out data.
        policy: takes the turns.

    Raises:
        ValueError: environment and policy don't fit together.
    """

    def __init__(self, env: EpisodeEnv, policy: AsyncPolicy) -> None:
        check_fit(env, policy.policy, who="evaluate")
        self._env = env
        self._policy = policy
        self._runner = AsyncEpisodeRunner(env)
        self._runner.allow(env.batch_size.numel())

    async def run(self, step: int) -> EvaluationPoint:
        """Take the data from their beginning, one batch of the environment.

        Whoever calls it keeps the weights as they are. If the engine dies, all is drawn again.

        Raises:
            RuntimeError: a token was drawn by other weights.
            EngineDied: the engine died each of three times.
        """
        for _ in range(MAX_DEATHS - 1):
            try:
                return await self._run_once(step)
            except EngineDied as died:
                _log.warning("The engine died under an evaluation, which begins again: %s", died)
        return await self._run_once(step)

    async def _run_once(self, step: int) -> EvaluationPoint:
        for data in self._env.transforms_of(DataLoadingPrimer):
            data.rewind()
        version = self._policy.version
        size = self._env.batch_size.numel()
        episodes = await asyncio.to_thread(self._runner.draw, size)
        drawn = [episode for episode in episodes if episode.stop_reason != NO_DATA]
        try:
            await run_together(self._runner.run(episode, self._policy) for episode in drawn)
            further = self._env.reward_entries
            rows = await asyncio.to_thread(scored_rows, self._runner, drawn, further)
        except asyncio.CancelledError:
            self._runner.abandon()
            raise
        finally:
            await asyncio.to_thread(self._runner.give_up, episodes)
        _check_versions(rows, version)
        return EvaluationPoint(step, version, lazy_stack(rows))


class Evaluations:
    """Evaluates beside training, one point at a time.

    Args:
        producer: in whose event loop; it begins no group meanwhile.
        policy: takes the turns.
        timeline: notes how long it takes.
    """

    def __init__(self, producer: Producer, policy: AsyncPolicy, timeline: Timeline) -> None:
        self._producer = producer
        self._policy = policy
        self._timeline = timeline
        self._running: futures.Future[EvaluationPoint] | None = None
        self._points: deque[EvaluationPoint] = deque()

    def ask(self, env: EpisodeEnv, step: int, *, wait: bool) -> EvaluationPoint | None:
        """Evaluate the weights that serve now.

        Args:
            env: with held-out data.
            step: of the training.
            wait: until it is over, and before for one that runs; else this one is skipped then.
        """
        if wait or self._is_idle:
            self._settle()
            evaluator = Evaluator(env, self._policy)
            self._running = self._producer.submit(self._run(evaluator, step))
            return self._settle() if wait else None
        skipped = EvaluationPoint(step, self._policy.version, None, "one was running")
        self._points.append(skipped)
        return skipped

    def take(self) -> list[EvaluationPoint]:
        """The points that are over, as they ended; given once."""
        if self._is_idle:
            self._settle()
        return [self._points.popleft() for _ in range(len(self._points))]

    @property
    def _is_idle(self) -> bool:
        return self._running is None or self._running.done()

    def _settle(self) -> EvaluationPoint | None:
        """Wait for the point that runs; what broke it is raised, once."""
        running = self._running
        if running is None:
            return None
        futures.wait([running])
        self._running = None
        return None if running.cancelled() else running.result()

    async def _run(self, evaluator: Evaluator, step: int) -> EvaluationPoint:
        self._producer.hold()
        try:
            async with self._producer.weights:
                with self._timeline.span("evaluate", "trainer", 2):
                    point = await evaluator.run(step)
        finally:
            self._producer.release()
        self._points.append(point)
        return point


def _check_versions(rows: Sequence[TensorDictBase], version: int) -> None:
    for row in rows:
        drawn = row.get(TOKEN_POLICY_VERSION)
        others = set(drawn[drawn >= 0].tolist()) - {version}
        if others:
            raise RuntimeError(
                f"An evaluation of version {version} has tokens of {sorted(others)}: the weights "
                "were replaced while it ran."
            )

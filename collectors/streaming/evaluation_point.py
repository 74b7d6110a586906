"""Evaluation beside training: every token of a point is drawn by one version of the weights."""

import asyncio
import logging
from contextlib import suppress
from typing import NamedTuple

from tensordict import TensorDictBase, lazy_stack

from torchrl_data.keys import TOKEN_POLICY_VERSION
from torchrl_data.stop_reason import StopReason
from torchrl_envs.datasets.primer import DataExhaustedError, DataLoadingPrimer
from torchrl_envs.episode.async_runner import AsyncEpisodeRunner
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_modules.engines.engine import EngineDied
from torchrl_modules.policies.async_policy import AsyncPolicy

from .group_runner import MAX_DEATHS, run_together, scored_rows

_log = logging.getLogger(__name__)


class EvaluationPoint(NamedTuple):
    """An evaluation."""

    step: int
    """Of the training when it was asked for."""
    version: int
    """Of the weights that drew every token of it."""
    trajectories: TensorDictBase | None
    """Rows ``[n]`` as a collector gives them; ``None`` where it was skipped."""
    skipped: str = ""
    """Why there are none."""


async def draw_point(
    env: EpisodeEnv, runner: AsyncEpisodeRunner, policy: AsyncPolicy, step: int
) -> EvaluationPoint:
    """Run the episodes of an environment once, with whatever weights serve.

    It takes the data from their beginning: all of those that end (``num_epochs``), or else one
    batch of the environment. Whoever calls it keeps the weights as they are. If the engine dies,
    all is drawn again.

    Raises:
        RuntimeError: a token was drawn by other weights.
        EngineDied: the engine died each of three times.
    """
    num_deaths = 0
    while True:
        for data in env.transforms_of(DataLoadingPrimer):
            data.rewind()
        version = policy.version
        try:
            rows = await _draw_rows(env, runner, policy)
        except EngineDied as died:
            num_deaths += 1
            if num_deaths == MAX_DEATHS:
                raise
            _log.warning("The engine died under an evaluation, which begins again: %s", died)
            continue
        drawn_by = {v for row in rows for v in row.get(TOKEN_POLICY_VERSION).tolist() if v >= 0}
        if drawn_by - {version}:
            raise RuntimeError(
                f"An evaluation of version {version} has tokens of {sorted(drawn_by - {version})}: "
                "the weights were replaced while it ran."
            )
        return EvaluationPoint(step, version, lazy_stack(rows))


async def _draw_rows(
    env: EpisodeEnv, runner: AsyncEpisodeRunner, policy: AsyncPolicy
) -> list[TensorDictBase]:
    """The rows of one batch, or of all batches where the data end."""
    num_epochs = [data.num_epochs for data in env.transforms_of(DataLoadingPrimer)]
    ends, rows = bool(num_epochs) and None not in num_epochs, list[TensorDictBase]()

    def draw() -> list[Episode]:
        with suppress(DataExhaustedError):  # which no coroutine can raise
            return runner.draw(env.batch_size.numel())
        return []

    while True:
        episodes = await asyncio.to_thread(draw)
        drawn = [episode for episode in episodes if episode.stop_reason != StopReason.NO_DATA]
        try:
            await run_together(runner.run(episode, policy) for episode in drawn)
            if drawn:
                rows += await asyncio.to_thread(scored_rows, runner, drawn, env.reward_entries)
        except asyncio.CancelledError:
            runner.calls.abandon()
            raise
        finally:
            await asyncio.to_thread(runner.give_up, episodes)
        if not (ends and drawn):
            return rows

"""Collects whole trajectories with a policy in an environment, and fills a replay buffer.

Shape legend: B rows of the environment, T tokens of a trajectory (ragged).
"""

from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.data import ReplayBuffer
from torchrl.envs import Transform

from torchrl_data.keys import DONE, POLICY_VERSION, STEP_MASK, STOP_REASON
from torchrl_data.layout.conversation_io import one_dimension
from torchrl_data.stop_reasons import NO_DATA
from torchrl_envs.entries.rewards import REWARD_KEYS
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.rewards.functions import RewardFunctions
from torchrl_envs.transforms.policy_version import PolicyVersion

from .base import Collector, PostProcessing, remembering
from .composition_checks import check_composition, check_env
from .trajectory_rows import trajectory_rows
from .weight_update.interface import WeightUpdater


class LLMCollector(Collector):
    """Runs an environment's batch of episodes to their ends, again and again.

    A trajectory is one row: all of its turns in one token sequence; where a transform rewrote the
    past (:meth:`~torchrl_envs.Episode.rewrite`) it is several, each sampled token in exactly one.
    A row that is done waits for the others of its batch without costing any generation.

    Args:
        env: a :class:`~torchrl_envs.ChatEnv` with its transforms.
        policy: writes a turn; usually an ``LLMWrapperBase``.
        replay_buffer: extended with every batch.
        total_trajectories: stop after this many; ``None`` goes on while there is data.
        postproc: changes a batch of trajectories before it goes into the buffer.
        weight_updater: how :meth:`update_policy_weights_` reaches the policy; in process when not
            given.
        track_policy_version: append a :class:`~torchrl_envs.PolicyVersion`, or the one given, and
            keep it at the version that the policy acknowledged; see ``policy_version_tracker``.
        max_turns: safety limit on the turns of an episode that nothing else ends.

    Raises:
        ValueError: the composition of the environment can't work, the policy or the buffer's
            groups don't fit it, or a count is not positive.
        TypeError: the environment has no transforms, hence no data, or the policy is a bare model.
    """

    def __init__(
        self,
        env: EpisodeEnv,
        policy: Any,
        *,
        replay_buffer: ReplayBuffer | None = None,
        total_trajectories: int | None = None,
        postproc: PostProcessing | None = None,
        weight_updater: WeightUpdater | None = None,
        track_policy_version: bool | PolicyVersion = False,
        max_turns: int = 1000,
    ) -> None:
        check_env(env, who="LLMCollector")
        if max_turns < 1 or (total_trajectories is not None and total_trajectories < 1):
            raise ValueError(
                "LLMCollector: max_turns and total_trajectories must be at least 1, got "
                f"{max_turns} and {total_trajectories}."
            )
        self.policy_version_tracker = _tracker(track_policy_version)
        """Knows the policy's version, if it is tracked."""
        if self.policy_version_tracker is not None:
            env.append_transform(self.policy_version_tracker)
        loaders = check_composition(
            env, policy, replay_buffer, has_postproc=postproc is not None, who="LLMCollector"
        )
        self.env = env
        super().__init__(
            policy,
            loaders,
            replay_buffer=replay_buffer,
            total_episodes=total_trajectories,
            postproc=postproc,
            weight_updater=weight_updater,
            reward_functions=list(env.transforms_of(RewardFunctions)),
        )
        self.total_trajectories = total_trajectories
        self.max_turns = max_turns
        self._track_version()

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> int:
        """See :meth:`Collector.update_policy_weights_`; a version tracker hears of it."""
        version = super().update_policy_weights_(*args, **kwargs)
        self._track_version()
        return version

    def _track_version(self) -> None:
        if self.policy_version_tracker is not None:
            self.policy_version_tracker.advance_to(self.policy_version)

    def _stateful(self) -> list[Transform]:
        return remembering(self.env)

    def collect(self) -> TensorDictBase:
        """One batch of finished trajectories.

        Returns:
            A lazy stack ``[B]`` of ragged rows, in the environment's order: what
            :func:`~torchrl_data.row_tensordicts` gives, with ``reward``
            ``[1, 1]``, ``scorable``, ``done``, ``terminated``, ``truncated`` ``[1]``, ``group_id``,
            ``policy_version`` (when the trajectory began; as the tracker writes it, if there is
            one), ``num_turns``, ``num_tool_calls`` and ``num_tool_errors`` ``[1]`` where there are
            tools, ``episode_id``, ``segment`` and ``num_segments``, ``("rewards", source)``,
            ``stop_reason``, ``reward_errors`` and ``("history",
            "full")``. The same rows are in the replay buffer.
        """
        self._track_version()
        return super().collect()

    def _run_batch(self) -> tuple[TensorDictBase, int]:
        try:
            episodes = self._run_episodes()
        except BaseException:
            self.env.close_episodes()  # nothing stays open
            raise
        rows = [self._labelled(row) for rows in episodes for row in rows]
        return lazy_stack(rows), len(episodes)

    def _run_episodes(self) -> list[list[Any]]:
        """The rows of each episode, in the environment's order."""
        shape = self.env.batch_size
        size = shape.numel()
        rows: list[list[Any]] = [[]] * size
        active = torch.ones(size, dtype=torch.bool)
        batch = self.env.reset()
        for _ in range(self.max_turns):
            batch.set(STEP_MASK, active.view(shape))
            batch = self.env.step(self.policy(batch)).get("next")
            finished = active & batch.get(DONE).view(-1)
            indices = finished.nonzero().squeeze(-1).tolist()
            ended = trajectory_rows(one_dimension(batch), indices, further=self.env.reward_entries)
            for index, own in zip(indices, ended, strict=True):
                rows[index] = own
            active = active & ~finished
            if not bool(active.any()):
                break
            batch = batch.exclude(*REWARD_KEYS, *self.env.reward_entries)
        else:
            raise RuntimeError(
                f"LLMCollector: {int(active.sum())} episodes did not end within {self.max_turns} "
                "turns. Append a StepCounter(max_steps=...)."
            )
        return [own for own in rows if own and own[-1][STOP_REASON] != NO_DATA]

    def _labelled(self, row: TensorDictBase) -> TensorDictBase:
        tracker = self.policy_version_tracker
        if tracker is not None and tracker.named:
            row.set_non_tensor(POLICY_VERSION, tracker.label(int(row.get(POLICY_VERSION))))
        return row

    def shutdown(self) -> None:
        """Close the environment and everything that its episodes hold."""
        self.env.close(raise_if_closed=False)


def _tracker(track: bool | PolicyVersion) -> PolicyVersion | None:
    if isinstance(track, bool):
        return PolicyVersion() if track else None
    return track

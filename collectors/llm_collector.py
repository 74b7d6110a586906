"""Collector of whole trajectories in batches, which fills a replay buffer.

The loop::

    env.reset -> [policy -> env.step] until all B rows are done -> postproc -> replay buffer
                  rows that are done wait;                         the trainer waits for all of it
                  max_turns ends the run

Nothing runs while the model trains, so that every token has the trainer's version.

Shape legend: B rows of the environment, T tokens of a trajectory (ragged).
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data import ReplayBuffer

from torchrl_data.batched_object import read_objects
from torchrl_data.checks import check_counts
from torchrl_data.conversation_io import one_dimension, read_conversations
from torchrl_data.keys import (
    DONE,
    FINISH_REASON,
    FULL,
    GROUP_ID,
    POLICY_VERSION,
    PROMPT,
    STEP_MASK,
    STOP_REASON,
)
from torchrl_data.stop_reason import StopReason
from torchrl_envs.datasets.primer import DataExhaustedError
from torchrl_envs.entries.rewards import REWARD_KEYS
from torchrl_envs.episode.episode import share_all
from torchrl_envs.episode.episode_entries import read_episodes
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.episode.turn_point import TurnPoint
from torchrl_envs.rewards.functions import RewardFunctions
from torchrl_envs.transforms.branch_rollouts import (
    BranchRollouts,
    branching_of,
    waiting_rollouts,
)
from torchrl_envs.transforms.policy_version import PolicyVersion

from .collector import Collector, PostProcessing
from .composition_checks import check_collected_env, check_composition
from .refill import check_refill, is_wanted, max_draws_of, refusing_parts
from .trajectory_rows import trajectory_rows
from .weight_update.weight_updater import WeightUpdater

_log = logging.getLogger(__name__)
_Ended = dict[int, list[TensorDictBase]]
"""The rows of each episode by its row in the environment."""


class LLMCollector(Collector):
    """Runs an environment's batch of episodes to their ends, again and again.

    :meth:`collect` gives a lazy stack ``[B]`` of rows, whose entries of tokens are ``[T]`` each.
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

    Example:
        >>> from torchrl_envs import ChatEnv, DataLoadingPrimer, StepCounter
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> model, sampling = tiny_qwen3(len(tokenizer)), {"max_new_tokens": 8, "min_tokens": 8}
        >>> policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=sampling)
        >>> data = DataLoadingPrimer([{"prompt": "2 + 2?"}, {"prompt": "3 + 3?"}], group_size=2)
        >>> env = ChatEnv(batch_size=(4,)).append_transform(data).append_transform(StepCounter(1))
        >>> rows = LLMCollector(env, policy).collect()
        >>> rows.shape, rows["group_id"]
        (torch.Size([4]), tensor([0, 0, 1, 1]))
        >>> rows[0]["tokens", "response"].shape, rows[0]["log_probs", "response"].shape
        (torch.Size([8]), torch.Size([8]))
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
        who = "LLMCollector"
        check_collected_env(env, who=who)
        check_counts(who, max_turns=max_turns, total_trajectories=total_trajectories)
        tracker = PolicyVersion() if track_policy_version is True else track_policy_version
        self.policy_version_tracker: PolicyVersion | None = tracker or None
        """Knows the policy's version, if it is tracked."""
        if tracker:
            env.append_transform(tracker)
        loaders = check_composition(env, policy, replay_buffer, postproc=postproc, who=who)
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
        self._branching = branching_of(env)
        self._refusing = refusing_parts(replay_buffer)
        check_refill(env, self._refusing, who=who)
        self._refused: set[int] = set()
        """Groups of the last batch that were refused."""
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

    def _run_batch(self) -> tuple[TensorDictBase, int]:
        self._track_version()
        self._refused = set()
        shape = self.env.batch_size
        active = torch.ones(shape.numel(), dtype=torch.bool)
        try:
            batch, ended = self._run_groups(self.env.reset(), active)
            episodes = [*ended.values()]
            num_rows = shape.numel()
            while refused := self._refuse(ended):
                most = max_draws_of(self._refusing) * shape.numel()
                rows = sorted(refused)[: most - num_rows]
                if not rows:
                    _log.warning(
                        "LLMCollector: %d rollouts of this batch are of groups that were refused "
                        "(their rewards are equal), and no others are drawn after %d draws "
                        "(GroupRefill.max_draws, collector.max_draws). It goes on without them.",
                        *(len(refused), max_draws_of(self._refusing)),
                    )
                    break
                num_rows += len(rows)
                active = torch.zeros(shape.numel(), dtype=torch.bool)
                active[rows] = True
                batch.set("_reset", active.view(*shape, 1))
                try:
                    batch = self.env.reset(batch)
                except DataExhaustedError:
                    break
                batch, ended = self._run_groups(batch, active)
                episodes += ended.values()
        except BaseException:
            self.env.close_episodes()  # nothing stays open
            raise
        rows = [row for own in episodes for row in own]
        tracker = self.policy_version_tracker
        if tracker is not None and tracker.named:
            for row in rows:
                row.set_non_tensor(POLICY_VERSION, tracker.label(int(row.get(POLICY_VERSION))))
        return lazy_stack(rows), len(episodes)

    def _run_groups(self, batch: TensorDictBase, active: Tensor) -> tuple[TensorDictBase, _Ended]:
        """Run episodes that have begun to their ends; those that branch when their roots are over.

        Args:
            batch: of the environment, after its reset.
            active: bool ``[B]``, the rows with an episode that runs.

        Returns:
            The batch without rewards, and the rows of each episode by its row in the environment;
            without those for which there were no data.
        """
        if not self._branching:
            return self._run_episodes(batch, active)
        plans = self._waiting(batch, active)
        roots = active.clone()
        roots[[row for _, _, others in plans for row in others]] = False
        trails: dict[int, list[TurnPoint]] = {row: [] for row in roots.nonzero().view(-1).tolist()}
        batch, ended = self._run_episodes(batch, roots, trails)
        turns: dict[int, Sequence[TurnPoint]] = {}
        episodes = read_episodes(one_dimension(batch))
        for part, first, others in plans:
            known = [trails[row] for row in first if episodes[row].is_scorable]
            chosen = part.choose(known, [episodes[row] for row in others])
            turns |= {row: own for row, own in zip(others, chosen, strict=True) if own}
        batch, later = self._run_episodes(self.env.branch(batch, turns), active & ~roots)
        return batch, dict(sorted((ended | later).items()))

    def _waiting(
        self, batch: TensorDictBase, active: Tensor
    ) -> list[tuple[BranchRollouts, list[int], list[int]]]:
        """The groups of which some episodes branch: by what, the rows of the roots, the others."""
        episodes = read_episodes(one_dimension(batch))
        groups: dict[int, list[int]] = defaultdict(list)
        for row in active.nonzero().view(-1).tolist():
            if episodes[row].stop_reason != StopReason.NO_DATA:
                groups[episodes[row].group_id].append(row)
        plans = []
        for rows in groups.values():
            part, num_roots = waiting_rollouts(self._branching, [episodes[row] for row in rows])
            if part is not None:
                plans.append((part, rows[:num_roots], rows[num_roots:]))
        return plans

    def _run_episodes(
        self,
        batch: TensorDictBase,
        active: Tensor,
        trails: Mapping[int, list[TurnPoint]] | None = None,
    ) -> tuple[TensorDictBase, _Ended]:
        """Run episodes to their ends, as :meth:`_run_groups`; ``trails`` get turns, by the row."""
        shape, further = self.env.batch_size, self.env.reward_entries
        by_episode: _Ended = {}
        for _ in range(self.max_turns):
            if not bool(active.any()):
                break
            batch.set(STEP_MASK, active.view(shape))
            turn = self.policy(batch)
            if trails is not None:
                for row, point in _points(turn, active):
                    trails[row].append(point)
            batch = self.env.step(turn).get("next")
            finished = active & batch.get(DONE).view(-1)
            indices = finished.nonzero().squeeze(-1).tolist()
            ended = trajectory_rows(one_dimension(batch), indices, further=further)
            by_episode |= dict(zip(indices, ended, strict=True))
            active = active & ~finished
            batch = batch.exclude(*REWARD_KEYS, *self.env.full_reward_spec.keys())
        if bool(active.any()):
            raise RuntimeError(
                f"LLMCollector: {int(active.sum())} episodes did not end within "
                f"{self.max_turns} turns. Append a StepCounter(max_steps=...)."
            )
        return batch, {
            index: own
            for index, own in sorted(by_episode.items())
            if own and own[-1][STOP_REASON] != StopReason.NO_DATA
        }

    def _refuse(self, ended: Mapping[int, list[TensorDictBase]]) -> list[int]:
        """Refuse the groups that nothing can be learnt from; gives their rows in the environment.

        Args:
            ended: the rows of each episode of whole groups, by its row in the environment.
        """
        if not self._refusing:
            return []
        groups: dict[int, list[int]] = defaultdict(list)
        for index, own in ended.items():
            groups[int(own[0].get(GROUP_ID))].append(index)
        refused = []
        for group_id, indices in groups.items():
            if not is_wanted([row for i in indices for row in ended[i]], self._refusing):
                self._refused.add(group_id)
                refused += indices
        return refused

    def _wanted(self, batch: TensorDictBase) -> TensorDictBase | None:
        """See the base class: without the groups that were refused."""
        if not self._refused:
            return batch
        kept = [row for row in batch.unbind(0) if int(row.get(GROUP_ID)) not in self._refused]
        return lazy_stack(kept) if kept else None

    def shutdown(self) -> None:
        """Close the environment and everything that its episodes hold."""
        self.env.close(raise_if_closed=False)


def _points(turn: TensorDictBase, active: Tensor) -> Iterator[tuple[int, TurnPoint]]:
    """The turns that the policy has just taken, and the rows of their episodes.

    Args:
        turn: ``[*B]``, what the policy returned.
        active: bool ``[B]``, the rows with an episode that runs.
    """
    batch = one_dimension(turn)
    episodes = read_episodes(batch)
    share_all(episodes, read_conversations(batch, PROMPT, who="LLMCollector"))
    said = read_conversations(batch, FULL, who="LLMCollector")
    reasons = read_objects(batch, FINISH_REASON, "")
    for row in active.nonzero().view(-1).tolist():
        if not episodes[row].stop_reason:
            yield row, TurnPoint.of(episodes[row], said.row(row), reasons[row])

"""Collects whole trajectories with a policy in an environment, and fills a replay buffer.

Shape legend: B rows of the environment, T tokens of a trajectory (ragged).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.data import ReplayBuffer

from torchrl_data.conversation.conversations import Conversations
from torchrl_data.conversation.object_entries import read_objects
from torchrl_data.keys import (
    DONE,
    FULL,
    GROUP_ID,
    NUM_TOOL_CALLS,
    NUM_TOOL_ERRORS,
    POLICY_VERSION,
    PROMPT,
    REWARD,
    REWARDS,
    ROW,
    SCORABLE,
    STEP_MASK,
    STOP_REASON,
    TERMINATED,
    TOKEN_POLICY_VERSION,
    TRUNCATED,
)
from torchrl_data.layout.conversation_io import (
    one_dimension,
    read_conversations,
    write_conversations,
)
from torchrl_data.layout.export import row_tensordicts
from torchrl_data.stop_reasons import NO_DATA
from torchrl_envs.datasets.primer import DataExhaustedError, DataLoadingPrimer
from torchrl_envs.entries.padded import token_entries_of_row
from torchrl_envs.entries.rewards import REWARD_ERRORS, REWARD_KEYS
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.transforms.policy_version import PolicyVersion

from .composition_checks import check_data, check_groups, check_policy, check_rewards
from .weight_update.in_process import InProcessUpdater
from .weight_update.interface import WeightUpdater

_DENSE = (
    REWARD,
    SCORABLE,
    DONE,
    TERMINATED,
    TRUNCATED,
    GROUP_ID,
    NUM_TOOL_CALLS,
    NUM_TOOL_ERRORS,
)


class LLMCollector:
    """Runs an environment's batch of episodes to their ends, again and again.

    A trajectory is one row: all of its turns in one token sequence. A row that is done waits for
    the others of its batch without costing any generation.

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
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        weight_updater: WeightUpdater | None = None,
        track_policy_version: bool | PolicyVersion = False,
        max_turns: int = 1000,
    ) -> None:
        if not isinstance(env, EpisodeEnv):
            raise TypeError(
                f"LLMCollector takes a ChatEnv with transforms, got {type(env).__name__}. Append a "
                "DataLoadingPrimer at least: ChatEnv(...).append_transform(...)."
            )
        if max_turns < 1 or (total_trajectories is not None and total_trajectories < 1):
            raise ValueError(
                "LLMCollector: max_turns and total_trajectories must be at least 1, got "
                f"{max_turns} and {total_trajectories}."
            )
        self.policy_version_tracker = _tracker(track_policy_version)
        """Knows the policy's version, if it is tracked."""
        if self.policy_version_tracker is not None:
            env.append_transform(self.policy_version_tracker)
        check_policy(env, policy, who="LLMCollector")
        check_data(env, who="LLMCollector")
        env.check()
        for transform in env.episode_transforms():
            transform.check_policy(policy)
        self.env = env
        self._loaders = list(env.transforms_of(DataLoadingPrimer))
        if postproc is None:  # which may make groups and rewards of its own
            check_groups(self._loaders, replay_buffer, who="LLMCollector")
            check_rewards(env, replay_buffer, who="LLMCollector")
        self.policy = policy
        self.replay_buffer = replay_buffer
        self.total_trajectories = total_trajectories
        self.postproc = postproc
        self.weight_updater = weight_updater or InProcessUpdater()
        self.weight_updater.attach(policy)
        self.max_turns = max_turns
        self.num_collected = 0
        self._track_version()

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Batches of trajectories until the data or the budget is used up."""
        while self.total_trajectories is None or self.num_collected < self.total_trajectories:
            try:
                yield self.collect()
            except DataExhaustedError:
                return

    @property
    def policy_version(self) -> int:
        """The version that new tokens are stamped with."""
        return self.weight_updater.version

    def update_policy_weights_(
        self,
        source: nn.Module | Mapping[str, Tensor] | None = None,
        *,
        state_dict: Mapping[str, Tensor] | None = None,
        version: int | None = None,
    ) -> int:
        """Push the trainer's weights to the policy.

        Args:
            source: the trained model, or its state dict.
            state_dict: the same under TorchRL's name; give one of the two.
            version: the number of these weights, above the present one; ``None`` counts on.

        Returns:
            The new policy version, acknowledged by the policy.

        Raises:
            TypeError: neither or both of ``source`` and ``state_dict`` are given.
            ValueError: the policy refuses the update and goes on with its old weights.
        """
        weights = one_source(source, state_dict, who=type(self).__name__)
        new_version = self.weight_updater.push(weights, version=version)
        self._track_version()
        return new_version

    def _track_version(self) -> None:
        if self.policy_version_tracker is not None:
            self.policy_version_tracker.advance_to(self.policy_version)

    def collect(self) -> TensorDictBase:
        """One batch of finished trajectories.

        Returns:
            A lazy stack ``[B]`` of ragged rows, in the environment's order: what
            :func:`~torchrl_data.layout.export.row_tensordicts` gives, with ``reward``
            ``[1, 1]``, ``scorable``, ``done``, ``terminated``, ``truncated`` ``[1]``, ``group_id``,
            ``policy_version`` (when the trajectory began; as the tracker writes it, if there is
            one), ``num_turns``, ``num_tool_calls`` and ``num_tool_errors`` ``[1]`` where there are
            tools, ``("rewards", source)``, ``stop_reason``, ``reward_errors`` and ``("history",
            "full")``. The same rows are in the replay buffer.
        """
        self._track_version()
        with drawn_again_after_an_error(self._loaders):
            try:
                trajectories = self._run_episodes()
            except BaseException:
                self.env.release_episodes()  # nothing stays open
                raise
            num_rows = len(trajectories)
            trajectories = handed_on(trajectories, self.postproc, self.replay_buffer)
        self.num_collected += num_rows
        return trajectories

    def _run_episodes(self) -> TensorDictBase:
        shape = self.env.batch_size
        size = shape.numel()
        rows: list[TensorDictBase | None] = [None] * size
        active = torch.ones(size, dtype=torch.bool)
        batch = self.env.reset()
        for _ in range(self.max_turns):
            batch.set(STEP_MASK, active.view(shape))
            batch = self.env.step(self.policy(batch)).get("next")
            finished = active & batch.get(DONE).view(-1)
            indices = finished.nonzero().squeeze(-1).tolist()
            ended = trajectory_rows(one_dimension(batch), indices, further=self.env.reward_entries)
            for index, row in zip(indices, ended, strict=True):
                rows[index] = row
            active = active & ~finished
            if not bool(active.any()):
                break
            batch = batch.exclude(*REWARD_KEYS, *self.env.reward_entries)
        else:
            raise RuntimeError(
                f"LLMCollector: {int(active.sum())} episodes did not end within {self.max_turns} "
                "turns. Append a StepCounter(max_steps=...)."
            )
        return lazy_stack(
            [self._labelled(row) for row in rows if row is not None and row[STOP_REASON] != NO_DATA]
        )

    def _labelled(self, row: TensorDictBase) -> TensorDictBase:
        tracker = self.policy_version_tracker
        if tracker is not None and tracker.named:
            row.set_non_tensor(POLICY_VERSION, tracker.label(int(row.get(POLICY_VERSION))))
        return row

    def shutdown(self) -> None:
        """Close the environment and everything that its episodes hold."""
        self.env.close(raise_if_closed=False)


def one_source(
    source: nn.Module | Mapping[str, Tensor] | None,
    state_dict: Mapping[str, Tensor] | None,
    *,
    who: str,
) -> nn.Module | Mapping[str, Tensor]:
    """The weights that were given under one of two names.

    Raises:
        TypeError: neither or both are given.
    """
    given = [weights for weights in (source, state_dict) if weights is not None]
    if len(given) != 1:
        raise TypeError(
            f"{who}.update_policy_weights_ takes a model or a state dict, got {len(given)} of them."
        )
    return given[0]


def handed_on(
    trajectories: TensorDictBase,
    postproc: Callable[[TensorDictBase], TensorDictBase] | None,
    replay_buffer: ReplayBuffer | None,
) -> TensorDictBase:
    """A batch as a collector gives it: changed by ``postproc``, and in the buffer.

    Args:
        trajectories: as they were collected.
        postproc: changes them, if there is one.
        replay_buffer: is extended with them, if there is one.
    """
    if postproc is not None:
        trajectories = postproc(trajectories)
    if replay_buffer is not None:
        replay_buffer.extend(trajectories)
    return trajectories


@contextlib.contextmanager
def drawn_again_after_an_error(loaders: Sequence[DataLoadingPrimer]) -> Iterator[None]:
    """Rows that are drawn inside are drawn again if anything goes wrong there.

    Args:
        loaders: what draws them.
    """
    states = [loader.get_extra_state() for loader in loaders]
    try:
        yield
    except DataExhaustedError:
        raise
    except BaseException:
        for loader, state in zip(loaders, states, strict=True):
            loader.set_extra_state(state)
        raise


def _tracker(track: bool | PolicyVersion) -> PolicyVersion | None:
    if isinstance(track, bool):
        return PolicyVersion() if track else None
    return track


def trajectory_rows(
    batch: TensorDictBase, rows: list[int], *, further: Sequence[str] = ()
) -> list[TensorDict]:
    """Finished episodes as rows, see :meth:`LLMCollector.collect`.

    Args:
        batch: the ``next`` of the step in which they finished.
        rows: which.
        further: entries of the scoring to keep, see
            :attr:`~torchrl_envs.EpisodeEnv.reward_entries`.
    """
    if not rows:
        return []
    conversations = read_conversations(batch, PROMPT, who="LLMCollector")
    exported = row_tensordicts(conversations[rows])
    kept = (*_DENSE, *further)
    dense = {key: batch.get(key) for key in kept if batch.get(key, None) is not None}
    rewards = batch.get(REWARDS, None)
    reasons = read_objects(batch, STOP_REASON, "")
    errors = read_objects(batch, REWARD_ERRORS, "")
    data = read_objects(batch, ROW)
    for out, row in zip(exported, rows, strict=True):
        write_conversations(out, FULL, conversations[row])
        for key, value in dense.items():
            out.set(key, value[row])
        for key, value in token_entries_of_row(batch, row, conversations.num_tokens(row)).items():
            out.set(key, value)
        if rewards is not None:
            out.set(REWARDS, TensorDict({name: value[row] for name, value in rewards.items()}))
        versions = out.get(TOKEN_POLICY_VERSION)
        sampled = versions[versions >= 0]
        out.set(POLICY_VERSION, sampled[0] if len(sampled) else torch.tensor(-1))
        out.set("num_turns", torch.tensor(_num_turns(conversations, row)))
        out.set_non_tensor(STOP_REASON, reasons[row])
        out.set_non_tensor(REWARD_ERRORS, errors[row])
        if data[row] is not None:
            out.set_non_tensor(ROW, data[row])
    return exported


def _num_turns(conversations: Conversations, row: int) -> int:
    return sum(message["role"] == "assistant" for message in conversations.messages(row))

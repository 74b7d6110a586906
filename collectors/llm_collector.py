"""Collection in batches: whole trajectories of a policy in an environment."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.data import ReplayBuffer, ReplayBufferEnsemble
from torchrl.envs import Transform

from torchrl_data.batched_object import read_objects
from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import check_counts
from torchrl_data.conversation_io import one_dimension, row_tensordicts, write_conversations
from torchrl_data.keys import (
    DONE,
    EPISODE_ID,
    FINISH_REASON,
    FULL,
    GROUP_ID,
    NUM_SEGMENTS,
    NUM_TOOL_CALLS,
    NUM_TOOL_ERRORS,
    POLICY_VERSION,
    REWARD,
    REWARDS,
    ROW,
    SCORABLE,
    SEGMENT,
    STEP_MASK,
    STOP_CODE,
    STOP_LIMIT,
    STOP_REASON,
    TERMINATED,
    TOOL_CALLS,
    TRUNCATED,
)
from torchrl_data.stop_reason import StopReason, stop_reason_of
from torchrl_envs.datasets.primer import DataExhaustedError, DataLoadingPrimer
from torchrl_envs.entries.rewards import REWARD_ERRORS, REWARD_KEYS, token_entries_of_row, turn_ends
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_entries import EPISODE
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.episode.runner import EpisodeRunner
from torchrl_envs.rewards.functions import RewardFunctions
from torchrl_envs.rewards.scoring_call import LOGGED_EXTRA, LOGGED_METRICS
from torchrl_envs.transforms.policy_version import PolicyVersion

from .composition_checks import check_composition, check_env, check_storage
from .weight_update.updaters import InProcessUpdater, WeightUpdater

# Finished episodes as the rows that are trained.
#
# Shape legend: B rows of the environment, T tokens of a row (ragged).

_NO_BATCH = torch.Size([])
_DENSE = (
    *(REWARD, SCORABLE, REWARDS, DONE, TERMINATED, TRUNCATED, GROUP_ID),
    *(NUM_TOOL_CALLS, NUM_TOOL_ERRORS),
)


def trajectory_rows(
    batch: TensorDictBase, rows: Sequence[int], *, further: Sequence[str] = ()
) -> list[list[TensorDict]]:
    """Finished episodes as rows, see :meth:`LLMCollector.collect`.

    Args:
        batch: ``[B]``, the ``next`` of the step in which they finished.
        rows: which.
        further: entries of the scoring to keep, see
            :attr:`~torchrl_envs.EpisodeEnv.reward_entries`.

    Returns:
        For each, one TensorDict or, where its past was rewritten, one for each segment.
    """
    episodes: list[Episode] = read_objects(batch, EPISODE)
    wanted = [episodes[row] for row in rows]
    columns = _columns(batch, rows, wanted, further) if rows else {}
    errors = read_objects(batch, REWARD_ERRORS, "")
    result = []
    for number, (row, episode) in enumerate(zip(rows, wanted, strict=True)):
        shared = {key: values[number] for key, values in columns.items()}
        shared[STOP_REASON] = _object(episode.stop_reason)
        shared[FINISH_REASON] = _object(episode.finish_reason)
        shared[REWARD_ERRORS] = _object(errors[row])
        if episode.example is not None:
            shared[ROW] = _object(episode.example)
        for key in (LOGGED_METRICS, LOGGED_EXTRA):
            if key in episode.metrics:
                shared[key] = _object(episode.metrics[key])
        if NUM_TOOL_CALLS in columns:
            calls = [call._asdict() for call in episode.tool_calls]
            shared[TOOL_CALLS] = _object({"calls": calls})
        last = token_entries_of_row(batch, row, episode.conversation.num_tokens(0))
        result.append(_rows_of(episode, shared, last))
    return result


def _columns(
    batch: TensorDictBase, rows: Sequence[int], episodes: Sequence[Episode], further: Sequence[str]
) -> dict[str, Sequence[Any]]:
    """Values of all episodes by entry, each read or made at once."""
    index = torch.tensor(rows, dtype=torch.int64)
    columns: dict[str, Sequence[Any]] = {
        key: value[index].unbind(0)
        for key in (*_DENSE, *further)
        if (value := batch.get(key, None)) is not None
    }
    counts = {
        "num_turns": [
            len(turn_ends(episode.assistant_mask))
            if episode.segments
            else sum(message["role"] == "assistant" for message in episode.messages)
            for episode in episodes
        ],
        EPISODE_ID: [episode.id for episode in episodes],
        NUM_SEGMENTS: [len(episode.rows) for episode in episodes],
        STOP_CODE: [
            stop_reason_of(episode.stop_reason, StopReason.TRUNCATED)[0].number
            for episode in episodes
        ],
        STOP_LIMIT: [episode.stop_limit for episode in episodes],
        POLICY_VERSION: [
            int(versions.min()) if len(versions) else -1
            for versions in (episode.sampled_versions for episode in episodes)
        ],
    }
    return columns | {key: torch.tensor(values).unbind(0) for key, values in counts.items()}


def _object(value: Any) -> NonTensorData:
    """What ``set_non_tensor`` writes, without its checks."""
    nothing = TensorDict._new_unsafe({}, batch_size=_NO_BATCH)
    rest = {"data": value, "_metadata": None, "_is_non_tensor": True}
    return NonTensorData._from_tensordict(nothing, rest, safe=False)


def _rows_of(episode: Episode, shared: dict[str, Any], last: dict) -> list[TensorDict]:
    """The rows of one episode; ``last`` are the entries by token of the last of them."""
    out, start = [], 0
    for number, part in enumerate(episode.rows):
        end, own = start + part.num_tokens(0), last
        if number < len(episode.segments):
            own = {
                key if key == REWARD else ("next", key): value[start:end]
                for key, value in episode.token_entries.items()
            }
        (row,) = row_tensordicts(part)
        write_conversations(row, FULL, part)
        # All of them have the shape of a row, so that each need not be looked at once more.
        entries = {**dict(row.items()), **shared, SEGMENT: torch.tensor(number)}
        row = TensorDict._new_unsafe(entries, batch_size=_NO_BATCH)
        for key, value in own.items():
            row.set(key, value)
        out.append(row)
        start = end
    return out


# What all collectors share: batches that are drawn again if they are lost, and weight updates.

PostProcessing = Callable[[TensorDictBase], TensorDictBase]


def remembering(env: EpisodeEnv, *, data: bool = True) -> list[Transform]:
    """The transforms that have a state: those with a ``get_extra_state()``; or all but the data."""
    return [
        part
        for part in env.transforms_of(Transform)
        if type(part).get_extra_state is not nn.Module.get_extra_state
        and (data or not isinstance(part, DataLoadingPrimer))
    ]


def states_of(parts: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """The states of transforms, with their types."""
    return [{"type": type(part).__name__, "state": part.get_extra_state()} for part in parts]


class Collector(ChecksAttributes, ABC):
    """Collects batches of finished episodes with a policy, and fills a replay buffer.

    Args:
        policy: what acts.
        loaders: what draws the data; a batch that is lost on the way is drawn again.
        replay_buffer: extended with every batch.
        total_episodes: stop after this many; ``None`` goes on while there is data.
        postproc: changes a batch before it goes into the buffer.
        weight_updater: how :meth:`update_policy_weights_` reaches the policy; in process when not
            given.
        reward_functions: are told how many updates the policy has had.
    """

    def __init__(
        self,
        policy: Any,
        loaders: Sequence[DataLoadingPrimer],
        *,
        replay_buffer: ReplayBuffer | None,
        total_episodes: int | None,
        postproc: PostProcessing | None,
        weight_updater: WeightUpdater | None,
        reward_functions: Sequence[RewardFunctions] = (),
    ) -> None:
        is_several = isinstance(replay_buffer, ReplayBufferEnsemble)  # which nobody can write to
        if replay_buffer is not None and (is_several or not hasattr(replay_buffer, "extend")):
            raise TypeError(
                f"{type(self).__name__}: replay_buffer takes ReplayBuffer(storage="
                f"LazyStackStorage(), batch_size=64), say, got {type(replay_buffer)}."
            )
        self.policy = policy
        self.replay_buffer = replay_buffer
        self.postproc = postproc
        self.weight_updater = weight_updater or InProcessUpdater()
        self.weight_updater.attach(policy)
        self.num_collected = 0
        """Episodes so far."""
        self._loaders = list(loaders)
        self._reward_functions = list(reward_functions)
        self._total = total_episodes
        self._restored_version: int | None = None
        self._known_sampling = getattr(policy, "sampling", None)

    changeable = frozenset({"postproc"})

    @abstractmethod
    def _run_batch(self) -> tuple[TensorDictBase, int]:
        """Finished episodes as rows, and how many episodes they are."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give back everything that it holds."""

    def __repr__(self) -> str:
        told = {"policy": type(self.policy).__name__, "total_episodes": self._total}
        if self.replay_buffer is not None:
            told["replay_buffer"] = type(self.replay_buffer).__name__
        values = "".join(f", {name}={value}" for name, value in told.items() if value is not None)
        return f"{type(self).__name__}(num_collected={self.num_collected}{values})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Batches until the data or the budget is used up."""
        while self._total is None or self.num_collected < self._total:
            try:
                yield self.collect()
            except DataExhaustedError:
                return

    def collect(self) -> TensorDictBase:
        """One batch of finished trajectories; after an error the next call draws its data again.

        Returns:
            A lazy stack ``[B]`` of ragged rows, in the environment's order: what
            :func:`~torchrl_data.row_tensordicts` gives, with ``reward``
            ``[1, 1]``, ``scorable``, ``done``, ``terminated``, ``truncated`` ``[1]``, ``group_id``,
            ``policy_version`` (when the trajectory began; as the tracker writes it, if there is
            one), ``num_turns``, ``num_tool_calls`` and ``num_tool_errors`` ``[1]`` where there are
            tools, ``episode_id``, ``segment`` and ``num_segments``, ``("rewards", source)``,
            ``stop_reason`` and its ``stop_code`` and ``stop_limit``, ``finish_reason`` of the last
            turn, ``reward_errors`` and ``("history", "full")``, and what transforms of the user's
            declare in the specs of observations and rewards, as it was when the episode
            ended. The same rows are in the replay buffer.
        """
        if self._restored_version is not None:
            raise RuntimeError(
                f"{type(self).__name__}: the state that was loaded is of version "
                f"{self._restored_version} of the weights. Hand the restored model over first: "
                "collector.update_policy_weights_(model)."
            )
        self._check_sampling()
        states = [loader.get_extra_state() for loader in self._loaders]
        try:
            batch, num_episodes = self._run_batch()
            batch = batch if self.postproc is None else self.postproc(batch)
            if self.replay_buffer is not None:
                if batch.numel() > num_episodes:  # the past of some was rewritten
                    check_storage(self.replay_buffer, len(batch), self.postproc, who="collect()")
                self.replay_buffer.extend(batch)
        except DataExhaustedError:
            raise
        except BaseException:
            for loader, state in zip(self._loaders, states, strict=True):
                loader.set_extra_state(state)
            raise
        self.num_collected += num_episodes
        return batch

    def _check_sampling(self) -> None:
        """Check that a distribution that the policy was given later fits what reads its scores.

        Raises:
            ValueError: it does not.
            RuntimeError: turns are drawn by copies of the policy, which have the one before.
        """
        sampling = getattr(self.policy, "sampling", None)
        if sampling == self._known_sampling:
            return
        env: EpisodeEnv | None = getattr(self, "env", None)
        if env is None:
            raise RuntimeError(
                f"{type(self).__name__}: the policy's sampling was set after its copies were made, "
                "and these draw as before. Make another collector."
            )
        for transform in env.episode_transforms():
            transform.check_policy(self.policy)
        self._known_sampling = sampling

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
        given = [weights for weights in (source, state_dict) if weights is not None]
        if len(given) != 1:
            raise TypeError(
                f"{type(self).__name__}.update_policy_weights_ takes a model or a state dict, got "
                f"{len(given)} of them."
            )
        restored, self._restored_version = self._restored_version, None
        version = self._push(
            given[0], restored if version is None else version, is_restored=restored is not None
        )
        if self.num_collected and restored is None:
            # Neither what comes before the first batch nor a checkpoint is a step of the training.
            for functions in self._reward_functions:
                functions.trainer_state.global_step += 1
        return version

    def _push(
        self, source: nn.Module | Mapping[str, Tensor], version: int | None, *, is_restored: bool
    ) -> int:
        """Hand over weights that a step of training made, or those that the policy had before."""
        del is_restored
        return self.weight_updater.push(source, version=version)

    # Resume -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where it is: the place in the data, what transforms remember, counts, the version.

        To be asked between batches. The batch that was collected last is its caller's: it is not in
        here, and counts as used.

        Returns:
            Plain values, and whatever the ``get_extra_state()`` of the environment's transforms
            gives.
        """
        return {
            "num_collected": self.num_collected,
            "policy_version": self.policy_version,
            "global_step": [f.trainer_state.global_step for f in self._reward_functions],
            "transforms": states_of(self._stateful()),
            "num_draws": self._runner_of_env.num_draws if self._runner_of_env else 0,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state, in a collector that has collected nothing.

        The next :meth:`update_policy_weights_` hands over the weights that the policy had then, and
        calls them what they were called; do that before the next batch.

        Args:
            state_dict: what :meth:`state_dict` gave.

        Raises:
            ValueError: it belongs to other data or another environment; the message says what
                differs.
        """
        parts = self._stateful()
        found = [type(part).__name__ for part in parts]
        saved = [each["type"] for each in state_dict["transforms"]]
        if found != saved:
            raise ValueError(
                f"{type(self).__name__}: the saved environment had the transforms {saved}, this "
                f"one has {found}."
            )
        for part, each in zip(parts, state_dict["transforms"], strict=True):
            part.set_extra_state(each["state"])
        self.num_collected = state_dict["num_collected"]
        self._restored_version = state_dict["policy_version"] or None
        if self._runner_of_env is not None:  # states of before had none
            self._runner_of_env.num_draws = state_dict.get("num_draws", 0)
        for functions, step in zip(self._reward_functions, state_dict["global_step"], strict=True):
            functions.trainer_state.global_step = step

    @property
    def _runner_of_env(self) -> EpisodeRunner | None:
        env: EpisodeEnv | None = getattr(self, "env", None)
        return None if env is None else env.runner

    def _stateful(self) -> Sequence[nn.Module]:
        """What remembers something that a resumed run needs; not the data that run ahead."""
        env: EpisodeEnv | None = getattr(self, "env", None)
        return self._loaders if env is None else remembering(env, data=bool(self._loaders))


# Collects whole trajectories with a policy in an environment, and fills a replay buffer.
#
# Shape legend: B rows of the environment, T tokens of a trajectory (ragged).


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
        check_env(env, who=who)
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
        try:
            shape = self.env.batch_size
            size = shape.numel()
            by_episode: list[list[Any]] = [[]] * size
            active = torch.ones(size, dtype=torch.bool)
            batch, further = self.env.reset(), self.env.reward_entries
            for _ in range(self.max_turns):
                batch.set(STEP_MASK, active.view(shape))
                batch = self.env.step(self.policy(batch)).get("next")
                finished = active & batch.get(DONE).view(-1)
                indices = finished.nonzero().squeeze(-1).tolist()
                ended = trajectory_rows(one_dimension(batch), indices, further=further)
                for index, own in zip(indices, ended, strict=True):
                    by_episode[index] = own
                active = active & ~finished
                if not bool(active.any()):
                    break
                batch = batch.exclude(*REWARD_KEYS, *self.env.full_reward_spec.keys())
            else:
                raise RuntimeError(
                    f"LLMCollector: {int(active.sum())} episodes did not end within "
                    f"{self.max_turns} turns. Append a StepCounter(max_steps=...)."
                )
            episodes = [
                own for own in by_episode if own and own[-1][STOP_REASON] != StopReason.NO_DATA
            ]
        except BaseException:
            self.env.close_episodes()  # nothing stays open
            raise
        rows = [row for own in episodes for row in own]
        tracker = self.policy_version_tracker
        if tracker is not None and tracker.named:
            for row in rows:
                row.set_non_tensor(POLICY_VERSION, tracker.label(int(row.get(POLICY_VERSION))))
        return lazy_stack(rows), len(episodes)

    def shutdown(self) -> None:
        """Close the environment and everything that its episodes hold."""
        self.env.close(raise_if_closed=False)

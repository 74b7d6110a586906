"""Base of all collectors: batches that are drawn again if they are lost, and weight updates.

The loop::

    collect: place in the data -> _run_batch -> postproc -> replay buffer -> batch
    an error before the end puts the place back: the next call draws the same prompts
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import ReplayBuffer, ReplayBufferEnsemble
from torchrl.envs import Transform

from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_envs.datasets.primer import DataExhaustedError, DataLoadingPrimer
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.episode.runner import EpisodeRunner
from torchrl_envs.rewards.functions import RewardFunctions

from .composition_checks import check_storage
from .weight_update.in_process_updater import InProcessUpdater
from .weight_update.weight_updater import WeightUpdater

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
        if getattr(replay_buffer, "_prefetch", False):
            raise ValueError(
                f"{type(self).__name__}: the replay buffer has a prefetch: batches drawn ahead "
                "outlive buffer.empty(), and rows of earlier weights would be trained in the place "
                "of those just collected. Make it without prefetch; rows lie in memory already."
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

    def _wanted(self, batch: TensorDictBase) -> TensorDictBase | None:
        """The rows of a batch that go into the buffer; ``None`` where none do."""
        return batch

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
        """A batch of finished trajectories; after an error the next call draws its data again.

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
            ended. The same rows are in the replay buffer, but for those of groups that were refused
            and replaced by others, see :class:`~objectives.GroupRefill`.
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
            if self.replay_buffer is not None and (stored := self._wanted(batch)) is not None:
                if batch.numel() > num_episodes:  # the past of some was rewritten
                    check_storage(self.replay_buffer, len(stored), self.postproc, who="collect()")
                self.replay_buffer.extend(stored)
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
        """Return where it is: the place in the data, what transforms remember, counts, the version.

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
        """Return what remembers something that a resumed run needs; not the data that run ahead."""
        env: EpisodeEnv | None = getattr(self, "env", None)
        return self._loaders if env is None else remembering(env, data=bool(self._loaders))

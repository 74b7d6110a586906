"""What all collectors share: batches that are drawn again if they are lost, and weight updates."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import ReplayBuffer
from torchrl.envs import Transform

from torchrl_envs.datasets.primer import DataExhaustedError, DataLoadingPrimer
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.rewards.functions import RewardFunctions

from .weight_update.in_process import InProcessUpdater
from .weight_update.interface import WeightUpdater

PostProcessing = Callable[[TensorDictBase], TensorDictBase]


def remembering(env: EpisodeEnv) -> list[Transform]:
    """The transforms that have a state of their own: those with a ``get_extra_state()``."""
    return [
        part
        for part in env.transforms_of(Transform)
        if type(part).get_extra_state is not nn.Module.get_extra_state
    ]


class Collector(ABC):
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

    @abstractmethod
    def _run_batch(self) -> tuple[TensorDictBase, int]:
        """Finished episodes as rows, and how many episodes they are."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give back everything that it holds."""

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
        """One batch; after an error its data are drawn again by the next call."""
        self._check_restored()
        with drawn_again_after_an_error(self._loaders):
            batch, num_episodes = self._run_batch()
            if self.postproc is not None:
                batch = self.postproc(batch)
            if self.replay_buffer is not None:
                self.replay_buffer.extend(batch)
        self.num_collected += num_episodes
        return batch

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
            "transforms": [
                {"type": type(part).__name__, "state": part.get_extra_state()}
                for part in self._stateful()
            ],
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
        parts = list(self._stateful())
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
        for functions, step in zip(self._reward_functions, state_dict["global_step"], strict=True):
            functions.trainer_state.global_step = step

    def _check_restored(self) -> None:
        if self._restored_version is not None:
            raise RuntimeError(
                f"{type(self).__name__}: the state that was loaded is of version "
                f"{self._restored_version} of the weights. Hand the restored model over first: "
                "collector.update_policy_weights_(model)."
            )

    def _stateful(self) -> Iterable[nn.Module]:
        """What remembers something that a resumed run needs."""
        return self._loaders


class BackgroundCollector(Collector):
    """Collects beside training: what is pushed to the policy is on its way for a while."""

    @property
    @abstractmethod
    def _is_lockstep(self) -> bool:
        """Whether generation and training take turns."""

    @property
    @abstractmethod
    def _pushed_version(self) -> int:
        """The version of the weights that were pushed last."""

    @abstractmethod
    def _wait_for_push(self) -> None:
        """Wait until the policy has the weights that were pushed last."""

    @abstractmethod
    def _reached_caller(self, has_reached: bool) -> None:
        """Whether the rows of the batch that was taken last are with who asked for them."""

    @abstractmethod
    def _position(self) -> Mapping[str, Any]:
        """The ledger, the place in the data, and the rows of the groups that wait."""

    @abstractmethod
    def _go_to(self, position: Mapping[str, Any]) -> None:
        """Go on from a position."""

    def collect(self) -> TensorDictBase:
        """The next batch: complete groups, as soon as there are enough."""
        batch = super().collect()
        self._reached_caller(True)
        return batch

    def give_up_batch(self) -> None:
        """The batch that came last will not be trained: a resumed run collects its prompts again.

        For who is cut short between :meth:`collect` and the training.
        """
        self._reached_caller(False)

    def update_policy_weights_(
        self,
        source: nn.Module | Mapping[str, Tensor] | None = None,
        *,
        state_dict: Mapping[str, Tensor] | None = None,
        version: int | None = None,
        wait: bool = False,
    ) -> int:
        """Push the trainer's weights, while generation and training go on.

        A copy is made at once; who draws takes it up between two tokens, and the next push (or
        ``wait``) waits until that has happened. What is refused is raised there, and by
        :meth:`shutdown`.

        Args:
            source: the trained model, or its state dict.
            state_dict: the same under TorchRL's name; give one of the two.
            version: the number of these weights, above the present one; ``None`` counts on.
            wait: until they are acknowledged.

        Returns:
            The version that these weights will have.

        Raises:
            TypeError: neither or both of ``source`` and ``state_dict`` are given.
            ValueError: the weights can't be taken, or the version does not go up; or the policy
                draws from the very tensors that are trained, though training goes on meanwhile.
            UpdateRefused: the last push was refused; all is drawn with the weights before.
        """
        number = super().update_policy_weights_(source, state_dict=state_dict, version=version)
        if wait or self._is_lockstep:
            self._wait_for_push()
        return number

    def state_dict(self) -> dict[str, Any]:
        """Where it is: the ledger, the place in the data, and the rows of the groups that wait.

        May be asked while it collects, and while a push is under way. Unfinished groups are not in
        here: a resumed run begins them again, with the same seeds.

        Returns:
            See :meth:`Collector.state_dict`; the rows as the batches have them.
        """
        return {**super().state_dict(), **self._position(), "policy_version": self._pushed_version}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`Collector.load_state_dict`; no prompt is skipped, and none trained twice.

        Args:
            state_dict: what :meth:`state_dict` gave.

        Raises:
            ValueError: data, environment or settings of the ledger are others.
            LedgerError: it has collected already.
        """
        super().load_state_dict(state_dict)
        self._go_to(state_dict)

    @abstractmethod
    def async_shutdown(self, timeout: float | None = None) -> None:
        """Cancel what runs, and give back everything.

        Args:
            timeout: seconds until it has to be over.
        """

    def shutdown(self) -> None:
        """See :meth:`async_shutdown`."""
        self.async_shutdown()


@contextlib.contextmanager
def drawn_again_after_an_error(loaders: Sequence[DataLoadingPrimer]) -> Iterator[None]:
    """Rows that are drawn inside are drawn again if anything goes wrong there."""
    states = [loader.get_extra_state() for loader in loaders]
    try:
        yield
    except DataExhaustedError:
        raise
    except BaseException:
        for loader, state in zip(loaders, states, strict=True):
            loader.set_extra_state(state)
        raise

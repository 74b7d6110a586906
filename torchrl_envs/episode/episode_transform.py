"""What a transform can do in the course of an episode, beside transforming entries.

Shape legend: B rows.
"""

from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from tensordict import TensorDictBase
from torchrl.envs import Transform

from torchrl_envs.concurrency.calls import Call, ConcurrentCalls, Outcome

from .driving import PendingCall, PendingCalls
from .episode import Episode
from .resources import Resources

T = TypeVar("T", bound=Transform)
Event = Awaitable[None] | None
"""What an event returns: nothing, or a coroutine that awaits ``self.call(...)``."""


class EpisodeEnvironment(Protocol):
    """An environment that runs episodes."""

    base_env: Any
    """A :class:`~torchrl_envs.ChatEnv`, usually."""

    @property
    def calls(self) -> ConcurrentCalls:
        """Runs the calls of tools, environments and rewards."""
        ...

    @property
    def batch_size(self) -> torch.Size:
        """Of the episodes that run at once."""
        ...

    def transforms_of(self, kind: type[T]) -> Iterator[T]:
        """The transforms of a class, in order."""
        ...

    def resources_in(self, row: int) -> Resources:
        """What the episode holds that runs in a row; nothing if none does."""
        ...

    def run_after_turn(self, transform: Any, next_batch: TensorDictBase) -> None:
        """Run one transform's ``after_turn`` on the episodes of the step that is under way."""
        ...


class EpisodeTransform(Transform):
    """A transform that an :class:`~torchrl_envs.EpisodeEnv` tells about its episodes.

    The events of an :class:`~torchrl_envs.Episode`, in this order, whatever the order in which
    transforms were appended:

    1. ``draw``: the episode gets its example, group and seed;
    2. ``begin``: it starts, and may add to the query; an episode in which that raises takes part
       in nothing more, and its first step ends it;
    3. ``before_turn``: the next turn is bounded, or is not to be;
    4. ``after_turn``: the policy has spoken, and the calls of all :class:`ToolSource` have run;
       it may answer, end the episode, or let it go on;
    5. ``finish``: an episode that is over is scored. Then what it held is given back.

    An event works on one episode. It may be ``async`` and ``await self.call(...)``: what many
    episodes wait for runs at once. What is cheaper for many at once overrides the plural:
    ``before_turns``, ``finish_batch``.
    """

    only_for: Callable[[Episode], bool] | None = None
    """Says in which episodes it takes part; ``None``: in all."""

    def concerned(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        """Those of some episodes in which it takes part.

        Args:
            episodes: with their examples.
        """
        if self.only_for is None:
            return episodes
        return [episode for episode in episodes if self.only_for(episode)]

    @property
    def by_token(self) -> bool:
        """Whether it can make ``reward`` dense, ``[B, T, 1]``, at the end of an episode."""
        return False

    # Events -------------------------------------------------------------------------------------

    def check(self, env: EpisodeEnvironment) -> None:
        """Raise if the composition can't work; called before the first reset."""

    def check_policy(self, policy: Any) -> None:
        """Raise if what the policy says would be misread; called by a collector at construction."""

    def draw(self, episodes: Sequence[Episode]) -> None:
        """Give some episodes their ``example``, ``query``, ``group_id`` and ``seed``, in order."""

    def begin(self, episode: Episode) -> Event:
        """Start an episode; may change its ``query`` and ``tools``, and add to its resources.

        Raises:
            Exception: it can't begin: it ends by itself, with ``stop_reason``
                ``"environment_error: <where>: <type>: <message>"``.
        """

    def before_turn(self, episode: Episode) -> Event:
        """Bound the next turn of an episode (``max_new_tokens``), or truncate it."""

    def before_turns(self, episodes: Sequence[Episode]) -> None:
        """The same for several episodes, where that is cheaper."""

    def after_turn(self, episode: Episode) -> Event:
        """The policy has spoken: answer, end the episode, or let it go on."""

    def over(self, episode: Episode) -> None:
        """An episode is over; others of its group may run on before it is scored. Comes twice."""

    def finish(self, episode: Episode) -> Event:
        """Score an episode that is over."""

    def finish_batch(self, episodes: Sequence[Episode]) -> None:
        """The same for several episodes, where that is cheaper."""

    def export(self, batch: TensorDictBase, episodes: Sequence[Episode]) -> None:
        """Write further entries of a step, of the episodes that have just ended in it.

        Args:
            batch: ``[B]``; what is written is declared in ``transform_reward_spec``.
            episodes: their ``row`` is that of the batch; may be none.
        """

    # What it works with -------------------------------------------------------------------------

    @property
    def key(self) -> str:
        """Its name in the environment: where it keeps what it remembers of an episode."""
        return self.__dict__.get("_key", type(self).__name__)

    @key.setter
    def key(self, name: str) -> None:
        self.__dict__["_key"] = name

    def call(
        self, *functions: Call, timeout_s: float, lane: Hashable = None
    ) -> Awaitable[list[Outcome]]:
        """Run functions without arguments, sync or ``async``, one after the other.

        Args:
            *functions: sync ones run on the environment's threads, async ones on its loop.
            timeout_s: deadline of each, in seconds from when it starts; none starts after one that
                missed its own.
            lane: calls of this transform with equal lanes run one after the other, also those of
                several episodes; the episode's own when not given.

        Returns:
            An outcome for each.
        """
        own = lane if lane is not None else object()
        return PendingCalls([PendingCall(f, timeout_s, (id(self), own)) for f in functions])

    def call_all(self, *functions: Call, timeout_s: float) -> Awaitable[list[Outcome]]:
        """Run functions without arguments, sync or ``async``, all at once; see :meth:`call`.

        Returns:
            An outcome for each.
        """
        return PendingCalls([PendingCall(f, timeout_s, None) for f in functions])

    @property
    def calls(self) -> ConcurrentCalls:
        """Runs calls, sync and async, on the threads and the one loop of the environment."""
        return self._environment().calls

    @property
    def in_environment(self) -> bool:
        """Whether it belongs to an environment, and not to a replay buffer or nothing."""
        try:
            return self.container is not None
        except ValueError:  # TorchRL's, for a Compose that belongs to no environment.
            return False

    def env_transforms(self, kind: type[T]) -> list[T]:
        """The transforms of a class in the environment that this one belongs to."""
        return list(self._environment().transforms_of(kind))

    def _environment(self) -> EpisodeEnvironment:
        container: Any = self.container
        if container is None or not hasattr(container, "run_after_turn"):
            raise self._misplaced()
        return container

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Where it stands among TorchRL's transforms, its ``after_turn`` runs."""
        del tensordict
        if type(self).after_turn is not EpisodeTransform.after_turn:
            self._environment().run_after_turn(self, next_tensordict)
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        del tensordict
        return tensordict_reset

    def _reset_env_preprocess(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Called by a plain ``TransformedEnv`` only, which would leave the episodes out: raises."""
        del tensordict
        raise self._misplaced()

    def _misplaced(self) -> RuntimeError:
        return RuntimeError(
            f"{type(self).__name__} works inside an EpisodeEnv only: use "
            "ChatEnv(...).append_transform(...) instead of TransformedEnv(...)."
        )


def overrides(transform: EpisodeTransform, event: str) -> bool:
    """Whether a transform takes part in an event.

    Args:
        transform: any.
        event: the name of the method.
    """
    return getattr(type(transform), event) is not getattr(EpisodeTransform, event)


class EpisodeStartError(Exception):
    """An episode can't begin.

    Args:
        where: what failed: an environment and what was called, a server.
    """

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where

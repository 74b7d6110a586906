"""Events of an episode that a transform takes part in, beside transforming entries.

Shape legend: B rows.
"""

from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol, TypeVar

import torch
from tensordict import TensorDictBase
from torchrl.envs import StepCounter, Transform

from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_envs.concurrency.calls import ConcurrentCalls
from torchrl_envs.concurrency.outcome import Call, Outcome

from .episode import Episode
from .pending_calls import PendingCall, PendingCalls
from .resources import Resources

T = TypeVar("T", bound=Transform)
Event = Awaitable[None] | None
"""What an event returns: nothing, or a coroutine that awaits ``self.call(...)``."""


class EpisodeEnvironment(Protocol):
    """An environment that runs episodes."""

    base_env: Any
    """A :class:`~torchrl_envs.ChatEnv`, usually."""
    calls: ConcurrentCalls
    """Runs the calls of tools, environments and rewards."""

    @property
    def batch_size(self) -> torch.Size:
        """Shape of the batch of episodes that run at once."""
        ...

    def transforms_of(self, kind: type[T]) -> Iterator[T]:
        """The transforms of a class, in order."""
        ...

    def resources_in(self, row: int) -> Resources:
        """Return what the episode holds that runs in a row; nothing if none does."""
        ...


class EpisodeTransform(ChecksAttributes, Transform):
    """A transform that an :class:`~torchrl_envs.EpisodeEnv` tells about its episodes.

    The events of an :class:`~torchrl_envs.Episode`, in this order, whatever the order in which
    transforms were appended:

    1. ``draw``: the episode gets its example, group and seed; and ``drawn``: it has them, from the
       data or from who draws a prompt a second time;
    2. ``begin``: it starts, and may add to the query; an episode in which that raises takes part
       in nothing more, and its first step ends it;
    3. ``before_turn``: the next turn is bounded, or is not to be;
    4. ``after_turn``: the policy has ended its turn, and the calls of all :class:`ToolSource` have
       run; it may answer, end the episode, or let it go on;
    5. ``finish``: an episode that is over is scored. Then what it held is given back.

    An event works on one episode. It may be ``async`` and ``await self.call(...)``: what many
    episodes wait for runs at once. What is cheaper for many at once overrides ``finish_batch``. An
    episode in which ``before_turn`` or ``after_turn`` raises ends there, truncated and unscorable,
    and the others go on; what ``finish`` raises, or ``draw``, ends the run.

    Example:
        >>> class Doubt(EpisodeTransform):
        ...     def after_turn(self, episode):
        ...         if episode.num_turns == 1:
        ...             episode.say({"role": "user", "content": "Are you sure?"})
        >>> data = DataLoadingPrimer([{"prompt": "2 + 2?"}])
        >>> env = ChatEnv(batch_size=(1,)).append_transform(data).append_transform(Doubt())
        >>> out = env.step(env.reset().set("text_response", ["4"]))["next"]
        >>> [message["content"] for message in out["history"].prompt.to_chats()[0]]
        ['2 + 2?', '4', 'Are you sure?']
    """

    key: str = ""
    """Its name, which an environment gives it: where it keeps what it remembers of an episode."""
    only_for: Callable[[Episode], bool] | None = None
    """Says in which episodes it takes part; ``None``: in all."""
    required_columns: Sequence[str] = ()
    """Columns that the data must have; their loader checks them."""
    answers_cut_turns: bool = False
    """Whether ``after_turn`` is to see a turn that a limit of tokens cut. Where no transform of an
    episode wants that, such a turn ends the episode."""
    can_branch: bool = True
    """An episode in which it takes part can begin in the middle of another one, see
    :class:`~torchrl_envs.BranchRollouts`."""
    names_agents: bool = False
    """It says of each row who wrote it: a step has the entry ``agent``."""
    keeps_prompt: bool = False
    """Whether ``begin`` and ``before_turn`` leave the data's prompt as it is, or add to it: one
    that is too long for the model stays so, and is left out when it is drawn."""
    longest_prompt: int | None = None
    """The most tokens of a prompt after which a turn may begin; rows of the data with a longer one
    are left out when they are drawn. ``None``: no bound but the model's."""

    def concerned(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        """Those of some episodes in which it takes part.

        Args:
            episodes: with their examples.
        """
        if self.only_for is None:
            return episodes
        return [episode for episode in episodes if self.only_for(episode)]

    def takes_part_in_row(self, row: Mapping[str, Any]) -> bool:
        """Return whether it takes part in the episodes that start from a row of the data.

        Args:
            row: of the data.
        """
        if self.only_for is None:
            return True
        episode = Episode()
        episode.example = row
        return bool(self.only_for(episode))

    @property
    def by_token(self) -> bool:
        """Whether it can make ``reward`` dense, ``[B, T, 1]``, at the end of an episode."""
        return False

    def extra_repr(self) -> str:
        """Return what it does, in the ``repr`` of an environment: its rewards and tools, say."""
        rewards = list(getattr(self, "reward_names", ()))
        return f"rewards={rewards}" if rewards else ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    # Events -------------------------------------------------------------------------------------

    def check(self, env: EpisodeEnvironment) -> None:
        """Raise if the composition can't work; called before the first reset."""

    def check_policy(self, policy: Any) -> None:
        """Raise if what the policy says would be misread; called by a collector at construction."""

    def draw(self, episodes: Sequence[Episode]) -> None:
        """Give some episodes their ``example``, ``query``, ``group_id`` and ``seed``, in order."""

    def drawn(self, episodes: Sequence[Episode]) -> None:
        """Some episodes have what ``draw`` gives, also those whose prompt is drawn once more."""

    def begin(self, episode: Episode) -> Event:
        """Start an episode; may change its ``query`` and ``tools``, and add to its resources.

        Raises:
            Exception: it can't begin: it ends by itself, with ``stop_reason``
                ``"environment_error: <where>: <type>: <message>"``.
        """

    def before_turn(self, episode: Episode) -> Event:
        """Bound the next turn of an episode (``max_new_tokens``), or truncate it."""

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
        if container is None or not hasattr(container, "resources_in"):
            raise self._misplaced()
        return container

    def _step(self, *_: Any, **__: Any) -> Any:
        """Called by a plain ``TransformedEnv`` only, which would leave the episodes out: raises."""
        raise self._misplaced()

    _reset_env_preprocess = _step

    def _misplaced(self) -> RuntimeError:
        return RuntimeError(
            f"{type(self).__name__} works inside an EpisodeEnv only: use "
            "ChatEnv(...).append_transform(...) instead of TransformedEnv(...)."
        )


def overrides(transform: EpisodeTransform, event: str) -> bool:
    """Return whether a transform takes part in an event.

    Args:
        transform: any.
        event: the name of the method.
    """
    return getattr(type(transform), event) is not getattr(EpisodeTransform, event)


def parts_before(env: EpisodeEnvironment, part: EpisodeTransform) -> list[EpisodeTransform]:
    """Return the parts of an environment that stand before one of them.

    Args:
        env: has it.
        part: which.
    """
    return list(takewhile(lambda each: each is not part, env.transforms_of(EpisodeTransform)))


def takes_one_turn(env: EpisodeEnvironment) -> bool:
    """Return whether every episode of an environment ends with its first turn.

    Args:
        env: whose counters of steps say so.
    """
    limits = [counter.max_steps for counter in env.transforms_of(StepCounter)]
    return any(limit is not None and limit < 2 for limit in limits)


class OpenedTurns:
    """Knows what prompts open of the assistant's turns: a part of a transform that reads them."""

    opened_text: str = ""
    """What every turn of the policy begins with, though the prompt has it: ``<think>``, say."""

    def note_encoder(self, encoder: Any) -> None:
        """Take over what the prompts of an environment, or of a policy, open.

        Args:
            encoder: a :class:`~torchrl_data.ConversationEncoder`, or ``None``.
        """
        if encoder is not None:
            self.opened_text = encoder.opened_text

    def note_environment(self, env: EpisodeEnvironment) -> None:
        """The same of an environment that spells its prompts out itself.

        Args:
            env: may have a tokenizer.
        """
        if getattr(env.base_env, "tokenizer", None) is not None:
            self.note_encoder(env.base_env.encoder)


class EpisodeStartError(Exception):
    """An episode can't begin.

    Args:
        where: what failed: an environment and what was called, a server.
    """

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where

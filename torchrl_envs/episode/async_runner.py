"""The loop through one episode in an event loop, where none waits for another.

Shape legend: N episodes of a group.
"""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tensordict import TensorDict, TensorDictBase
from torchrl.envs import StepCounter, Transform
from torchrl.envs.transforms import Compose

from torchrl_data.conversation.conversations import Conversations
from torchrl_data.keys import REWARD
from torchrl_data.stop_reasons import ENVIRONMENT_ERROR, ERROR, kind_of
from torchrl_envs.tool_calls.results import error_line

from .driving import LoopDriver
from .entries import EpisodeEntries, write_flags
from .episode import Episode
from .episode_env import RewardErrorLimit
from .episode_transform import EpisodeTransform, overrides
from .resources import close_resources_async
from .runner import refuse_start

if TYPE_CHECKING:
    from .episode_env import EpisodeEnv

_HARMLESS: Final = (EpisodeEntries, RewardErrorLimit, Compose)
_log = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """What a group was drawn with."""

    example: Mapping[str, Any] | None
    query: Any
    group_id: int


def prompt_of(episode: Episode) -> Prompt:
    """What an episode was drawn with, before it begins.

    Args:
        episode: drawn.
    """
    return Prompt(episode.example, episode.query, episode.group_id)


class TurnTaker(Protocol):
    """Takes the policy's turns; :class:`~torchrl_modules.AsyncPolicy` is one."""

    async def take_turn(
        self,
        conversation: Conversations,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
    ) -> tuple[Conversations, str]:
        """The conversation with a turn more, and why the turn ended."""
        ...


class AsyncEpisodeRunner:
    """Runs episodes of an environment one by one, through the same events as its steps do.

    ``draw`` and ``finish`` take the episodes of a group; everything between is each one's own.

    Args:
        env: its events, data, tools and limits.

    Raises:
        ValueError: a transform works on batches of steps, and there are none.
    """

    def __init__(self, env: "EpisodeEnv") -> None:
        self._env = env
        self._runner = env.runner
        self._driver = LoopDriver(env.calls)
        self._turn_steps: list[tuple[str, Callable[[Episode], Any], EpisodeTransform | None]] = []
        self._late: list[Transform] = []
        if self._runner.dispatcher.sources:
            self._turn_steps.append(("tools", self._runner.dispatcher.after_turn, None))
        for transform in env.transforms_of(Transform):
            self._take_in(transform)

    def _take_in(self, transform: Transform) -> None:
        if isinstance(transform, EpisodeTransform):
            if overrides(transform, "after_turn"):
                step = (type(transform).__name__, transform.after_turn, transform)
                self._turn_steps.append(step)
        elif isinstance(transform, StepCounter):
            limit = transform.max_steps
            if limit is not None:
                self._turn_steps.append(("StepCounter", lambda e: cut_after(e, limit), None))
        elif REWARD in (transform.in_keys or ()):
            self._late.append(transform)
        elif not isinstance(transform, _HARMLESS):
            raise ValueError(
                f"{type(transform).__name__} works on the steps of a batch, and here each episode "
                "runs by itself. Write it as an EpisodeTransform, or collect in batches "
                "(LLMCollector)."
            )

    def allow(self, num_episodes: int) -> None:
        """Let so many episodes run at once, none of which waits for another's thread."""
        self._env.calls.allow_threads(num_episodes)

    def abandon(self) -> None:
        """Who waits in a thread for rewards, or for what is given back, does so no longer."""
        self._env.calls.abandon()

    def draw(self, num_episodes: int) -> list[Episode]:
        """New episodes with their examples; that there are no data for has a ``stop_reason``.

        Args:
            num_episodes: of one group.
        """
        episodes = [Episode(row) for row in range(num_episodes)]
        self._runner.draw(episodes)
        return episodes

    def draw_again(self, prompt: Prompt, seed: int, num_episodes: int) -> list[Episode]:
        """New episodes of a prompt that was drawn before.

        Args:
            prompt: what :func:`prompt_of` gave.
            seed: of the episodes.
            num_episodes: of one group.
        """
        episodes = [Episode(row) for row in range(num_episodes)]
        for episode in episodes:
            episode.example, episode.query, episode.group_id = prompt
            episode.seed = seed
        self._runner.hold(episodes)
        return episodes

    async def run(self, episode: Episode, policy: TurnTaker) -> None:
        """Take a drawn episode to its end; it is not scored yet, and holds what it holds.

        What an event raises ends this episode alone, with ``stop_reason``
        ``"environment_error: <where>: <type>: <message>"``.

        Args:
            episode: its ``stop_reason`` says afterwards why it is over.
            policy: takes its turns.

        Raises:
            EngineDied: the engine of the policy is gone.
        """
        await self._begin(episode)
        if not episode.stop_reason:
            await self._before_turn(episode)
        while not (episode.stop_reason or episode.is_done):
            episode.conversation, episode.finish_reason = await policy.take_turn(
                episode.conversation, max_new_tokens=episode.max_new_tokens, session=episode.id
            )
            episode.num_turns += 1
            if kind_of(episode.finish_reason) == ERROR:
                episode.truncate()
            else:
                await self._after_turn(episode)
        episode.settle()
        self._runner.over([episode])

    async def _begin(self, episode: Episode) -> None:
        for transform in self._runner.taking_part("begin"):
            if not transform.concerned([episode]):
                continue
            try:
                await self._driver.drive(transform.begin(episode))
            except Exception as error:
                refuse_start(episode, transform, error)
                calls, reason = self._env.calls, episode.stop_reason
                await close_resources_async(episode.resources, reason, calls, owner=transform)
                break
        else:
            self._runner.dispatcher.show_tools(episode)
        try:
            base: Any = self._env.base_env
            episode.conversation = base.open(episode.query, episode.tools)
        except Exception as error:
            self._fail(episode, type(self._env.base_env).__name__, error)

    async def _before_turn(self, episode: Episode) -> None:
        episode.max_new_tokens = None
        for transform in self._runner.taking_part("before_turn"):
            if not transform.concerned([episode]):
                continue
            try:
                if overrides(transform, "before_turns"):
                    transform.before_turns([episode])
                if overrides(transform, "before_turn"):
                    await self._driver.drive(transform.before_turn(episode))
            except Exception as error:
                self._fail(episode, type(transform).__name__, error)
            if episode.stop_reason or episode.is_done:
                return

    async def _after_turn(self, episode: Episode) -> None:
        for name, step, owner in self._turn_steps:
            if owner is not None and not owner.concerned([episode]):
                continue
            try:
                await self._driver.drive(step(episode))
            except Exception as error:
                self._fail(episode, name, error)
                return
        episode.end_unanswered()
        if not (episode.is_done or episode.stop_reason):
            await self._before_turn(episode)

    def _fail(self, episode: Episode, where: str, error: Exception) -> None:
        _log.warning("An episode ends: %s failed", where, exc_info=error)
        episode.stop_reason = ""
        episode.truncate(f"{ENVIRONMENT_ERROR}: {where}: {error_line(error)}")

    def finish(self, episodes: Sequence[Episode]) -> TensorDictBase:
        """Score the episodes of a group, and give back what they hold; may take its time.

        Args:
            episodes: N, all of them over.

        Returns:
            ``[N]``, the entries of the step in which they ended.

        Raises:
            TooManyRewardErrors: the rewards of too many recent episodes failed.
        """
        try:
            for row, episode in enumerate(episodes):
                episode.row = row
            self._runner.finish(episodes)
            batch = self._entries(episodes)
        finally:
            self._runner.close(episodes)
        self._env.record_ends(episodes)
        return batch

    def _entries(self, episodes: Sequence[Episode]) -> TensorDictBase:
        entries = self._env.entries
        batch: TensorDictBase = TensorDict({}, batch_size=[len(episodes)])
        write_flags(batch, episodes)
        entries.write_values(batch, episodes)
        entries.write_results(batch, episodes)
        start: TensorDictBase = TensorDict({}, batch_size=[len(episodes)])
        for transform in self._late:
            start = transform._reset(start, start)
            batch = transform._step(start, batch)
        return batch

    def give_up(self, episodes: Sequence[Episode]) -> None:
        """Give back what episodes hold that will not be finished; may take its time.

        Args:
            episodes: those that are closed already are left out.
        """
        self._runner.close(episodes)


def cut_after(episode: Episode, max_turns: int) -> None:
    """What TorchRL's ``StepCounter`` does after a turn."""
    if episode.num_turns >= max_turns and not episode.is_done:
        episode.truncate()

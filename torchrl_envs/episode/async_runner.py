"""Runner of one episode in an event loop, where none waits for another.

Shape legend: N episodes of a group.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from tensordict import TensorDict, TensorDictBase
from torchrl.envs import Transform

from torchrl_data.conversation import Conversations, stream_number
from torchrl_data.keys import REWARD

from .episode import Episode
from .episode_entries import write_flags
from .episode_env import HARMLESS, EpisodeEnv
from .episode_step import transform_past
from .episode_transform import EpisodeTransform
from .runner import fail
from .turn_point import TurnPoint


class Prompt(NamedTuple):
    """The prompt that a group was drawn with."""

    example: Mapping[str, Any] | None
    query: Any
    group_id: int


def prompt_of(episode: Episode) -> Prompt:
    """Return what an episode was drawn with, before it begins.

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
        agent: str = "",
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
        env._find_parts()
        self._env = env
        self.calls = env.calls
        """Runs the calls of all episodes."""
        self._runner = env.runner
        self._late: list[Transform] = []
        for transform in env.transforms_of(Transform):
            if isinstance(transform, (EpisodeTransform, *HARMLESS)):
                continue
            if REWARD in (transform.in_keys or ()):
                self._late.append(transform)
            else:
                raise ValueError(
                    f"{type(transform).__name__} works on the steps of a batch, and here each "
                    "episode runs by itself. Write it as an EpisodeTransform, or collect in "
                    "batches (LLMCollector)."
                )

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
            episode.seed, episode.stream = seed, stream_number(seed, episode.row)
        self._runner.hold(episodes)
        self._runner.drawn(episodes)
        return episodes

    async def run(
        self,
        episode: Episode,
        policy: TurnTaker,
        *,
        after: Sequence[TurnPoint] = (),
        trail: list[TurnPoint] | None = None,
    ) -> None:
        """Take a drawn episode to its end; it is not scored yet, and holds what it holds.

        Args:
            episode: its ``stop_reason`` says afterwards why it is over.
            policy: takes its turns.
            after: turns of another one of its draw, of which it takes the last one anew; none for
                an episode that begins with its prompt.
            trail: gets the turns that it takes.

        Raises:
            EngineDied: the engine of the policy is gone.
        """
        drive, events = self._runner.drive, self._runner
        await drive(events.start, episode)
        try:
            base: Any = self._env.base_env
            episode.conversation = base.open(episode.query, episode.tools)
        except Exception as error:
            fail(episode, error, self._env.base_env, "open")
        await drive(events.before_turn, episode)
        if after:
            await drive(partial(events.branch, turns=after), episode)
        while not episode.is_over:
            conversation, finish_reason = await policy.take_turn(
                episode.conversation,
                max_new_tokens=episode.max_new_tokens,
                session=episode.id,
                agent=episode.origins[-1].agent,
            )
            if trail is not None:
                trail.append(TurnPoint.of(episode, conversation, finish_reason))
            episode.conversation = conversation
            if events.took_turn(episode, finish_reason):
                await drive(events.answer, episode)
                episode.end_turn()
            await drive(events.before_turn, episode)
        episode.settle()
        events.over([episode])

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
            batch: TensorDictBase = TensorDict({}, batch_size=[len(episodes)])
            write_flags(batch, episodes)
            self._env.entries.write_values(batch, episodes)
            self._env.entries.write_results(batch, episodes)
            for transform in self._late:
                # TorchRL's begin with the environment's batch, in which all rows are alike.
                start: TensorDictBase = TensorDict({}, batch_size=self._env.batch_size)
                start = transform._reset(start, start).reshape(-1)[[0] * len(episodes)]
                batch = transform._step(start, batch)
                transform_past(transform, episodes)
        finally:
            self._runner.close(episodes)
        self._env.record_ends(episodes)
        return batch

    def give_up(self, episodes: Sequence[Episode]) -> None:
        """Give back what episodes hold that will not be finished; may take its time.

        Args:
            episodes: those that are closed already are left out.
        """
        self._runner.close(episodes)

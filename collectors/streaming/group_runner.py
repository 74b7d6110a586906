"""The episodes of groups, from their draw to the rows that are trained."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from tensordict import TensorDictBase

from collectors.ledger import Ticket
from collectors.ledger.reasons import ENGINE_DIED, LOAD
from collectors.trajectory_rows import trajectory_rows
from torchrl_envs.episode.async_runner import AsyncEpisodeRunner, Prompt
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.episode.turn_point import TurnPoint
from torchrl_envs.transforms.branch_rollouts import branching_of, waiting_rollouts
from torchrl_modules.engines.engine import EngineDied
from torchrl_modules.policies.async_policy import AsyncPolicy

from .timeline import Timeline

T = TypeVar("T")

_MAX_FINISHERS: Final = 64
MAX_DEATHS: Final = 3
"""Of an engine, under each of what it draws, until that is not tried again."""
_log = logging.getLogger(__name__)


class EpisodeEnd(NamedTuple):
    """The report to the ledger about an episode that is over."""

    num_tokens: int
    """That the policy sampled."""
    versions: tuple[int, int] | None
    """The oldest and the newest version of its engine that drew them."""
    stop_reason: str


@dataclass(slots=True)
class RunningGroup:
    """The episodes of one prompt."""

    ticket: Ticket
    prompt: Prompt
    episodes: list[Episode]
    rows: list[TensorDictBase] = field(default_factory=list)
    """What is trained of it, once it is scored."""
    task: asyncio.Task[None] | None = None
    num_open: int = field(init=False)
    """Episodes that are not over."""
    ends: dict[int, EpisodeEnd] = field(default_factory=dict)
    """Of those that are, by their number, but for cancelled ones."""
    cancelled_for: str = ""
    """Why it was cancelled, if it was."""

    def __post_init__(self) -> None:
        self.num_open = len(self.episodes)

    @property
    def track(self) -> str:
        """Name in a trace."""
        return f"group {self.ticket.ordinal}"

    def cancel(self, reason: str) -> None:
        """Let it end, from without :meth:`GroupRunner.run`, which gives the reason."""
        if not self.cancelled_for:
            self.cancelled_for = reason
            if self.task is not None:
                self.task.cancel()


class GroupRunner:
    """Runs the episodes of groups, each by itself, and scores a group when all of its are over.

    What blocks (scoring, giving back) is done in threads. To be used in one event loop.

    Args:
        env: of the episodes.
        policy: takes turns.
        group_size: episodes of a group.
        max_episodes: that run at once.
        timeline: notes what takes how long.
        on_end: told of each episode that is over, or was cancelled: its group, its number in it.
    """

    def __init__(
        self,
        env: EpisodeEnv,
        policy: AsyncPolicy,
        *,
        group_size: int,
        max_episodes: int,
        timeline: Timeline,
        on_end: Callable[[RunningGroup, int], None] = lambda *_: None,
    ) -> None:
        self.episodes = AsyncEpisodeRunner(env)
        """Draws them."""
        self.episodes.calls.allow_threads(max_episodes)
        self._branching = branching_of(env)
        self._policy = policy
        self._group_size = group_size
        self._further = env.reward_entries
        self._timeline = timeline
        self._on_end = on_end
        self._slots = asyncio.Semaphore(max_episodes)
        self._finishers = ThreadPoolExecutor(_MAX_FINISHERS, thread_name_prefix="finish-group")
        self.groups: dict[Ticket, RunningGroup] = {}
        """Those that were added, the oldest first; who runs one takes it out afterwards."""
        self._most: float = math.inf
        self._num_deaths = self._num_at_risk = 0
        self.num_open = 0
        """Episodes that began and are not over."""
        self.num_ended = 0
        """Groups whose episodes have all run to their ends, ever."""
        self.wake = asyncio.Event()
        """Set when another group may run."""

    # How many run -------------------------------------------------------------------------------

    @property
    def running(self) -> list[RunningGroup]:
        """Groups whose episodes are not all over, the oldest first."""
        return [group for group in self.groups.values() if group.num_open]

    @property
    def has_room(self) -> bool:
        """Whether another group may run."""
        return len(self.running) < self._most

    def limit_groups(self, most: int) -> None:
        """Let at most so many groups run; the youngest of those that do are cancelled.

        Args:
            most: at least 1.
        """
        self._most = most
        for group in self.running[most:]:
            group.cancel(LOAD)
        self.wake.set()

    # One group ----------------------------------------------------------------------------------

    def add(self, ticket: Ticket, prompt: Prompt, episodes: list[Episode]) -> RunningGroup:
        """A group that is about to run."""
        group = self.groups[ticket] = RunningGroup(ticket, prompt, episodes)
        self.num_open += len(episodes)
        return group

    async def run(self, group: RunningGroup) -> str:
        """Take all episodes to their ends, and score them; gives why that was given up, if it was.

        Raises:
            EngineDied: the engine is gone, as often before.
            Exception: what else the scoring raised, or a policy.
        """
        group.task = asyncio.ensure_future(self._run(group))
        if group.cancelled_for:
            group.task.cancel()
        try:
            await group.task
        except EngineDied as died:
            # Of a death every group hears, one after the other, and fewer and fewer are left.
            self._num_deaths += 1
            self._num_at_risk = max(self._num_at_risk, len(self.groups), 1)
            if self._num_deaths >= MAX_DEATHS * self._num_at_risk:
                raise
            _log.warning("The engine died under a group, which is drawn again: %s", died)
            reason = ENGINE_DIED
        except asyncio.CancelledError:
            if not group.cancelled_for:
                raise
            reason = group.cancelled_for
        else:
            self._num_deaths = self._num_at_risk = 0
            return ""
        self.num_open -= group.num_open  # those that had not begun to run
        group.num_open = 0
        await self._in_thread(self.episodes.give_up, group.episodes)
        return reason

    async def _run(self, group: RunningGroup) -> None:
        part, num_roots = waiting_rollouts(self._branching, group.episodes)
        roots, others = group.episodes[:num_roots], group.episodes[num_roots:]
        trails: list[list[TurnPoint]] = [[] for _ in roots]
        try:
            await run_together(
                self._run_episode(group, number, root, trail=None if part is None else trail)
                for number, (root, trail) in enumerate(zip(roots, trails, strict=True))
            )
            if part is not None:
                left = [t for t, each in zip(trails, roots, strict=True) if each.is_scorable]
                chosen = zip(others, part.choose(left, others), strict=True)
                await run_together(
                    self._run_episode(group, number, episode, after=turns)
                    for number, (episode, turns) in enumerate(chosen, num_roots)
                )
        finally:
            for episode in roots if part is not None else ():
                self._policy.engine.end_session(episode.id)
        with self._timeline.span("score", group.track, self._group_size):
            group.rows = await self._in_thread(
                scored_rows, self.episodes, group.episodes, self._further
            )

    async def _run_episode(
        self,
        group: RunningGroup,
        number: int,
        episode: Episode,
        *,
        after: Sequence[TurnPoint] = (),
        trail: list[TurnPoint] | None = None,
    ) -> None:
        """Take an episode to its end; with a trail what was read for it is kept for others."""
        try:
            async with self._slots:
                with self._timeline.span("episode", group.track, number):
                    start_s = time.monotonic()
                    policy = _TimedPolicy(self._policy, self._timeline, group.track, number)
                    await self.episodes.run(episode, policy, after=after, trail=trail)
                    others_s = time.monotonic() - start_s - policy.generated_s
                    self._timeline.count("environment", others_s)
        finally:
            if trail is None:
                self._policy.engine.end_session(episode.id)
            self.num_open -= 1
            group.num_open -= 1
            if episode.is_done:  # and not cancelled
                drawn = episode.sampled_versions
                versions = (int(drawn.min()), int(drawn.max())) if len(drawn) else None
                group.ends[number] = EpisodeEnd(len(drawn), versions, episode.stop_reason)
            self._on_end(group, number)
            if not group.num_open:
                self.num_ended += not group.cancelled_for
                self.wake.set()

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._finishers, function, *arguments)

    async def end(self) -> None:
        """Give back what nobody will score, and end the threads; no group runs any more."""
        self.episodes.calls.abandon()  # what is being scored: wait for no reward
        left = [episode for group in self.groups.values() for episode in group.episodes]
        if left:
            await asyncio.to_thread(self.episodes.give_up, left)
        await asyncio.to_thread(self._finishers.shutdown)


class _TimedPolicy:
    """A policy whose turns are noted."""

    def __init__(self, policy: AsyncPolicy, timeline: Timeline, track: str, line: int) -> None:
        self._policy = policy
        self._timeline = timeline
        self._place = (track, line)
        self.generated_s = 0.0

    async def take_turn(self, conversation: Any, **kwargs: Any) -> tuple[Any, str]:
        start_s = time.monotonic()
        try:
            with self._timeline.span("generate", *self._place):
                return await self._policy.take_turn(conversation, **kwargs)
        finally:
            self.generated_s += time.monotonic() - start_s


def scored_rows(
    runner: AsyncEpisodeRunner, episodes: Sequence[Episode], further_entries: Sequence[str]
) -> list[TensorDictBase]:
    """Score episodes that are over, and give what is trained of them; may take its time.

    Args:
        runner: of the environment.
        episodes: of one group or test.
        further_entries: see :attr:`~torchrl_envs.EpisodeEnv.reward_entries`.
    """
    batch = runner.finish(episodes)
    by_episode = trajectory_rows(batch, range(len(episodes)), further=further_entries)
    return [row for rows in by_episode for row in rows]


async def run_together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines at once; when one fails the others are cancelled and waited for.

    Raises:
        Exception: what the first one raised.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise

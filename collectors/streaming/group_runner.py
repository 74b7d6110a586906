"""The episodes of one group, run and traced."""

import asyncio
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from tensordict import TensorDictBase

from collectors.ledger import Ticket
from collectors.llm_collector import trajectory_rows
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_env import AsyncEpisodeRunner, Prompt
from torchrl_modules.policies.base import AsyncPolicy

# What happened when: spans of episodes and of the trainer, as a Chrome trace.


class Span(NamedTuple):
    """Something that took time."""

    name: str
    track: str
    """What it is a part of: the trainer, or a group of episodes."""
    line: int
    """Of the track: the number of the episode in its group."""
    start_s: float
    end_s: float


class Timeline:
    """Notes spans, sums them up by name, and writes them for a trace viewer.

    Args:
        max_spans: so many of the latest are kept.
        clock: seconds, from any beginning.
    """

    def __init__(
        self, *, max_spans: int = 20_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._lock = threading.Lock()
        self._totals: dict[str, float] = defaultdict(float)
        self._begin = clock()

    @contextmanager
    def span(self, name: str, track: str, line: int = 0) -> Iterator[None]:
        """Note what is inside, be it awaited.

        Args:
            name: of what is done: ``"generate"``, ``"environment"``, ``"score"``, ...
            track: what it is a part of.
            line: of the track.
        """
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, track, line, start, self._clock())

    def add(self, name: str, track: str, line: int, start_s: float, end_s: float) -> None:
        """Note a span whose beginning and end are known; see :meth:`span`."""
        with self._lock:
            self._spans.append(Span(name, track, line, start_s, end_s))
            self._totals[name] += end_s - start_s

    def take_totals(self) -> dict[str, float]:
        """Seconds by name since they were last taken, added up over all tracks."""
        with self._lock:
            totals, self._totals = dict(self._totals), defaultdict(float)
            return totals

    def write(self, path: str | Path) -> None:
        """Write what is kept; chrome://tracing and ui.perfetto.dev show it.

        Args:
            path: of the JSON file.
        """
        with self._lock:
            spans = list(self._spans)
        tracks = {track: i for i, track in enumerate(dict.fromkeys(s.track for s in spans), 1)}
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": track}}
            for track, pid in tracks.items()
        ]
        events += [
            {
                "name": span.name,
                "ph": "X",
                "pid": tracks[span.track],
                "tid": span.line,
                "ts": 1e6 * (span.start_s - self._begin),
                "dur": 1e6 * (span.end_s - span.start_s),
            }
            for span in spans
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


# The episodes of one group, from their draw to the rows that are trained.

_MAX_FINISHERS: Final = 64


@dataclass(slots=True)
class Group:
    """The episodes of one prompt."""

    ticket: Ticket
    prompt: Prompt
    episodes: list[Episode]
    rows: list[TensorDictBase] = field(default_factory=list)
    """What is trained of it, once it is scored."""
    task: asyncio.Task[None] | None = None
    num_open: int = field(init=False)
    """Episodes that are not over."""
    cancelled_for: str = ""
    """Why it was cancelled, if it was."""

    def __post_init__(self) -> None:
        self.num_open = len(self.episodes)

    async def run(self, runner: "GroupRunner") -> None:
        """Take all episodes to their ends, and score them; raises as :meth:`GroupRunner.run`."""
        self.task = asyncio.get_running_loop().create_task(runner.run(self))
        if self.cancelled_for:
            self.task.cancel()
        await self.task

    def cancel(self, reason: str) -> None:
        """Let it end, from without :meth:`run`, which raises ``CancelledError``."""
        if not self.cancelled_for:
            self.cancelled_for = reason
            if self.task is not None:
                self.task.cancel()


class GroupRunner:
    """Runs the episodes of groups, each by itself, and scores a group when all of its are over.

    What blocks (drawing data, scoring, giving back) is done in threads. To be used in one event
    loop.

    Args:
        runner: of the environment.
        policy: takes turns.
        group_size: episodes of a group.
        max_episodes: that run at once.
        further_entries: of the scoring, see :attr:`~torchrl_envs.EpisodeEnv.reward_entries`.
        timeline: notes what takes how long.
        on_end: told of each episode that is over: its group, its number in it, and itself.
    """

    def __init__(
        self,
        runner: AsyncEpisodeRunner,
        policy: AsyncPolicy,
        *,
        group_size: int,
        max_episodes: int,
        further_entries: Sequence[str],
        timeline: Timeline,
        on_end: Callable[[Group, int, Episode], None],
    ) -> None:
        self._runner = runner
        self._policy = policy
        self._group_size = group_size
        self._further = further_entries
        self._timeline = timeline
        self._on_end = on_end
        runner.allow(max_episodes)
        self._slots = asyncio.Semaphore(max_episodes)
        self._finishers = ThreadPoolExecutor(_MAX_FINISHERS, thread_name_prefix="finish-group")

    async def run(self, group: Group) -> None:
        """Take all episodes to their ends, and score them.

        Raises:
            EngineDied: the engine is gone; the others were cancelled.
        """
        await run_together(
            self._run_episode(group, number, episode)
            for number, episode in enumerate(group.episodes)
        )
        loop = asyncio.get_running_loop()
        with self._timeline.span("score", _track(group), self._group_size):
            await loop.run_in_executor(self._finishers, self._score, group)

    async def _run_episode(self, group: Group, number: int, episode: Episode) -> None:
        try:
            async with self._slots:
                with self._timeline.span("episode", _track(group), number):
                    policy = _TimedPolicy(self._policy, self._timeline, _track(group), number)
                    await self._runner.run(episode, policy)
        finally:
            self._policy.engine.end_session(episode.id)
            self._on_end(group, number, episode)

    def _score(self, group: Group) -> None:
        group.rows = scored_rows(self._runner, group.episodes, self._further)

    def abandon(self) -> None:
        """Nobody will have what is being scored: wait for no reward any more."""
        self._runner.abandon()

    async def give_up(self, episodes: list[Episode]) -> None:
        """Give back what episodes hold that nobody will score."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._finishers, self._runner.give_up, episodes)

    def close(self) -> None:
        """Wait for what is done in threads, and end them."""
        self._finishers.shutdown(wait=True)


class _TimedPolicy:
    """A policy whose turns are noted."""

    def __init__(self, policy: AsyncPolicy, timeline: Timeline, track: str, line: int) -> None:
        self._policy = policy
        self._timeline = timeline
        self._place = (track, line)

    async def take_turn(self, conversation: Any, **kwargs: Any) -> tuple[Any, str]:
        with self._timeline.span("generate", *self._place):
            return await self._policy.take_turn(conversation, **kwargs)


def _track(group: Group) -> str:
    return f"group {group.ticket.ordinal}"


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
    rows = trajectory_rows(batch, range(len(episodes)), further=further_entries)
    return [row for own in rows for row in own]


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

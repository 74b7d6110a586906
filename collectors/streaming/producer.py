"""The side of a streaming collection that runs in an event loop: episodes, groups, admission."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from tensordict import TensorDictBase

from collectors.ledger import Eviction, GroupLedger, Ticket
from collectors.ledger.reasons import ENGINE_DIED, LOAD, NO_SIGNAL, STALE
from torchrl_envs.datasets.difficulty import rollout_rewards
from torchrl_envs.episode.episode import Episode
from torchrl_modules.engines.batching_engine import BatchingEngine
from torchrl_modules.engines.protocol import EngineDied
from torchrl_modules.policies.async_policy import AsyncPolicy

from .group_runner import Group, GroupRunner
from .loop_thread import LoopThread
from .prompt_queue import PromptQueue

MAX_DEATHS: Final = 3
"""Of an engine, under each of what it draws, until that is not tried again."""
MakeRunner = Callable[..., GroupRunner]
_log = logging.getLogger(__name__)


class Follower(Protocol):
    """Limits the groups of a producer, see :class:`~.load_follower.LoadFollower`."""

    async def run(self, groups: "Producer") -> None:
        """Until it is cancelled."""
        ...


class Producer(LoopThread):
    """Runs groups of episodes without a barrier, as many as the ledger admits.

    Its methods are called by the trainer's thread; everything else happens in an event loop on a
    thread of its own. What the two share is guarded by ``changed``.

    Args:
        make_runner: makes what runs groups, given ``on_end``.
        policy: takes turns.
        ledger: admits groups, and knows what became of each.
        prompts: of the groups.
        is_wanted: whether the rows of a finished group are worth training.
        max_unwanted: groups in a row that are not before it gives up.
        follower: limits the groups that run, in the event loop.
    """

    def __init__(
        self,
        make_runner: MakeRunner,
        policy: AsyncPolicy,
        ledger: GroupLedger,
        prompts: PromptQueue,
        *,
        is_wanted: Callable[[Sequence[TensorDictBase]], bool],
        max_unwanted: int,
        follower: Follower | None = None,
    ) -> None:
        super().__init__()
        self._make_runner = make_runner
        self._groups_runner: GroupRunner
        self._policy = policy
        self._ledger = ledger
        self._prompts = prompts
        self._is_wanted = is_wanted
        self._max_unwanted = max_unwanted
        self._follower = follower
        self._max_groups: float = math.inf
        self.finished: dict[Ticket, Group] = {}
        self.steps = {policy.version: ledger.version}
        """By version of the engine: the steps of training that are in these weights."""
        self.is_exhausted = False
        """No more data will be drawn."""
        self._num_unwanted = self._num_deaths = 0
        self.num_open = 0
        """Episodes that were admitted and are not over."""
        self.num_ended = 0
        """Groups whose episodes have all run to their ends."""
        self._groups: dict[Ticket, Group] = {}
        self._has_begun = False
        self._num_holds = 1  # until it is to begin
        self.weights: asyncio.Lock
        """Held, in the event loop, by who replaces the weights or needs them to stay."""

    # For the trainer's thread -------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of the weights that serve."""
        return self._policy.version

    @property
    def is_drained(self) -> bool:
        """Whether nothing more will come; to be asked while ``changed`` is held."""
        return self.is_exhausted and not self._groups and not self._prompts

    def begin(self) -> None:
        """Begin to collect, if that has not begun."""
        if not self._has_begun:
            self._has_begun = True
            self.release()

    def hold(self) -> None:
        """Begin no further group until as often released as held."""
        with self.changed:
            self._num_holds += 1

    def release(self) -> None:
        """See :meth:`hold`."""
        with self.changed:
            self._num_holds -= 1
        self.wake()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Groups may begin in here only."""
        self.release()
        try:
            yield
        finally:
            self.hold()

    def forget(self, eviction: Eviction) -> None:
        """A finished group is not trained; to be called while ``changed`` is held."""
        group = self.finished.pop(eviction.ticket)
        self._prompts.owe(eviction.refill, group.prompt)

    def drop_stale(self) -> None:
        """Cancel the groups that run and have become too old; to be called in the event loop."""
        with self.changed:
            stale = [self._groups[ticket] for ticket in self._ledger.stale_tickets()]
        for group in stale:
            group.cancel(STALE)

    # In the event loop --------------------------------------------------------------------------

    def _begin_in_loop(self) -> None:
        self.weights = asyncio.Lock()
        self._groups_runner = self._make_runner(on_end=self._note_end)
        self._spawn(self._admit_all())
        if self._follower is not None:
            self._spawn(self._follower.run(self))

    async def _end(self) -> None:
        self._groups_runner.abandon()
        left = [episode for group in self._groups.values() for episode in group.episodes]
        if left:
            await self._groups_runner.give_up(left)
        self._prompts.close()
        self._groups_runner.close()
        with self.changed:
            self._groups.clear()
            self._ledger.return_all()
            self.changed.notify_all()

    @property
    def num_running(self) -> int:
        """Groups whose episodes are not all over."""
        return len(self._running())

    def _running(self) -> list[Group]:
        """Groups whose episodes are not all over, the oldest first."""
        return [group for group in self._groups.values() if group.num_open]

    def limit_groups(self, most: int) -> None:
        """Let at most so many groups run; the youngest of those that do are dropped.

        Args:
            most: at least 1.
        """
        self._max_groups = most
        for group in self._running()[most:]:
            group.cancel(LOAD)
        self._wake.set()

    async def _admit_all(self) -> None:
        """Begin a group whenever the ledger lets one in."""
        while True:
            while self._may_admit() and await self._admit_one():
                pass
            self._look_for_batch()
            await self._wake.wait()
            self._wake.clear()

    def _may_admit(self) -> bool:
        with self.changed:
            if self._num_holds or (self.is_exhausted and not self._prompts):
                return False
            return self._ledger.can_admit() and self.num_running < self._max_groups

    def num_expected(self) -> float:
        """How many episodes will ask for a turn, given time: all that are open or may yet be."""
        return math.inf if self._may_admit() else self.num_open

    def _look_for_batch(self) -> None:
        if isinstance(self._policy.engine, BatchingEngine):
            self._policy.engine.check()

    async def _admit_one(self) -> bool:
        """Begin one group; False if there are no data for it."""
        drawn = await self._prompts.draw()
        with self.changed:
            if drawn is None:
                self.is_exhausted = True
                self.changed.notify_all()
                return False
            ticket = self._prompts.offer(drawn)
            episodes = self._prompts.episodes_of(drawn, ticket)
            group = self._groups[ticket] = Group(ticket, drawn.prompt, episodes)
            self._ledger.start(ticket)
        self.num_open += len(episodes)
        self._spawn(self._run_group(group))
        return True

    async def _run_group(self, group: Group) -> None:
        try:
            await group.run(self._groups_runner)
        except EngineDied as died:
            self._num_deaths += 1
            if self._num_deaths >= MAX_DEATHS * max(1, len(self._groups)):
                raise
            _log.warning("The engine died under a group, which is drawn again: %s", died)
            await self._give_up(group, ENGINE_DIED)
        except asyncio.CancelledError:
            if not group.cancelled_for:
                raise
            await self._give_up(group, group.cancelled_for)
        else:
            self._num_deaths = 0
            self._keep(group)
        self._wake.set()

    def _note_end(self, group: Group, number: int, episode: Episode) -> None:
        self.num_open -= 1
        group.num_open -= 1
        if episode.is_done:  # and not cancelled
            sampled = episode.sampled_versions
            ends = (int(sampled.min()), int(sampled.max())) if len(sampled) else None
            with self.changed:
                self._ledger.finish_episode(
                    group.ticket,
                    number,
                    tokens=len(sampled),
                    oldest_version=None if ends is None else self.steps[ends[0]],
                    newest_version=None if ends is None else self.steps[ends[1]],
                    stop_reason=episode.stop_reason,
                )
        self._look_for_batch()
        if not group.num_open:
            self.num_ended += not group.cancelled_for
            self._wake.set()  # another one may run

    def _keep(self, group: Group) -> None:
        """A group is scored: it waits for the trainer, or is asked for again."""
        wanted = self._is_wanted(group.rows)
        rewards = rollout_rewards(group.rows) if self._prompts.has_pools else ()
        with self.changed:
            del self._groups[group.ticket]
            self._prompts.observe(group.prompt, rewards)
            if wanted:
                self._ledger.finish(group.ticket)
                self.finished[group.ticket] = group
            else:
                self._drop(group, NO_SIGNAL)
            self._num_unwanted = 0 if wanted else self._num_unwanted + 1
            self.changed.notify_all()
        if self._num_unwanted >= self._max_unwanted:
            raise RuntimeError(
                f"{self._num_unwanted} groups in a row were refused, because their rewards are "
                "equal, and asked for again. Make the task easier or harder, or take "
                "MCAdvantage(zero_variance='keep')."
            )

    def _drop(self, group: Group, reason: str) -> None:
        """Account for a group that nobody trains; draw its prompt again if the ledger says so."""
        self._prompts.owe(self._ledger.drop(group.ticket, reason), group.prompt)

    async def _give_up(self, group: Group, reason: str) -> None:
        """A group that runs is dropped."""
        self.num_open -= group.num_open  # those that had not begun to run
        group.num_open = 0
        await self._groups_runner.give_up(group.episodes)
        with self.changed:
            del self._groups[group.ticket]
            self._drop(group, reason)
            self.changed.notify_all()

"""Producer of a streaming collection in an event loop: episodes, groups, admission.

The loop::

    _admit_all: while ledger, cap and holds let one in: draw -> offer -> start a group
    _run_group: its episodes -> finished, or given up -> wake _admit_all and the trainer
    push:       weights lock -> engine -> ledger: groups that are too old now are cancelled
    take:       the trainer's thread waits for a whole batch; woken by every change
    evaluate:   holds admission, and the weights lock, until all of its episodes are over
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from collectors.composition_checks import check_fit
from collectors.ledger import GroupLedger, GroupState, Ticket
from collectors.ledger.reasons import STALE
from collectors.refill import is_wanted, max_draws_of
from objectives.advantages.mc_advantage import ByGroups
from torchrl_envs.datasets.primer import DataExhaustedError, DataLoadingPrimer
from torchrl_envs.episode.async_runner import AsyncEpisodeRunner
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_modules.engines.batching_engine import BatchingEngine
from torchrl_modules.engines.engine import push_weights
from torchrl_modules.policies.async_policy import AsyncPolicy

from .checks import WHO
from .evaluation_point import EvaluationPoint, draw_point
from .group_runner import GroupRunner, RunningGroup
from .group_scheduler import GroupScheduler
from .load_cap import GroupCap
from .loop_thread import LOOK_S, CollectionThread
from .timeline import Timeline

T = TypeVar("T")


class Producer(CollectionThread):
    """Runs groups of episodes without a barrier, as many as the ledger admits.

    Its methods are called by the trainer's thread; everything else happens in an event loop on a
    thread of its own. What the two share is guarded by ``changed``.

    Args:
        env: of the episodes.
        policy: takes turns.
        ledger: says which groups begin and which are taken.
        loader: of the environment, if its place in the data is known.
        max_episodes: that run at once.
        advantages: say whether the rows of a finished group are worth training.
        timeline: notes what takes how long.
        cap: limits the groups that run by the engine's load.
    """

    def __init__(
        self,
        env: EpisodeEnv,
        policy: AsyncPolicy,
        ledger: GroupLedger,
        loader: DataLoadingPrimer | None,
        *,
        max_episodes: int,
        advantages: Sequence[ByGroups],
        timeline: Timeline,
        cap: GroupCap | None,
    ) -> None:
        super().__init__(WHO)
        self.policy, self.ledger, self.timeline = policy, ledger, timeline
        self.runner = GroupRunner(
            env,
            policy,
            group_size=ledger.group_size,
            max_episodes=max_episodes,
            timeline=timeline,
            on_end=self._note_end,
        )
        runner = self.runner.episodes
        own = {"version": policy.version, "max_draws": max_draws_of(advantages)}
        self.queue = GroupScheduler(runner, ledger, loader, **own, who=WHO)
        self._advantages = advantages
        self.cap = cap
        self.taken: list[Ticket] = []
        """The batch that the trainer has, and has not told to be trained."""
        self._batch: dict[Ticket, RunningGroup] = {}
        """Their groups."""
        self.is_with_caller = True
        """Whether the rows of those taken have reached who asked for them."""
        self.num_queued = 0
        """Finished groups that were left when the trainer took its own."""
        self._has_begun = False
        self._num_holds = 1  # until it is to begin
        self.weights = asyncio.Lock()
        """Held, in the event loop, by who replaces the weights or needs them to stay."""
        self._evaluation: Future[EvaluationPoint] | None = None
        self._points: deque[EvaluationPoint] = deque()

    # For the trainer's thread -------------------------------------------------------------------

    def open(self) -> None:
        """Start the event loop, unless it runs.

        Raises:
            RuntimeError: the collection has failed or was stopped.
        """
        self.check_open()
        if not self.is_alive:
            self.start(
                self._admit_all(), *([] if self.cap is None else [self.cap.follow(self.runner)])
            )

    def wake(self) -> None:
        """Look again whether there is anything to do."""
        self._call_soon(self.runner.wake.set)

    def begin(self) -> None:
        """Begin to collect, if that has not begun."""
        if not self._has_begun:
            self._has_begun = True
            self._hold(-1)

    @contextmanager
    def holding(self, change: int = 1) -> Iterator[None]:
        """Begin no further group in here; with -1, begin them in here only."""
        self._hold(change)
        try:
            yield
        finally:
            self._hold(-change)

    def _hold(self, change: int) -> None:
        with self.changed:
            self._num_holds += change
        self.wake()

    def take(self) -> list[RunningGroup]:
        """Wait for the groups of the next batch.

        Raises:
            DataExhaustedError: there are no more data, and nothing is under way.
            RuntimeError: the collection has failed; the cause is attached.
        """
        begin_s = time.monotonic()
        with self.changed:
            while True:
                self.check_open()
                tickets = self.queue.take(is_idle=not self.runner.groups)
                if tickets is not None:
                    break
                self.wake()
                self.changed.wait(LOOK_S)
            if not tickets:
                raise DataExhaustedError(f"{WHO}: all data were drawn and trained.")
            self._batch = {ticket: self.queue.finished.pop(ticket) for ticket in tickets}
            self.taken, self.is_with_caller = tickets, False
            self.num_queued = len(self.queue.finished)
        self.timeline.add("wait for rollouts", "trainer", 0, begin_s, time.monotonic())
        self.wake()
        return list(self._batch.values())

    def put_back(self) -> None:
        """Let the groups that were taken last be taken again: the trainer has not had them."""
        with self.changed:
            self.ledger.put_back()
            self.queue.finished |= self._batch
            self.taken, self._batch = [], {}

    def used(self) -> list[Ticket]:
        """Return what the trainer has used since it last said so."""
        taken, self.taken = self.taken, []
        return taken

    def unchanged(self) -> None:
        """Steps were made without a push."""
        ledger = self.ledger
        with self.changed:
            self.check_open()
            if ledger.weight_sync_steps == 1:
                # Who pushes after every step, and has not, has not changed the weights.
                step = self.queue.trained(self.used(), self.policy.version)
                ledger.weights_pulled(step)
            else:
                ledger.trained(self.used(), ledger.version)
        self.wake()

    def result_of(self, future: "Future[T]") -> T:
        """Wait for a push, which the timeline notes."""
        with self.timeline.span("wait for push", "trainer", 0):
            return super().result_of(future)

    def state(self) -> dict[str, Any]:
        """The ledger, the place in the data, and the rows of the groups that wait."""
        with self.changed:
            waiting = [
                {"ordinal": ticket.ordinal, "rows": list(group.rows)}
                for ticket, group in self.queue.finished.items()
            ]
            taken = [ticket.ordinal for ticket in self.taken] if self.is_with_caller else []
            return {**self.queue.state(), "waiting": waiting, "taken": taken}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; the loader is at the first prompt that is not done.

        Raises:
            ValueError: the data are drawn in another order, or the ledger's settings differ.
        """
        rows = {each["ordinal"]: list(each["rows"]) for each in state["waiting"]}
        with self.changed:
            prompts = self.queue.load(state, {*rows, *state["taken"]}, self.policy.version)
            for ticket, prompt in prompts.items():
                self.queue.finished[ticket] = RunningGroup(ticket, prompt, [], rows[ticket.ordinal])
        batches = self.ledger.batches
        self.taken = batches[0] if batches else []
        assert self.queue.finished.keys() >= set(self.ledger.tickets(GroupState.FINISHED))

    # In the event loop --------------------------------------------------------------------------

    async def push(
        self, weights: Mapping[str, Tensor], version: int, step: int, *, recompute: bool
    ) -> None:
        """Give the engine weights with a step of training in them; what is too old then ends."""
        with self.timeline.span("push weights", "trainer", 1):
            async with self.weights:
                await push_weights(
                    self.policy.engine, weights, version=version, recompute=recompute
                )
        with self.changed:
            self.ledger.weights_pulled(step)
            stale = [self.runner.groups[ticket] for ticket in self.ledger.stale_tickets()]
            self.changed.notify_all()
        for group in stale:
            group.cancel(STALE)
        self.wake()

    async def _end(self) -> None:
        await self.runner.end()
        self.queue.close()
        with self.changed:
            self.runner.groups.clear()
            self.ledger.return_all()
            self.changed.notify_all()

    async def _admit_all(self) -> None:
        """Begin a group whenever the ledger lets one in."""
        while True:
            while self._may_admit():
                drawn = await self.queue.draw()
                with self.changed:
                    if drawn is None:
                        self.changed.notify_all()
                        break
                    ticket = self.queue.offer(drawn)
                    episodes = drawn.episodes or self.runner.episodes.draw_again(
                        drawn.prompt, ticket.seed, self.ledger.group_size
                    )
                    group = self.runner.add(ticket, drawn.prompt, episodes)
                self._spawn(self._run_group(group))
            self._look_for_batch()
            await self.runner.wake.wait()
            self.runner.wake.clear()

    def _may_admit(self) -> bool:
        with self.changed:
            return not self._num_holds and self.queue.may_draw() and self.runner.has_room

    def num_expected(self) -> float:
        """Number of episodes that will ask for a turn: those that are open or may yet be."""
        return math.inf if self._may_admit() else self.runner.num_open

    def _look_for_batch(self) -> None:
        if isinstance(self.policy.engine, BatchingEngine):
            self.policy.engine.check()

    async def _run_group(self, group: RunningGroup) -> None:
        given_up_for = await self.runner.run(group)
        trains = not given_up_for and is_wanted(group.rows, self._advantages)
        pools = self.queue.pools
        rewards = () if pools is None or given_up_for else pools.rewards_of(group.rows)
        with self.changed:
            del self.runner.groups[group.ticket]
            if given_up_for:
                self.queue.drop(group.ticket, group.prompt, given_up_for)
            else:
                self.queue.finish(group.ticket, group, rewards, is_wanted=trains)
            self.changed.notify_all()
        self.runner.wake.set()
        if self.queue.error:
            raise RuntimeError(self.queue.error)

    def _note_end(self, group: RunningGroup, number: int) -> None:
        if number in group.ends:
            with self.changed:
                self.queue.end_episode(group.ticket, number, group.ends[number])
        self._look_for_batch()

    # Evaluation ---------------------------------------------------------------------------------

    def evaluate(self, env: EpisodeEnv, *, wait: bool) -> EvaluationPoint | None:
        """Evaluate the weights that serve now, one point at a time; no group begins meanwhile.

        Args:
            env: with held-out data.
            wait: until it is over, and before for one that runs; else this one is skipped then.
        """
        step = self.ledger.version
        if not wait and self._is_evaluating:
            self._points.append(EvaluationPoint(step, self.policy.version, None, "one was running"))
            return self._points[-1]
        self._settle()
        check_fit(env, self.policy.policy, who="evaluate")
        runner = AsyncEpisodeRunner(env)
        runner.calls.allow_threads(env.batch_size.numel())

        async def draw() -> EvaluationPoint:
            with self.holding():
                async with self.weights:
                    with self.timeline.span("evaluate", "trainer", 2):
                        point = await draw_point(env, runner, self.policy, step)
            self._points.append(point)
            return point

        self._evaluation = self.submit(draw())
        return self._settle() if wait else None

    def take_evaluations(self) -> list[EvaluationPoint]:
        """The points that are over, as they ended; given once."""
        if not self._is_evaluating:
            self._settle()
        return [self._points.popleft() for _ in range(len(self._points))]

    @property
    def _is_evaluating(self) -> bool:
        return self._evaluation is not None and not self._evaluation.done()

    def _settle(self) -> EvaluationPoint | None:
        """Wait for the point that runs; what broke it is raised, once."""
        if (running := self._evaluation) is None:
            return None
        futures.wait([running])
        self._evaluation = None
        return None if running.cancelled() else running.result()

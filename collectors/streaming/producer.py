"""What runs beside training.

Prompts are drawn, and groups and evaluations run in one event loop.
"""

import asyncio
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from tensordict import TensorDictBase, lazy_stack

from collectors.composition_checks import check_fit
from collectors.ledger import Eviction, GroupLedger, GroupState, Refill, Ticket
from collectors.ledger.groups import ENGINE_DIED, LOAD, NO_SIGNAL, STALE
from torchrl_data.keys import TOKEN_POLICY_VERSION
from torchrl_data.stop_reasons import NO_DATA
from torchrl_envs.datasets.primer import DataExhaustedError, DataLoadingPrimer, rollout_rewards
from torchrl_envs.datasets.rows import Place
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_env import AsyncEpisodeRunner, EpisodeEnv, Prompt, prompt_of
from torchrl_modules.engines.bridges import BatchingEngine
from torchrl_modules.engines.engine import EngineDied
from torchrl_modules.policies.base import AsyncPolicy

from .group_runner import Group, GroupRunner, Timeline, run_together, scored_rows
from .load import WHO

# An event loop on a thread of its own, which the trainer's thread starts, asks and stops.

T = TypeVar("T")


class LoopThread(ABC):
    """Runs tasks in an event loop until it is stopped, or one of them fails."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Held while what is shared is read or written; told of every change."""
        self.error: BaseException | None = None
        self.is_over = False
        """It was stopped, or has failed."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # For the trainer's thread -------------------------------------------------------------------

    def start(self) -> None:
        """Start the event loop."""
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(started)), name="collector", daemon=True
        )
        self._thread.start()
        started.wait()

    def wake(self) -> None:
        """Look again whether there is anything to do."""
        if (loop := self._loop) is not None:
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(self._wake.set)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run something in the event loop.

        Raises:
            RuntimeError: the collection has ended.
        """
        if self._loop is None or self.is_over:
            coroutine.close()
            self.check_alive()
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @property
    def is_alive(self) -> bool:
        """Whether the event loop runs."""
        return self._thread is not None and self._thread.is_alive()

    def check_open(self) -> None:
        """Check that it has neither failed nor was stopped.

        Raises:
            RuntimeError: it has, or was; what it failed of is the cause.
        """
        if self.error is not None:
            raise RuntimeError(
                f"{WHO}: the collection has failed: {type(self.error).__name__}: {self.error}"
            ) from self.error
        if self.is_over:
            raise RuntimeError(f"{WHO}: it was shut down.")

    def check_alive(self) -> None:
        """Check that it is under way.

        Raises:
            RuntimeError: it is not; what it failed of is the cause.
        """
        self.check_open()
        if not self.is_alive:
            raise RuntimeError(f"{WHO}: the collection has ended.")

    def stop(self, timeout_s: float) -> None:
        """Cancel what runs, let it end, and end the thread.

        Raises:
            TimeoutError: it does not end.
        """
        self.is_over = True
        if self._thread is None:
            return
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"The collection did not end within {timeout_s:g} s: a tool, an environment or the "
                "engine holds it up."
            )

    # In the event loop --------------------------------------------------------------------------

    async def _main(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake, self._stopping = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._begin_in_loop()
        started.set()
        try:
            await self._stopping.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._end()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a task; when it fails everything ends, and the trainer hears of it at once."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            with self.changed:
                self.error, self.is_over = self.error or error, True
                self.changed.notify_all()
            self._stopping.set()

    @abstractmethod
    def _begin_in_loop(self) -> None:
        """Begin what runs in the event loop."""

    @abstractmethod
    async def _end(self) -> None:
        """All tasks have ended: give back what is left."""


# Which prompt comes next: one that is owed, or the next one of the data.


class DrawnPrompt(NamedTuple):
    """A prompt that is about to be offered to the ledger."""

    ordinal: int
    prompt: Prompt
    episodes: list[Episode]
    """Drawn with it; none where the ledger has to say with which seed."""


class _Drawn(NamedTuple):
    """A prompt that is not done."""

    place: Place
    """Of the data, before it was drawn."""
    group_id: int | str


class PromptQueue:
    """Draws prompts in the order of the data; before them, the lowest first, those that are owed.

    :meth:`draw` is for one event loop; the others for whoever holds the collection's lock.

    Args:
        runner: of the environment.
        ledger: numbers the prompts.
        group_size: episodes of a prompt.
        loader: of the environment; ``None`` where something else draws, whose place is not known.
        who: is told of in errors.
    """

    def __init__(
        self,
        runner: AsyncEpisodeRunner,
        ledger: GroupLedger,
        group_size: int,
        loader: DataLoadingPrimer | None,
        *,
        who: str = WHO,
    ) -> None:
        self._runner = runner
        self._ledger = ledger
        self._group_size = group_size
        self._loader = loader
        self._who = who
        self._owed: dict[int, tuple[Refill, Prompt]] = {}
        self._kept: DrawnPrompt | None = None
        self._pools = None if loader is None else loader.pools
        self._undone: dict[int, _Drawn] = {}
        """The prompts that are not done, by ordinal."""
        self._next_place = None if loader is None else loader.place
        self._next_ordinal = 0
        self._drawer = ThreadPoolExecutor(1, thread_name_prefix="draw-group")

    def __bool__(self) -> bool:
        """Whether a prompt is owed, or kept."""
        return bool(self._owed) or self._kept is not None

    def keep(self, drawn: DrawnPrompt) -> None:
        """A prompt of the data is not offered yet: it is drawn next, after what is owed."""
        self._kept = drawn

    def owe(self, refill: Refill | None, prompt: Prompt) -> None:
        """Draw a prompt again, if the ledger says so."""
        if refill is not None:
            self._owed[refill.ordinal] = (refill, prompt)

    async def draw(self) -> DrawnPrompt | None:
        """The next prompt, of which the ledger hears by :meth:`offer`; ``None``: there is none."""
        if self._owed:
            refill, prompt = self._owed[min(self._owed)]
            return DrawnPrompt(refill.ordinal, prompt, [])
        if self._kept is not None:
            drawn, self._kept = self._kept, None
            return drawn
        loop = asyncio.get_running_loop()
        episodes = await loop.run_in_executor(self._drawer, self._draw)
        if not episodes:
            return None
        return DrawnPrompt(self._next_ordinal, prompt_of(episodes[0]), episodes)

    def _draw(self) -> list[Episode]:
        """Episodes of the next prompt of the data; none if there is none."""
        try:
            episodes = self._runner.draw(self._group_size)
        except DataExhaustedError:
            return []
        if any(episode.stop_reason == NO_DATA for episode in episodes):
            self._runner.give_up(episodes)
            return []
        return episodes

    def offer(self, drawn: DrawnPrompt) -> Ticket:
        """Offer a prompt to the ledger; gives its ticket."""
        group_id = drawn.prompt.group_id
        if not drawn.episodes:
            ticket = self._ledger.offer(group_id, drawn.ordinal)
            del self._owed[drawn.ordinal]
            return ticket
        ticket = self._ledger.offer(group_id, drawn.ordinal, seed=drawn.episodes[0].seed)
        self._note_place(drawn.ordinal, group_id)
        return ticket

    def episodes_of(self, drawn: DrawnPrompt, ticket: Ticket) -> list[Episode]:
        """The episodes of a prompt that was offered."""
        return drawn.episodes or self._runner.draw_again(
            drawn.prompt, ticket.seed, self._group_size
        )

    def _note_place(self, ordinal: int, group_id: int | str) -> None:
        self._next_ordinal = ordinal + 1
        if self._loader is None or self._next_place is None:
            return
        self._undone[ordinal] = _Drawn(self._next_place, group_id)
        self._next_place = self._loader.place
        for done in [o for o in self._undone if o < self._ledger.frontier]:
            del self._undone[done]

    @property
    def has_pools(self) -> bool:
        """Whether difficulty pools say which prompts are drawn."""
        return self._pools is not None

    def observe(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """Tell the difficulty pools, if there are any, of a finished group."""
        if self._pools is not None:
            self._pools.observe_group(prompt.group_id, rewards)

    def close(self) -> None:
        """Wait for what is being drawn."""
        self._drawer.shutdown(wait=True)

    # Resume -------------------------------------------------------------------------------------

    def data_state(self) -> Mapping[str, Any]:
        """The loader's state at the first prompt that is not done.

        Raises:
            TypeError: there is no loader.
        """
        if self._loader is None or self._next_place is None:
            raise TypeError(
                f"{self._who}.state_dict: the data come from no DataLoadingPrimer, so nobody knows "
                "where a resumed run would go on."
            )
        frontier = self._ledger.frontier
        undone = self._undone.get(frontier)
        state = self._loader.state_from(self._next_place if undone is None else undone.place)
        if self._pools is None:
            return state
        # Which rows the pools leave out depends on when they are asked: they are not asked again.
        drawn = [int(each.group_id) for o, each in sorted(self._undone.items()) if o >= frontier]
        return {**state, "drawn": drawn}

    def load_state(self, state: Mapping[str, Any]) -> dict[Ticket, Prompt]:
        """Draw again what the ledger, which was restored, knows of.

        Args:
            state: what :meth:`data_state` gave.

        Returns:
            The prompts of the finished groups that wait.

        Raises:
            ValueError: the data are others, or are drawn in another order than before.
            TypeError: there is no loader.
        """
        if self._loader is None:
            raise TypeError(
                f"{self._who}.load_state_dict: the data come from no DataLoadingPrimer, so nobody "
                "knows where to go on."
            )
        self._loader.set_extra_state(dict(state))
        ledger = self._ledger
        refills = {refill.ordinal: refill for refill in ledger.owed}
        waiting = {ticket.ordinal: ticket for ticket in ledger.tickets(GroupState.FINISHED)}
        restored = {}
        self._next_ordinal, self._next_place = ledger.frontier, self._loader.place
        if self._pools is not None:
            self._pools.admit_only(state["drawn"])
        for ordinal in range(ledger.frontier, ledger.next_ordinal):
            episodes = self._draw()
            if not episodes:
                raise ValueError(
                    f"{self._who}: the data end before prompt {ordinal}, drawn before."
                )
            prompt = prompt_of(episodes[0])
            self._runner.give_up(episodes)
            self._note_place(ordinal, prompt.group_id)
            known = refills.get(ordinal) or waiting.get(ordinal)
            if known is not None and known.group_id != prompt.group_id:
                raise ValueError(
                    f"{self._who}: prompt {ordinal} was of group {known.group_id}, and is of "
                    f"{prompt.group_id} now. The data are drawn in another order than before."
                )
            if ordinal in refills:
                self._owed[ordinal] = (refills[ordinal], prompt)
            elif ordinal in waiting:
                restored[waiting[ordinal]] = prompt
        if self._pools is not None:
            self._pools.admit_only(None)
        return restored


# The side of a streaming collection that runs in an event loop: episodes, groups, admission.

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


# Evaluation beside training: every token of a point is drawn by one version of the weights.


class EvaluationPoint(NamedTuple):
    """One evaluation."""

    step: int
    """Of the training when it was asked for."""
    version: int
    """Of the weights that drew every token of it."""
    trajectories: TensorDictBase | None
    """Rows ``[n]`` as a collector gives them; ``None`` where it was skipped."""
    skipped: str = ""
    """Why there are none."""


class Evaluator:
    """Runs the episodes of an environment once, with whatever weights serve.

    Args:
        env: with held-out data.
        policy: takes the turns.

    Raises:
        ValueError: environment and policy don't fit together.
    """

    def __init__(self, env: EpisodeEnv, policy: AsyncPolicy) -> None:
        check_fit(env, policy.policy, who="evaluate")
        self._env = env
        self._policy = policy
        self._runner = AsyncEpisodeRunner(env)
        self._runner.allow(env.batch_size.numel())

    async def run(self, step: int) -> EvaluationPoint:
        """Take the data from their beginning, one batch of the environment.

        Whoever calls it keeps the weights as they are. If the engine dies, all is drawn again.

        Raises:
            RuntimeError: a token was drawn by other weights.
            EngineDied: the engine died each of three times.
        """
        for _ in range(MAX_DEATHS - 1):
            try:
                return await self._run_once(step)
            except EngineDied as died:
                _log.warning("The engine died under an evaluation, which begins again: %s", died)
        return await self._run_once(step)

    async def _run_once(self, step: int) -> EvaluationPoint:
        for data in self._env.transforms_of(DataLoadingPrimer):
            data.rewind()
        version = self._policy.version
        size = self._env.batch_size.numel()
        episodes = await asyncio.to_thread(self._runner.draw, size)
        drawn = [episode for episode in episodes if episode.stop_reason != NO_DATA]
        try:
            await run_together(self._runner.run(episode, self._policy) for episode in drawn)
            further = self._env.reward_entries
            rows = await asyncio.to_thread(scored_rows, self._runner, drawn, further)
        except asyncio.CancelledError:
            self._runner.abandon()
            raise
        finally:
            await asyncio.to_thread(self._runner.give_up, episodes)
        _check_versions(rows, version)
        return EvaluationPoint(step, version, lazy_stack(rows))


class Evaluations:
    """Evaluates beside training, one point at a time.

    Args:
        producer: in whose event loop; it begins no group meanwhile.
        policy: takes the turns.
        timeline: notes how long it takes.
    """

    def __init__(self, producer: Producer, policy: AsyncPolicy, timeline: Timeline) -> None:
        self._producer = producer
        self._policy = policy
        self._timeline = timeline
        self._running: futures.Future[EvaluationPoint] | None = None
        self._points: deque[EvaluationPoint] = deque()

    def ask(self, env: EpisodeEnv, step: int, *, wait: bool) -> EvaluationPoint | None:
        """Evaluate the weights that serve now.

        Args:
            env: with held-out data.
            step: of the training.
            wait: until it is over, and before for one that runs; else this one is skipped then.
        """
        if wait or self._is_idle:
            self._settle()
            evaluator = Evaluator(env, self._policy)
            self._running = self._producer.submit(self._run(evaluator, step))
            return self._settle() if wait else None
        skipped = EvaluationPoint(step, self._policy.version, None, "one was running")
        self._points.append(skipped)
        return skipped

    def take(self) -> list[EvaluationPoint]:
        """The points that are over, as they ended; given once."""
        if self._is_idle:
            self._settle()
        return [self._points.popleft() for _ in range(len(self._points))]

    @property
    def _is_idle(self) -> bool:
        return self._running is None or self._running.done()

    def _settle(self) -> EvaluationPoint | None:
        """Wait for the point that runs; what broke it is raised, once."""
        running = self._running
        if running is None:
            return None
        futures.wait([running])
        self._running = None
        return None if running.cancelled() else running.result()

    async def _run(self, evaluator: Evaluator, step: int) -> EvaluationPoint:
        self._producer.hold()
        try:
            async with self._producer.weights:
                with self._timeline.span("evaluate", "trainer", 2):
                    point = await evaluator.run(step)
        finally:
            self._producer.release()
        self._points.append(point)
        return point


def _check_versions(rows: Sequence[TensorDictBase], version: int) -> None:
    for row in rows:
        drawn = row.get(TOKEN_POLICY_VERSION)
        others = set(drawn[drawn >= 0].tolist()) - {version}
        if others:
            raise RuntimeError(
                f"An evaluation of version {version} has tokens of {sorted(others)}: the weights "
                "were replaced while it ran."
            )

"""What runs beside training.

Prompts are drawn, and groups and evaluations run in one event loop.
"""

import asyncio
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, TypeVar

from tensordict import TensorDictBase, lazy_stack
from torch import Tensor

from collectors.composition_checks import check_fit
from collectors.ledger import GroupLedger, GroupState, Refill, Ticket
from collectors.ledger.groups import NO_SIGNAL, STALE
from objectives import MCAdvantage
from torchrl_data.conversation import stream_number
from torchrl_data.keys import TOKEN_POLICY_VERSION
from torchrl_data.stop_reason import StopReason
from torchrl_envs.datasets.primer import DataExhaustedError, DataLoadingPrimer
from torchrl_envs.datasets.row_stream import Place
from torchrl_envs.episode.async_runner import AsyncEpisodeRunner, Prompt, prompt_of
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_modules.engines.bridges import BatchingEngine
from torchrl_modules.engines.engine import EngineDied, push_weights
from torchrl_modules.policies.base import AsyncPolicy

from .group_runner import (
    MAX_DEATHS,
    EpisodeEnd,
    Group,
    GroupRunner,
    Timeline,
    run_together,
    scored_rows,
)
from .load import WHO, GroupCap

# An event loop on a thread of its own, which the trainer's thread starts, asks and stops.

T = TypeVar("T")
_LOOK_S: Final = 0.5


class LoopThread(ABC):
    """Runs tasks in an event loop until it is stopped, or one of them fails.

    Args:
        who: is told of in errors.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self.changed = threading.Condition()
        """Held while what is shared is read or written; told of every change."""
        self.error: BaseException | None = None
        self.is_over = False
        """It was stopped, or has failed."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # For the trainer's thread -------------------------------------------------------------------

    def start(self, *tasks: Coroutine[Any, Any, None]) -> None:
        """Start the event loop, and tasks in it; when one fails everything ends."""
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(started, tasks)), name="collector", daemon=True
        )
        self._thread.start()
        started.wait()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run something in the event loop.

        Raises:
            RuntimeError: the collection has ended.
        """
        if self._loop is None or self.is_over:
            coroutine.close()
            self.check_open()
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def result_of(self, future: "Future[T]") -> T:
        """Wait for something that was submitted, as long as the collection goes on."""
        while not futures.wait([future], _LOOK_S).done:
            self.check_open()
        try:
            return future.result()
        except CancelledError:
            self.check_open()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the event loop runs, and goes on."""
        return self._thread is not None and not self.is_over

    def check_open(self) -> None:
        """Check that it has neither failed nor was stopped.

        Raises:
            RuntimeError: it has, or was; what it failed of is the cause.
        """
        if self.error is not None:
            cause = getattr(self.error, "cause", None) or self.error  # Ray tells where it was.
            raise RuntimeError(
                f"{self._who}: the collection has failed: {type(cause).__name__}: {cause}"
            ) from self.error
        if self.is_over:
            raise RuntimeError(f"{self._who}: it was shut down.")

    def stop(self, timeout_s: float) -> None:
        """Cancel what runs, let it end, and end the thread.

        Raises:
            TimeoutError: it does not end.
        """
        self.is_over = True
        if self._thread is None:
            return
        self._call_soon(self._stopping.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"The collection did not end within {timeout_s:g} s: a tool, an environment or the "
                "engine holds it up."
            )

    def _call_soon(self, function: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(function)

    # In the event loop --------------------------------------------------------------------------

    async def _main(
        self, started: threading.Event, tasks: Sequence[Coroutine[Any, Any, None]]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        for task in tasks:
            self._spawn(task)
        started.set()
        try:
            await self._stopping.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._end()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task; when it fails everything ends, and the trainer hears of it at once."""

        def done(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self._fail(error)

        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(done)

    def _fail(self, error: BaseException) -> None:
        """Everything ends because of an error; the first one counts."""
        with self.changed:
            self.error, self.is_over = self.error or error, True
            self.changed.notify_all()
        self._stopping.set()

    @abstractmethod
    async def _end(self) -> None:
        """All tasks have ended: give back what is left."""


# The groups between the data and the trainer: which prompt is drawn next, and which groups wait.

_MAX_UNWANTED: Final = 16
"""Groups without a signal in a row, in steps of training, before the collection gives up."""


class DrawnPrompt(NamedTuple):
    """A prompt that is about to be offered to the ledger."""

    ordinal: int
    prompt: Prompt
    episodes: list[Episode]
    """Drawn with it; none where the ledger has to say with which seed."""


class GroupQueue:
    """Draws prompts for a ledger, and keeps the groups that are finished until they are taken.

    Prompts come in the order of the data; before them, the lowest first, those that are owed.
    :meth:`draw` is for one event loop; the others for whoever holds the collection's lock.

    Args:
        runner: of the environment.
        ledger: numbers the prompts.
        loader: of the environment; ``None`` where something else draws, whose place is not known.
        version: of the engine, while the ledger has its own.
        who: is told of in errors.
    """

    def __init__(
        self,
        runner: AsyncEpisodeRunner,
        ledger: GroupLedger,
        loader: DataLoadingPrimer | None,
        *,
        version: int = 0,
        who: str,
    ) -> None:
        self._runner = runner
        self._ledger = ledger
        self._loader = loader
        self._who = who
        self.steps = {version: ledger.version}
        """By version of the engine: the steps of training that are in these weights; of those
        that something in flight may have been drawn with."""
        self.finished: dict[Ticket, Any] = {}
        """Groups that wait for the trainer; each has its ``prompt``."""
        self.is_exhausted = False
        """No more data will be drawn."""
        self.error = ""
        """Why it makes no sense to go on."""
        self._owed: dict[int, tuple[Refill, Prompt]] = {}
        self.kept: DrawnPrompt | None = None
        """Drawn, and not offered yet: it is next, after what is owed."""
        self.pools = None if loader is None else loader.pools
        """Difficulty pools, if they say which prompts are drawn."""
        self._undone: dict[int, tuple[Place, int | str]] = {}
        """Of prompts that are not done, by ordinal: where they were drawn, and their group."""
        self._next_place = None if loader is None else loader.place
        self._next_ordinal = self._num_unwanted = 0
        self._drawer = ThreadPoolExecutor(1, thread_name_prefix="draw-group")

    # What may begin -----------------------------------------------------------------------------

    def may_draw(self) -> bool:
        """Whether the ledger admits a group, and there may be a prompt for it."""
        return self._has_more and self._ledger.can_admit()

    @property
    def _has_more(self) -> bool:
        return bool(self._owed) or self.kept is not None or not self.is_exhausted

    async def draw(self) -> DrawnPrompt | None:
        """The next prompt, of which the ledger hears by :meth:`offer`; ``None``: there is none."""
        if self._owed:
            refill, prompt = self._owed[min(self._owed)]
            return DrawnPrompt(refill.ordinal, prompt, [])
        if self.kept is not None:
            drawn, self.kept = self.kept, None
            return drawn
        loop = asyncio.get_running_loop()
        episodes = await loop.run_in_executor(self._drawer, self._draw)
        if not episodes:
            self.is_exhausted = True
            return None
        return DrawnPrompt(self._next_ordinal, prompt_of(episodes[0]), episodes)

    def _draw(self) -> list[Episode]:
        """Episodes of the next prompt of the data; none if there is none."""
        with suppress(DataExhaustedError):
            episodes = self._runner.draw(self._ledger.group_size)
            if not any(episode.stop_reason == StopReason.NO_DATA for episode in episodes):
                return episodes
            self._runner.give_up(episodes)
        return []

    def offer(self, drawn: DrawnPrompt) -> Ticket:
        """Offer a prompt to the ledger, and start its group; gives its ticket."""
        group_id = drawn.prompt.group_id
        if drawn.episodes:
            # Where something else draws, its episodes may have no seed.
            seed = drawn.episodes[0].seed or (None if self._loader is None else 0)
            ticket = self._ledger.offer(group_id, drawn.ordinal, seed=seed)
            for episode in drawn.episodes:  # as if they were drawn again
                episode.seed = ticket.seed
                episode.stream = stream_number(ticket.seed, episode.row)
            self._note_place(drawn.ordinal, group_id)
        else:
            ticket = self._ledger.offer(group_id, drawn.ordinal)
            del self._owed[drawn.ordinal]
        self._ledger.start(ticket)
        return ticket

    def _note_place(self, ordinal: int, group_id: int | str) -> None:
        self._next_ordinal = ordinal + 1
        if self._loader is None or self._next_place is None:
            return
        self._undone[ordinal] = (self._next_place, group_id)
        self._next_place = self._loader.place
        for done in [o for o in self._undone if o < self._ledger.frontier]:
            del self._undone[done]

    # What ends ----------------------------------------------------------------------------------

    def end_episode(self, ticket: Ticket, index: int, end: EpisodeEnd) -> None:
        """Tell the ledger of an episode that is over."""
        drew = end.versions
        oldest, newest = (None, None) if drew is None else (self.steps[v] for v in drew)
        self._ledger.finish_episode(
            ticket,
            index,
            tokens=end.num_tokens,
            oldest_version=oldest,
            newest_version=newest,
            stop_reason=end.stop_reason,
        )

    def finish(
        self, ticket: Ticket, group: Any, rewards: Sequence[float], *, is_wanted: bool
    ) -> None:
        """A group is scored: it waits for the trainer, or is asked for again."""
        if self.pools is not None:
            self.pools.observe_group(group.prompt.group_id, rewards)
        if is_wanted:
            self._ledger.finish(ticket)
            self.finished[ticket] = group
            self._num_unwanted = 0
            return
        self.drop(ticket, group.prompt, NO_SIGNAL)
        self._num_unwanted += 1
        if self._num_unwanted >= _MAX_UNWANTED * self._ledger.groups_per_step:
            self.error = (
                f"{self._who}: {self._num_unwanted} groups in a row were refused, because their "
                "rewards are equal, and asked for again. Make the task easier or harder, or take "
                "MCAdvantage(zero_variance='keep')."
            )

    def drop(self, ticket: Ticket, prompt: Prompt, reason: str = "") -> None:
        """Nobody trains a group; without a reason it is given back. The prompt may be owed then."""
        ledger = self._ledger
        self._owe(ledger.drop(ticket, reason) if reason else ledger.cancel(ticket), prompt)

    def _owe(self, refill: Refill | None, prompt: Prompt) -> None:
        if refill is not None:
            self._owed[refill.ordinal] = (refill, prompt)

    def take(self, *, is_idle: bool) -> list[Ticket] | None:
        """The groups of the next batch: a full step, or all that the data gave.

        Args:
            is_idle: no group runs.

        Returns:
            Their tickets; none: all data were drawn and trained; ``None``: wait.
        """
        is_drained = is_idle and not self._has_more
        tickets = self._ledger.take_rest() if is_drained else self._ledger.take()
        for eviction in self._ledger.take_evicted():
            self._owe(eviction.refill, self.finished.pop(eviction.ticket).prompt)
        return None if not tickets and self._has_more else tickets

    def trained(self, tickets: Collection[Ticket], version: int) -> int:
        """Weights of a version are made; gives the step of training that is in them.

        Args:
            tickets: what the steps since the last ones have used.
            version: what the weights are called.
        """
        ledger = self._ledger
        if tickets:
            ledger.trained(tickets, ledger.version)
        self.steps[version] = ledger.version
        # A group draws with no weights older than the generators' when it was offered.
        first = min((each.version for each in ledger.tickets()), default=ledger.pulled_version)
        self.steps = {number: step for number, step in self.steps.items() if step >= first}
        return ledger.version

    def close(self) -> None:
        """Wait for what is being drawn."""
        self._drawer.shutdown()

    # Resume -------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The ledger, and the loader's state at the first prompt that is not done.

        Raises:
            TypeError: there is no loader.
        """
        if self._loader is None or self._next_place is None:
            raise TypeError(
                f"{self._who}.state_dict: the data come from no DataLoadingPrimer, so nobody knows "
                "where a resumed run would go on."
            )
        frontier = self._ledger.frontier
        place, _ = self._undone.get(frontier, (self._next_place, None))
        data = dict(self._loader.state_from(place))
        if self.pools is not None:
            # Which rows the pools leave out depends on when they are asked: not once more.
            undone = sorted(self._undone.items())
            data["drawn"] = [int(group_id) for o, (_, group_id) in undone if o >= frontier]
        return {"ledger": self._ledger.state_dict(), "data": data}

    def load(
        self, state: Mapping[str, Any], restored: Collection[int], version: int
    ) -> dict[Ticket, Prompt]:
        """Go on from a state, and draw again what its ledger knows of.

        Args:
            state: what :meth:`state` gave.
            restored: ordinals of the finished groups whose rows are there.
            version: of the engine.

        Returns:
            The prompts of the finished groups that wait.

        Raises:
            ValueError: the data are others, or are drawn in another order than before; or settings
                of the ledger differ.
            TypeError: there is no loader.
        """
        ledger, pools = self._ledger, self.pools
        ledger.load_state_dict(state["ledger"], restored=restored)
        if self._loader is None:
            raise TypeError(
                f"{self._who}.load_state_dict: the data come from no DataLoadingPrimer, so nobody "
                "knows where to go on."
            )
        self._loader.set_extra_state(dict(state["data"]))
        self.steps = {version: ledger.version}
        refills = {refill.ordinal: refill for refill in ledger.owed}
        waiting = {ticket.ordinal: ticket for ticket in ledger.tickets(GroupState.FINISHED)}
        prompts = {}
        self._next_ordinal, self._next_place = ledger.frontier, self._loader.place
        if pools is not None:
            pools.admit_only(state["data"]["drawn"])
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
            self._owe(refills.get(ordinal), prompt)
            if ordinal in waiting:
                prompts[waiting[ordinal]] = prompt
        if pools is not None:
            pools.admit_only(None)
        return prompts


# Evaluation beside training: every token of a point is drawn by one version of the weights.

_log = logging.getLogger(__name__)


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


async def draw_point(
    env: EpisodeEnv, runner: AsyncEpisodeRunner, policy: AsyncPolicy, step: int
) -> EvaluationPoint:
    """Run the episodes of an environment once, with whatever weights serve.

    It takes the data from their beginning: all of those that end (``num_epochs``), or else one
    batch of the environment. Whoever calls it keeps the weights as they are. If the engine dies,
    all is drawn again.

    Raises:
        RuntimeError: a token was drawn by other weights.
        EngineDied: the engine died each of three times.
    """
    num_deaths = 0
    while True:
        for data in env.transforms_of(DataLoadingPrimer):
            data.rewind()
        version = policy.version
        try:
            rows = await _draw_rows(env, runner, policy)
        except EngineDied as died:
            num_deaths += 1
            if num_deaths == MAX_DEATHS:
                raise
            _log.warning("The engine died under an evaluation, which begins again: %s", died)
            continue
        drawn_by = {v for row in rows for v in row.get(TOKEN_POLICY_VERSION).tolist() if v >= 0}
        if drawn_by - {version}:
            raise RuntimeError(
                f"An evaluation of version {version} has tokens of {sorted(drawn_by - {version})}: "
                "the weights were replaced while it ran."
            )
        return EvaluationPoint(step, version, lazy_stack(rows))


async def _draw_rows(
    env: EpisodeEnv, runner: AsyncEpisodeRunner, policy: AsyncPolicy
) -> list[TensorDictBase]:
    """The rows of one batch, or of all batches where the data end."""
    num_epochs = [data.num_epochs for data in env.transforms_of(DataLoadingPrimer)]
    ends, rows = bool(num_epochs) and None not in num_epochs, list[TensorDictBase]()

    def draw() -> list[Episode]:
        with suppress(DataExhaustedError):  # which no coroutine can raise
            return runner.draw(env.batch_size.numel())
        return []

    while True:
        episodes = await asyncio.to_thread(draw)
        drawn = [episode for episode in episodes if episode.stop_reason != StopReason.NO_DATA]
        try:
            await run_together(runner.run(episode, policy) for episode in drawn)
            if drawn:
                rows += await asyncio.to_thread(scored_rows, runner, drawn, env.reward_entries)
        except asyncio.CancelledError:
            runner.calls.abandon()
            raise
        finally:
            await asyncio.to_thread(runner.give_up, episodes)
        if not (ends and drawn):
            return rows


# The side of a streaming collection that runs in an event loop: episodes, groups, admission.


class Producer(LoopThread):
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
        advantages: Sequence[MCAdvantage],
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
        self.queue = GroupQueue(runner, ledger, loader, version=policy.version, who=WHO)
        self._advantages = advantages
        self.cap = cap
        self.taken: list[Ticket] = []
        """The batch that the trainer has, and has not told to be trained."""
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

    def take(self) -> list[Group]:
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
                self.changed.wait(_LOOK_S)
            if not tickets:
                raise DataExhaustedError(f"{WHO}: all data were drawn and trained.")
            self.taken, self.is_with_caller = tickets, False
            groups = [self.queue.finished.pop(ticket) for ticket in tickets]
            self.num_queued = len(self.queue.finished)
        self.timeline.add("wait for rollouts", "trainer", 0, begin_s, time.monotonic())
        self.wake()
        return groups

    def used(self) -> list[Ticket]:
        """What the trainer has used since it last said so."""
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
                self.queue.finished[ticket] = Group(ticket, prompt, [], rows[ticket.ordinal])
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
        """How many episodes will ask for a turn, given time: all that are open or may yet be."""
        return math.inf if self._may_admit() else self.runner.num_open

    def _look_for_batch(self) -> None:
        if isinstance(self.policy.engine, BatchingEngine):
            self.policy.engine.check()

    async def _run_group(self, group: Group) -> None:
        given_up_for = await self.runner.run(group)
        is_wanted = not (given_up_for or any(a.asks_again(group.rows) for a in self._advantages))
        pools = self.queue.pools
        rewards = () if pools is None or given_up_for else pools.rewards_of(group.rows)
        with self.changed:
            del self.runner.groups[group.ticket]
            if given_up_for:
                self.queue.drop(group.ticket, group.prompt, given_up_for)
            else:
                self.queue.finish(group.ticket, group, rewards, is_wanted=is_wanted)
            self.changed.notify_all()
        self.runner.wake.set()
        if self.queue.error:
            raise RuntimeError(self.queue.error)

    def _note_end(self, group: Group, number: int) -> None:
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

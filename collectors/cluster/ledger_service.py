"""The ledger as a Ray actor, and its client; the door to Ray."""

import asyncio
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, NamedTuple

from tensordict import TensorDictBase

from collectors.composition_checks import check_data, check_env
from collectors.ledger import GroupLedger, StalenessPolicy, Ticket
from collectors.ledger.groups import NO_SIGNAL, STALE
from collectors.streaming.producer import DrawnPrompt, PromptQueue
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.episode.episode_env import AsyncEpisodeRunner, EpisodeEnv, Prompt

# The door to Ray, and what is raised when a part of a collection on a cluster is gone.


class CollectorDied(RuntimeError):
    """A part of a collection on a cluster is gone, and nothing takes its place."""


def load_ray() -> Any:
    """Ray, imported when it is used.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return import_module("ray")
    except ImportError as error:
        raise ImportError("RayLLMCollector needs Ray: pip install ray.") from error


def is_death(error: BaseException) -> bool:
    """Whether an actor, or the objects that it owned, are gone."""
    exceptions = load_ray().exceptions
    causes: list[BaseException | None] = [error, getattr(error, "cause", None), error.__cause__]
    kinds = (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.RaySystemError)
    return any(isinstance(cause, kinds) for cause in causes)


@contextmanager
def lets_signals_through() -> Iterator[None]:
    """Raise what a signal's handler raised; Ray's native code makes a ``SystemError`` of it."""
    try:
        yield
    except SystemError as error:
        if error.__cause__ is None or isinstance(error.__cause__, Exception):
            raise
        raise error.__cause__ from None


# What lives in the ledger's actor: the ledger, the data, and who runs which group.

WHO: Final = "RayLLMCollector"
_NOBODY: Final = -1
"""Whose rows a restored group has: they are the trainer's."""
_MAX_UNWANTED: Final = 16
"""Groups without a signal in a row, in steps of training, before the collection gives up."""


class EpisodeEnd(NamedTuple):
    """What the ledger is told of an episode that is over."""

    num_tokens: int
    """That the policy sampled."""
    versions: tuple[int, int] | None
    """The oldest and the newest version of its engine that drew them."""
    stop_reason: str


class Scored(NamedTuple):
    """What a collector tells of the rows of a group."""

    rows: Sequence[Any]
    """One reference to them; none, where they are not worth training."""
    num_rows: int
    rewards: Sequence[float] = ()
    """Of the rollouts, for difficulty pools."""


class Share(NamedTuple):
    """A group of a batch: where its rows are."""

    ticket: Ticket
    rows: Any
    """A Ray reference to a list of rows."""
    num_rows: int


class _Running(NamedTuple):
    worker: int
    prompt: Prompt


class _Finished(NamedTuple):
    worker: int
    prompt: Prompt
    share: Share


def built(thing: Any, kind: type) -> Any:
    """An environment or a policy, or what a function makes."""
    return thing() if callable(thing) and not isinstance(thing, kind) else thing


class LedgerService:
    """Draws prompts, hands them to collectors, and knows what became of each group.

    Everything is called in one event loop. A collector's messages name its incarnation; those of an
    earlier one change nothing.

    Args:
        env: whose data are drawn, or what makes it.
        groups_per_step: of a batch; as many as the environment's batch holds when ``None``.
        staleness: how old tokens may be.
    """

    def __init__(
        self,
        env: EpisodeEnv | Callable[[], EpisodeEnv],
        *,
        groups_per_step: int | None,
        staleness: StalenessPolicy | None,
    ) -> None:
        self._made_of = (env, groups_per_step, staleness)
        self.ledger: GroupLedger
        self._prompts: PromptQueue
        self._steps = {0: 0}
        self._incarnations: dict[int, int] = {}
        self._num_finished: dict[int, int] = {}
        self._waiting: dict[int, asyncio.Future[tuple[Ticket, Prompt] | None]] = {}
        self._running: dict[Ticket, _Running] = {}
        self._finished: dict[Ticket, _Finished] = {}
        self._taken: dict[Ticket, _Finished] = {}
        self._num_unwanted = 0
        self._is_exhausted = self._is_over = False
        self._error = ""
        self._wake, self._changed = asyncio.Event(), asyncio.Event()
        self._dispatcher: asyncio.Task[None] | None = None

    async def open(self) -> tuple[int, int, int]:
        """Make the environment; gives groups of a batch, rows of a group, most groups in flight.

        Raises:
            TypeError: the environment is none.
            ValueError: its parts don't fit together, or it has no data.
        """
        env, groups_per_step, staleness = self._made_of
        self._env = built(env, EpisodeEnv)
        check_env(self._env, who=WHO)
        check_data(self._env, who=WHO)
        self._env.check()
        loaders = list(self._env.transforms_of(DataLoadingPrimer))
        self.group_size = loaders[0].group_size if loaders else 1
        if groups_per_step is None:
            groups_per_step = max(1, self._env.batch_size.numel() // self.group_size)
        self.ledger = GroupLedger(
            groups_per_step=groups_per_step, group_size=self.group_size, policy=staleness
        )
        self._runner = AsyncEpisodeRunner(self._env)
        loader = next(iter(loaders), None)
        self._prompts = PromptQueue(self._runner, self.ledger, self.group_size, loader, who=WHO)
        return groups_per_step, self.group_size, self.ledger.num_slots

    async def until_over(self) -> None:
        """Answers when the collection is over; whose answer is lost knows that this is gone."""
        while not self._is_over:
            await self._changed.wait()

    # For collectors -----------------------------------------------------------------------------

    async def join(self, worker: int, incarnation: int) -> None:
        """A collector is ready, with the weights that are wanted."""
        self._incarnations[worker] = incarnation
        self._num_finished[worker] = 0

    async def next_group(self, worker: int, incarnation: int) -> tuple[Ticket, Prompt] | None:
        """The next group for a collector, when there is one; ``None``: it is to end."""
        if self._is_over or self._incarnations.get(worker) != incarnation:
            return None
        self._waiting[worker] = asyncio.get_running_loop().create_future()
        self._wake.set()
        return await self._waiting[worker]

    async def finish(
        self,
        worker: int,
        incarnation: int,
        ticket: Ticket,
        ends: Sequence[EpisodeEnd],
        scored: Scored,
    ) -> None:
        """A group is scored.

        Args:
            worker: who ran it.
            incarnation: of the collector.
            ticket: of the group.
            ends: of its episodes.
            scored: its rows.
        """
        if not self._is_with(worker, incarnation, ticket):
            return  # It was given to another one.
        prompt = self._running.pop(ticket).prompt
        self._num_finished[worker] += 1
        self._prompts.observe(prompt, scored.rewards)
        for index, end in enumerate(ends):
            oldest, newest = end.versions or (None, None)
            self.ledger.finish_episode(
                ticket,
                index,
                tokens=end.num_tokens,
                oldest_version=None if oldest is None else self._steps[oldest],
                newest_version=None if newest is None else self._steps[newest],
                stop_reason=end.stop_reason,
            )
        if scored.rows:
            self.ledger.finish(ticket)
            share = Share(ticket, scored.rows[0], scored.num_rows)
            self._finished[ticket] = _Finished(worker, prompt, share)
            self._num_unwanted = 0
        else:
            self._drop(ticket, prompt, NO_SIGNAL)
            self._num_unwanted += 1
            if self._num_unwanted >= _MAX_UNWANTED * self.ledger.groups_per_step:
                self._error = (
                    f"{WHO}: {self._num_unwanted} groups in a row were refused, because their "
                    "rewards are equal, and asked for again. Make the task easier or harder, or "
                    "take MCAdvantage(zero_variance='keep')."
                )
        self._notify()

    async def give_back(self, worker: int, incarnation: int, ticket: Ticket, why: str = "") -> None:
        """A group runs again with the same seed: its engine died, or had no room (``LOAD``)."""
        if self._is_with(worker, incarnation, ticket):
            prompt = self._running.pop(ticket).prompt
            self._drop(ticket, prompt, why) if why else self._cancel(ticket, prompt)
            self._notify()

    async def lose(self, worker: int, incarnation: int) -> int:
        """A collector is gone: its groups are owed again; gives how many it had finished."""
        if self._incarnations.get(worker) != incarnation:
            return 0
        del self._incarnations[worker]
        waiting = self._waiting.pop(worker, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
        for groups in (self._running, self._finished):  # its objects are gone with it
            for ticket in [ticket for ticket, group in groups.items() if group.worker == worker]:
                self._cancel(ticket, groups.pop(ticket).prompt)
        self._notify()
        return self._num_finished[worker]

    def _is_with(self, worker: int, incarnation: int, ticket: Ticket) -> bool:
        running = self._running.get(ticket)
        is_present = self._incarnations.get(worker) == incarnation
        return is_present and running is not None and running.worker == worker

    # For the trainer ----------------------------------------------------------------------------

    async def begin(self) -> None:
        """Hand groups out, from now on."""
        if self._dispatcher is None:
            self._dispatcher = asyncio.create_task(self._dispatch())

    async def take(self) -> list[Share]:
        """The groups of the next batch, as soon as there are enough; none: the data have ended.

        Raises:
            RuntimeError: the collection has failed.
        """
        while True:
            if self._error:
                raise RuntimeError(self._error)
            is_drained = self._is_exhausted and not (self._prompts or self._running)
            tickets = self.ledger.take_rest() if is_drained else self.ledger.take()
            for eviction in self.ledger.take_evicted():
                self._prompts.owe(eviction.refill, self._finished.pop(eviction.ticket).prompt)
            if tickets is not None and (tickets or is_drained):
                self._taken = {ticket: self._finished.pop(ticket) for ticket in tickets}
                self._wake.set()
                return [group.share for group in self._taken.values()]
            changed = self._changed
            self._wake.set()
            await changed.wait()

    async def put_back(self, lost: Sequence[Ticket]) -> None:
        """A batch can't be used: the rows of some of its groups are gone, and these are owed."""
        self.ledger.put_back()
        self._finished |= self._taken
        self._taken = {}
        for ticket in lost:
            self._cancel(ticket, self._finished.pop(ticket).prompt)
        self._notify()

    async def push(self, trained: Sequence[Ticket], version: int) -> int:
        """Weights are on their way; gives the step of training that is in them.

        Args:
            trained: what the steps since the last push have used.
            version: the number of the weights.
        """
        if trained:
            self.ledger.trained(trained, self.ledger.version)
        self._taken = {}
        self._steps[version] = self.ledger.version
        return self.ledger.version

    async def pulled(self, step: int) -> None:
        """All collectors have the weights of a step."""
        self.ledger.weights_pulled(step)
        for ticket in self.ledger.stale_tickets():
            self._drop(ticket, self._running.pop(ticket).prompt, STALE)
        self._notify()

    async def unchanged(self, trained: Sequence[Ticket], version: int) -> None:
        """A step was made, and its weights are not pushed: they are those before."""
        await self.pulled(await self.push(trained, version))

    async def report(self) -> tuple[GroupLedger, dict[str, float]]:
        """The ledger as it is, and its metrics."""
        return self.ledger, self.ledger.metrics()

    # Resume -------------------------------------------------------------------------------------

    async def state(self) -> tuple[dict[str, Any], list[Share]]:
        """The ledger and the place in the data, as plain values; the finished groups that wait.

        Raises:
            TypeError: the place in the data is not known.
        """
        state = {"ledger": self.ledger.state_dict(), "data": dict(self._prompts.data_state())}
        return state, [group.share for group in self._finished.values()]

    async def load(
        self,
        state: Mapping[str, Any],
        waiting: Mapping[int, tuple[Sequence[Any], int]],
        taken: Sequence[int],
    ) -> list[Ticket]:
        """Go on from a state, before anything was handed out.

        Args:
            state: what :meth:`state` gave.
            waiting: of finished groups, by ordinal: one reference to their rows, and how many.
            taken: ordinals of the batch that is with the trainer.

        Returns:
            The tickets of that batch.

        Raises:
            ValueError: the data are others, or settings of the ledger.
            LedgerError: something was handed out.
        """
        self.ledger.load_state_dict(state["ledger"], restored={*waiting, *taken})
        prompts = await asyncio.to_thread(self._prompts.load_state, state["data"])
        for ticket, prompt in prompts.items():
            (rows,), num_rows = waiting[ticket.ordinal]
            share = Share(ticket, rows, num_rows)
            self._finished[ticket] = _Finished(_NOBODY, prompt, share)
        self._steps = {0: self.ledger.version}
        batches = self.ledger.batches
        return batches[0] if batches else []

    # The end ------------------------------------------------------------------------------------

    async def stop(self) -> GroupLedger:
        """Hand nothing out any more, and give the ledger, where all in flight is returned."""
        self._is_over = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(None)
        if self._dispatcher is not None:
            self._dispatcher.cancel()
        self.ledger.return_all()
        self._running, self._finished, self._taken = {}, {}, {}
        self._prompts.close()
        self._env.close(raise_if_closed=False)
        self._notify()
        return self.ledger

    # Handing out --------------------------------------------------------------------------------

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._wake.set()

    def _cancel(self, ticket: Ticket, prompt: Prompt) -> None:
        self._prompts.owe(self.ledger.cancel(ticket), prompt)

    def _drop(self, ticket: Ticket, prompt: Prompt, reason: str) -> None:
        self._prompts.owe(self.ledger.drop(ticket, reason), prompt)

    async def _dispatch(self) -> None:
        """Hand out a group whenever the ledger lets one in and a collector asks."""
        while True:
            try:
                while self._waiting and self.ledger.can_admit():
                    drawn = await self._next_prompt()
                    if drawn is None:
                        break
                    if self._waiting and self.ledger.can_admit():
                        self._hand_out(drawn)
                    elif drawn.episodes:
                        self._prompts.keep(drawn)
            except Exception as error:
                self._error = f"{WHO}: drawing data failed: {type(error).__name__}: {error}"
                self._notify()
                return
            await self._wake.wait()
            self._wake.clear()

    async def _next_prompt(self) -> DrawnPrompt | None:
        """The next prompt; ``None``: there is none."""
        if self._is_exhausted and not self._prompts:
            return None
        drawn = await self._prompts.draw()
        if drawn is None:
            self._is_exhausted = True
            self._notify()
        elif drawn.episodes:  # they are run elsewhere
            await asyncio.to_thread(self._runner.give_up, drawn.episodes)
        return drawn

    def _hand_out(self, drawn: DrawnPrompt) -> None:
        """Give a prompt to the collector that has least to do."""
        ticket = self._prompts.offer(drawn)
        self.ledger.start(ticket)
        load = dict.fromkeys(self._waiting, 0)
        for running in self._running.values():
            load[running.worker] = load.get(running.worker, 0) + 1
        worker = min(self._waiting, key=lambda each: (load[each], each))
        self._running[ticket] = _Running(worker, drawn.prompt)
        self._waiting.pop(worker).set_result((ticket, drawn.prompt))


# The trainer's messages to the ledger's actor, and the rows that it is told of.

_LOOK_S: Final = 0.5
_log = logging.getLogger(__name__)


class LedgerClient:
    """Asks the ledger's actor, as long as the collection goes on.

    Args:
        actor: its handle.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.check: Callable[[], None] = lambda: None
        """Raises if the collection has failed."""
        self.taken: list[Ticket] = []
        """What the trainer has taken since it last said what became of it."""
        self.is_with_caller = True
        """Whether the rows of those taken have reached who asked for them."""
        self._has_begun = False
        self._taking: Any = None
        self._num_bytes = self._num_rows = 0

    def _ask(self, reference: Any) -> Any:
        """Wait for an answer.

        Raises:
            CollectorDied: a part of the collection is gone.
        """
        ray = load_ray()
        try:
            with lets_signals_through():
                while not ray.wait([reference], timeout=_LOOK_S)[0]:
                    self.check()
                return ray.get(reference)
        except Exception as error:
            if not is_death(error):
                raise
            raise CollectorDied(f"{WHO}: the actor of the ledger is gone: {error}") from error

    def open(self) -> tuple[int, int, int]:
        """Groups of a batch, rows of a group, most groups in flight."""
        return self._ask(self._actor.open.remote())

    def take_batch(self) -> tuple[list[TensorDictBase], int]:
        """The rows of the next batch, and of how many groups; none: the data have ended."""
        if not self._has_begun:
            self._ask(self._actor.begin.remote())
            self._has_begun = True
        while True:
            shares = self._take()
            rows = self._rows_of(shares)
            if rows is not None:
                tickets = [share.ticket for share in shares]
                self.taken, self.is_with_caller, self._taking = tickets, False, None
                self._num_bytes += len(load_ray().cloudpickle.dumps(shares))
                self._num_rows += sum(share.num_rows for share in shares)
                return rows, len(shares)

    def _take(self) -> list[Share]:
        """What is taken; whatever is raised until its rows are here leaves it to be asked again."""
        if self._taking is None:
            self._taking = self._actor.take.remote()
        return self._ask(self._taking)

    def _rows_of(self, shares: list[Share]) -> list[TensorDictBase] | None:
        """The rows of a batch; ``None``: some are gone, and their groups run again."""
        ray = load_ray()
        rows, lost = [], []
        for share in shares:
            try:
                with lets_signals_through():
                    rows += ray.get(share.rows)
            except Exception as error:
                if not is_death(error):
                    raise
                lost.append(share.ticket)
        if not lost:
            return rows
        _log.warning("%s: the rows of %d groups are gone, which run again", WHO, len(lost))
        self._taking = None
        self._ask(self._actor.put_back.remote(lost))
        return None

    def push(self, version: int, *, is_restored: bool) -> int:
        """Weights of a version are on their way; gives the step of training that is in them.

        Args:
            version: their number.
            is_restored: they are those of before, and no step has been made.
        """
        used = [] if is_restored else self._used()
        return self._ask(self._actor.push.remote(used, version))

    def unchanged(self, version: int) -> None:
        """A step was made, and its weights are not pushed."""
        self._ask(self._actor.unchanged.remote(self._used(), version))

    def _used(self) -> list[Ticket]:
        used, self.taken = self.taken, []
        self._num_bytes += len(pickle.dumps(used))
        return used

    def state(self) -> dict[str, Any]:
        """The ledger, the place in the data, and the rows of the groups that wait."""
        ray = load_ray()
        state, shares = self._ask(self._actor.state.remote())
        waiting = []
        for share in shares:
            try:
                with lets_signals_through():
                    rows = ray.get(share.rows)
            except Exception as error:
                if not is_death(error):
                    raise
                continue  # They are gone with their collector: the group runs again.
            waiting.append({"ordinal": share.ticket.ordinal, "rows": rows})
        taken = [ticket.ordinal for ticket in self.taken] if self.is_with_caller else []
        return {**state, "waiting": waiting, "taken": taken}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ValueError: the data are others, or settings of the ledger.
            LedgerError: it has collected already.
        """
        put = load_ray().put
        # In a list, a reference is handed on as it is.
        waiting = {
            each["ordinal"]: ([put(list(each["rows"]))], len(each["rows"]))
            for each in state["waiting"]
        }
        own = {"ledger": state["ledger"], "data": state["data"]}
        self.taken = self._ask(self._actor.load.remote(own, waiting, list(state["taken"])))

    def report(self) -> tuple[GroupLedger, dict[str, float]]:
        """The ledger as it is, and its metrics."""
        return self._ask(self._actor.report.remote())

    @property
    def bytes_per_row(self) -> float:
        """That came and went about rows, beside the rows themselves."""
        return self._num_bytes / max(1, self._num_rows)

"""Service in the ledger's actor: the ledger, the data, and the groups of each collector."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from collectors.composition_checks import check_collected_env, check_data, reward_weights
from collectors.ledger import GroupLedger, StalenessPolicy, Ticket
from collectors.ledger.reasons import STALE
from collectors.streaming.group_runner import EpisodeEnd
from collectors.streaming.group_scheduler import GroupScheduler
from objectives.advantages.group_refill import MAX_DRAWS
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.episode.async_runner import AsyncEpisodeRunner, Prompt
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.transforms.branch_rollouts import branching_of

WHO: Final = "RayLLMCollector"
_NOBODY: Final = -1
"""Whose rows a restored group has: they are the trainer's."""


class Scored(NamedTuple):
    """The report of a collector about the rows of a group."""

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


class _Held(NamedTuple):
    worker: int
    """Who runs or ran it, and has its rows."""
    prompt: Prompt
    share: Share | None = None
    """Once it is finished."""


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
        max_draws: see :class:`~objectives.GroupRefill`.
    """

    def __init__(
        self,
        env: EpisodeEnv | Callable[[], EpisodeEnv],
        *,
        groups_per_step: int | None,
        staleness: StalenessPolicy | None,
        max_draws: int = MAX_DRAWS,
    ) -> None:
        self._made_of = (env, groups_per_step, staleness, max_draws)
        self.ledger: GroupLedger
        self._queue: GroupScheduler
        self._incarnations: dict[int, int] = {}
        self._num_finished: dict[int, int] = {}
        self._waiting: dict[int, asyncio.Future[tuple[Ticket, Prompt] | None]] = {}
        self._running: dict[Ticket, _Held] = {}
        self._taken: dict[Ticket, _Held] = {}
        self._is_over = False
        self._wake, self._changed = asyncio.Event(), asyncio.Event()
        self._dispatcher: asyncio.Task[None] | None = None

    async def open(self) -> tuple[int, int, int, dict[str, float]]:
        """Make the environment; gives its sizes and the weights of its rewards.

        The sizes are groups of a batch, rows of a group, and most groups in flight.

        Raises:
            TypeError: the environment is none.
            ValueError: its parts don't fit together, or it has no data.
        """
        env, groups_per_step, staleness, max_draws = self._made_of
        self._env = built(env, EpisodeEnv)
        check_collected_env(self._env, who=WHO)
        check_data(self._env, who=WHO)
        self._env.check()
        loaders = list(self._env.transforms_of(DataLoadingPrimer))
        group_size = loaders[0].group_size if loaders else 1
        groups_per_step = groups_per_step or max(1, self._env.batch_size.numel() // group_size)
        self.ledger = GroupLedger(
            groups_per_step=groups_per_step, group_size=group_size, policy=staleness
        )
        branching_of(self._env)  # the collectors for which it draws run them
        self._runner = AsyncEpisodeRunner(self._env)
        loader = next(iter(loaders), None)
        self._queue = GroupScheduler(
            self._runner, self.ledger, loader, max_draws=max_draws, who=WHO
        )
        weights = reward_weights(self._env.episode_transforms())
        return groups_per_step, group_size, self.ledger.num_slots, weights

    async def until_over(self) -> None:
        """Answers when the collection is over; whose answer is lost knows that this is gone."""
        while not self._is_over:
            await self._changed.wait()

    # For collectors -----------------------------------------------------------------------------

    async def join(self, worker: int, incarnation: int, version: int = 0) -> None:
        """A collector is ready, with the weights that are wanted, of this version."""
        self._queue.steps.setdefault(version, self.ledger.version)
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
        for index, end in enumerate(ends):
            self._queue.end_episode(ticket, index, end)
        share = Share(ticket, scored.rows[0], scored.num_rows) if scored.rows else None
        group = _Held(worker, prompt, share)
        self._queue.finish(ticket, group, scored.rewards, is_wanted=share is not None)
        self._notify()

    async def give_back(self, worker: int, incarnation: int, ticket: Ticket, why: str = "") -> None:
        """A group runs again with the same seed: its engine died, or had no room (``LOAD``)."""
        if self._is_with(worker, incarnation, ticket):
            self._queue.drop(ticket, self._running.pop(ticket).prompt, why)
            self._notify()

    async def lose(self, worker: int, incarnation: int) -> int:
        """A collector is gone: its groups are owed again; gives how many it had finished."""
        if self._incarnations.get(worker) != incarnation:
            return 0
        del self._incarnations[worker]
        waiting = self._waiting.pop(worker, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
        for groups in (self._running, self._queue.finished):  # its objects are gone with it
            for ticket in [ticket for ticket, group in groups.items() if group.worker == worker]:
                self._queue.drop(ticket, groups.pop(ticket).prompt)
        self._notify()
        return self._num_finished[worker]

    def _is_with(self, worker: int, incarnation: int, ticket: Ticket) -> bool:
        running = self._running.get(ticket)
        is_present = self._incarnations.get(worker) == incarnation
        return is_present and running is not None and running.worker == worker

    # For the trainer ----------------------------------------------------------------------------

    async def begin(self) -> None:
        """Hand groups out, from now on; the first :meth:`take` does so too."""
        if self._dispatcher is None:
            self._dispatcher = asyncio.create_task(self._dispatch())

    async def take(self) -> list[Share]:
        """The groups of the next batch, as soon as there are enough; none: the data have ended.

        Raises:
            RuntimeError: the collection has failed.
        """
        await self.begin()
        while True:
            if self._queue.error:
                raise RuntimeError(self._queue.error)
            tickets = self._queue.take(is_idle=not self._running)
            if tickets is not None:
                self._taken = {ticket: self._queue.finished.pop(ticket) for ticket in tickets}
                self._wake.set()
                return [group.share for group in self._taken.values() if group.share]
            changed = self._changed
            self._wake.set()
            await changed.wait()

    async def put_back(self, lost: Sequence[Ticket]) -> None:
        """A batch can't be used: the rows of some of its groups are gone, and these are owed."""
        self.ledger.put_back()
        self._queue.finished |= self._taken
        self._taken = {}
        for ticket in lost:
            self._queue.drop(ticket, self._queue.finished.pop(ticket).prompt)
        self._notify()

    async def push(self, trained: Sequence[Ticket], version: int) -> int:
        """Weights are on their way; gives the step of training that is in them.

        Args:
            trained: what the steps since the last push have used.
            version: the number of the weights.
        """
        self._taken = {}
        return self._queue.trained(trained, version)

    async def pulled(self, step: int) -> None:
        """All collectors have the weights of a step."""
        self.ledger.weights_pulled(step)
        for ticket in self.ledger.stale_tickets():
            self._queue.drop(ticket, self._running.pop(ticket).prompt, STALE)
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
        return self._queue.state(), [group.share for group in self._queue.finished.values()]

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
        prompts = await asyncio.to_thread(self._queue.load, state, {*waiting, *taken}, 0)
        for ticket, prompt in prompts.items():
            (rows,), num_rows = waiting[ticket.ordinal]
            # Nobody's: the trainer has them.
            self._queue.finished[ticket] = _Held(_NOBODY, prompt, Share(ticket, rows, num_rows))
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
        self._running, self._queue.finished, self._taken = {}, {}, {}
        self._queue.close()
        self._env.close(raise_if_closed=False)
        self._notify()
        return self.ledger

    # Handing out --------------------------------------------------------------------------------

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._wake.set()

    async def _dispatch(self) -> None:
        """Hand out a group whenever the ledger lets one in and a collector asks."""
        while True:
            try:
                while self._waiting and self._queue.may_draw():
                    drawn = await self._queue.draw()
                    if drawn is None:
                        self._notify()
                        break
                    if drawn.episodes:  # they are run elsewhere
                        await asyncio.to_thread(self._runner.give_up, drawn.episodes)
                    if self._waiting and self.ledger.can_admit():
                        # The collector that has least to do gets it.
                        ticket = self._queue.offer(drawn)
                        load = Counter(running.worker for running in self._running.values())
                        worker = min(self._waiting, key=lambda each: (load[each], each))
                        self._running[ticket] = _Held(worker, drawn.prompt)
                        self._waiting.pop(worker).set_result((ticket, drawn.prompt))
                    elif drawn.episodes:
                        self._queue.kept = drawn
            except Exception as error:
                self._queue.error = f"{WHO}: drawing data failed: {type(error).__name__}: {error}"
                self._notify()
                return
            await self._wake.wait()
            self._wake.clear()

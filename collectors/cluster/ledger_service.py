"""What lives in the ledger's actor: the ledger, the data, and who runs which group."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from collectors.composition_checks import check_data, check_env
from collectors.ledger import GroupLedger, Refill, StalenessPolicy, Ticket
from collectors.ledger.reasons import NO_SIGNAL, STALE
from torchrl_data.stop_reasons import NO_DATA
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.episode.async_runner import AsyncEpisodeRunner, Prompt, prompt_of
from torchrl_envs.episode.episode_env import EpisodeEnv

WHO: Final = "RayLLMCollector"
_MAX_UNWANTED: Final = 16
"""Groups without a signal in a row, in steps of training, before the collection gives up."""


class EpisodeEnd(NamedTuple):
    """What the ledger is told of an episode that is over."""

    num_tokens: int
    """That the policy sampled."""
    versions: tuple[int, int] | None
    """The oldest and the newest version of its engine that drew them."""
    stop_reason: str


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
        self._drawer = ThreadPoolExecutor(1, thread_name_prefix="draw-group")
        self._steps = {0: 0}
        self._incarnations: dict[int, int] = {}
        self._num_finished: dict[int, int] = {}
        self._waiting: dict[int, asyncio.Future[tuple[Ticket, Prompt] | None]] = {}
        self._running: dict[Ticket, _Running] = {}
        self._finished: dict[Ticket, _Finished] = {}
        self._taken: dict[Ticket, _Finished] = {}
        self._owed: dict[int, tuple[Refill, Prompt]] = {}
        self._drawn: deque[tuple[Prompt, int]] = deque()
        self._ordinal = self._num_unwanted = 0
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
        if self._dispatcher is None:
            self._dispatcher = asyncio.create_task(self._dispatch())
        self._wake.set()
        return await self._waiting[worker]

    async def finish(
        self,
        worker: int,
        incarnation: int,
        ticket: Ticket,
        ends: Sequence[EpisodeEnd],
        rows: Sequence[Any],
        num_rows: int,
    ) -> None:
        """A group is scored.

        Args:
            worker: who ran it.
            incarnation: of the collector.
            ticket: of the group.
            ends: of its episodes.
            rows: one reference to them; none, where they are not worth training.
            num_rows: of them.
        """
        if not self._is_with(worker, incarnation, ticket):
            return  # It was given to another one.
        prompt = self._running.pop(ticket).prompt
        self._num_finished[worker] += 1
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
        if rows:
            self.ledger.finish(ticket)
            self._finished[ticket] = _Finished(worker, prompt, Share(ticket, rows[0], num_rows))
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

    async def give_back(self, worker: int, incarnation: int, ticket: Ticket) -> None:
        """A collector's engine died under a group, which runs again with the same seed."""
        if not self._is_with(worker, incarnation, ticket):
            return
        self._cancel(ticket, self._running.pop(ticket).prompt)
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

    async def take(self) -> list[Share]:
        """The groups of the next batch, as soon as there are enough; none: the data have ended.

        Raises:
            RuntimeError: the collection has failed.
        """
        while True:
            if self._error:
                raise RuntimeError(self._error)
            is_drained = self._is_exhausted and not (self._owed or self._drawn or self._running)
            tickets = self.ledger.take_rest() if is_drained else self.ledger.take()
            for eviction in self.ledger.take_evicted():
                prompt = self._finished.pop(eviction.ticket).prompt
                if eviction.refill is not None:
                    self._owe(eviction.refill, prompt)
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
        self._train(trained)
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
        self._train(trained)
        self._steps[version] = self.ledger.version
        await self.pulled(self.ledger.version)

    def _train(self, trained: Sequence[Ticket]) -> None:
        if trained:
            self.ledger.trained(trained, self.ledger.version)
        self._taken = {}

    async def report(self) -> tuple[GroupLedger, dict[str, float]]:
        """The ledger as it is, and its metrics."""
        return self.ledger, self.ledger.metrics()

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
        self._drawer.shutdown(wait=True)
        self._env.close(raise_if_closed=False)
        self._notify()
        return self.ledger

    # Handing out --------------------------------------------------------------------------------

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._wake.set()

    def _cancel(self, ticket: Ticket, prompt: Prompt) -> None:
        self._owe(self.ledger.cancel(ticket), prompt)

    def _drop(self, ticket: Ticket, prompt: Prompt, reason: str) -> None:
        again = self.ledger.drop(ticket, reason)
        if again is not None:
            self._owe(again, prompt)

    def _owe(self, refill: Refill, prompt: Prompt) -> None:
        self._owed[refill.ordinal] = (refill, prompt)

    async def _dispatch(self) -> None:
        """Hand out a group whenever the ledger lets one in and a collector asks."""
        while True:
            try:
                while self._waiting and self.ledger.can_admit() and await self._has_prompt():
                    if self._waiting and self.ledger.can_admit():
                        self._hand_out()
            except Exception as error:
                self._error = f"{WHO}: drawing data failed: {type(error).__name__}: {error}"
                self._notify()
                return
            await self._wake.wait()
            self._wake.clear()

    async def _has_prompt(self) -> bool:
        """Whether there is a prompt to be handed out; draws one if need be."""
        if self._owed or self._drawn:
            return True
        if self._is_exhausted:
            return False
        loop = asyncio.get_running_loop()
        drawn = await loop.run_in_executor(self._drawer, self._draw)
        if drawn is None:
            self._is_exhausted = True
            self._notify()
            return bool(self._owed)
        self._drawn.append(drawn)
        return True

    def _draw(self) -> tuple[Prompt, int] | None:
        episodes = self._runner.draw(self.group_size)
        self._runner.give_up(episodes)  # they are run elsewhere
        if any(episode.stop_reason == NO_DATA for episode in episodes):
            return None
        return prompt_of(episodes[0]), episodes[0].seed

    def _hand_out(self) -> None:
        """Give the next prompt to the collector that has least to do."""
        if self._owed:
            refill, prompt = self._owed.pop(min(self._owed))
            ticket = self.ledger.offer(refill.group_id, refill.ordinal)
        else:
            prompt, seed = self._drawn.popleft()
            ticket = self.ledger.offer(prompt.group_id, self._ordinal, seed=seed)
            self._ordinal += 1
        self.ledger.start(ticket)
        load = dict.fromkeys(self._waiting, 0)
        for running in self._running.values():
            load[running.worker] = load.get(running.worker, 0) + 1
        worker = min(self._waiting, key=lambda each: (load[each], each))
        self._running[ticket] = _Running(worker, prompt)
        self._waiting.pop(worker).set_result((ticket, prompt))

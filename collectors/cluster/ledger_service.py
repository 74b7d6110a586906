"""What lives in the ledger's actor: the ledger, the data, and who runs which group."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from collectors.composition_checks import check_data, check_env
from collectors.ledger import GroupLedger, StalenessPolicy, Ticket
from collectors.ledger.reasons import NO_SIGNAL, STALE
from collectors.streaming.prompt_queue import DrawnPrompt, PromptQueue
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.episode.async_runner import AsyncEpisodeRunner, Prompt
from torchrl_envs.episode.episode_env import EpisodeEnv

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

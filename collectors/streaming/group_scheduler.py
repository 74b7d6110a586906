"""Groups between data and trainer: which prompt is drawn next, and which groups wait."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from collectors.ledger import GroupLedger, GroupState, Refill, Ticket
from collectors.ledger.reasons import NO_SIGNAL
from objectives.advantages.group_refill import MAX_DRAWS
from torchrl_data.conversation import stream_number
from torchrl_data.stop_reason import StopReason
from torchrl_envs.datasets.primer import DataExhaustedError, DataLoadingPrimer
from torchrl_envs.datasets.row_stream import Place
from torchrl_envs.episode.async_runner import AsyncEpisodeRunner, Prompt, prompt_of
from torchrl_envs.episode.episode import Episode

from .group_runner import EpisodeEnd


class DrawnPrompt(NamedTuple):
    """A prompt that is about to be offered to the ledger."""

    ordinal: int
    prompt: Prompt
    episodes: list[Episode]
    """Drawn with it; none where the ledger has to say with which seed."""


class GroupScheduler:
    """Draws prompts for a ledger, and keeps the groups that are finished until they are taken.

    Prompts come in the order of the data; before them, the lowest first, those that are owed.
    :meth:`draw` is for one event loop; the others for whoever holds the collection's lock.

    Args:
        runner: of the environment.
        ledger: numbers the prompts.
        loader: of the environment; ``None`` where something else draws, whose place is not known.
        version: of the engine, while the ledger has its own.
        max_draws: groups without a signal in a row, in steps of training, before the collection
            gives up.
        who: is told of in errors.
    """

    def __init__(
        self,
        runner: AsyncEpisodeRunner,
        ledger: GroupLedger,
        loader: DataLoadingPrimer | None,
        *,
        version: int = 0,
        max_draws: int = MAX_DRAWS,
        who: str,
    ) -> None:
        self._runner = runner
        self._ledger = ledger
        self._loader = loader
        self._who = who
        self._max_draws = max_draws
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
        """Return whether the ledger admits a group, and there may be a prompt for it."""
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
        if self._num_unwanted >= self._max_draws * self._ledger.groups_per_step:
            self.error = (
                f"{self._who}: {self._num_unwanted} groups in a row were refused, because their "
                "rewards are equal, and others were drawn (GroupRefill.max_draws, "
                f"collector.max_draws={self._max_draws}). Make the task easier or harder, or leave "
                "the refill out: MCAdvantage(zero_variance='drop'), collector.refill=false."
            )

    def drop(self, ticket: Ticket, prompt: Prompt, reason: str = "") -> None:
        """Drop a group; without a reason it is given back. The prompt may be owed then."""
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

"""Which prompt comes next: one that is owed, or the next one of the data."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from collectors.ledger import GroupLedger, GroupState, Refill, Ticket
from torchrl_data.stop_reasons import NO_DATA
from torchrl_envs.datasets.primer import DataExhaustedError, DataLoadingPrimer
from torchrl_envs.datasets.sources import Place
from torchrl_envs.episode.async_runner import AsyncEpisodeRunner, Prompt, prompt_of
from torchrl_envs.episode.episode import Episode

from .checks import WHO


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

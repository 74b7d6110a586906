"""Runner of the loop through an episode: begin, turns, finish, close.

:class:`EpisodeRunner` runs the events of many episodes at once; its caller decides when. An event
of an episode is a plain method, or a coroutine that awaits calls
(:meth:`~torchrl_envs.EpisodeTransform.call`). A coroutine never waits for anything else, so any
loop can drive it: :meth:`EpisodeRunner.run` takes all episodes as far as they get, runs all calls
that they ask for at once, and goes on; :meth:`EpisodeRunner.drive` runs one by itself in an event
loop.
"""

import asyncio
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import CoroutineType
from typing import Any, Final

from torchrl_data.conversation import stream_number
from torchrl_data.messages import Message
from torchrl_data.stop_reason import FinishReason, StopReason, kind_of, stop_reason_of
from torchrl_data.tool_calls.parser import TurnParser, parse_tool_calls
from torchrl_envs.concurrency.calls import ConcurrentCalls
from torchrl_envs.concurrency.outcome import Outcome
from torchrl_envs.entries.rewards import Score
from torchrl_envs.tool_results import environment_error

from .episode import LOGGED_EXTRA, Episode
from .episode_transform import EpisodeStartError, EpisodeTransform, overrides
from .lost_episodes import tell_lost
from .pending_calls import EventCoroutine, PendingCall, PendingCalls
from .resources import Resources, close_left_open, close_resources
from .tool_source import ToolDispatcher, ToolSource
from .turn_point import TurnPoint

_EVENTS: Final = {
    "draw": ("draw",),
    "drawn": ("drawn",),
    "begin": ("begin",),
    "before_turn": ("before_turn",),
    "after_turn": ("after_turn",),
    "over": ("over",),
    "finish": ("finish", "finish_batch"),
}
"""Each event with the methods that take part in it."""


class EpisodeRunner:
    """Runs events of episodes, of all transforms in order.

    ``draw -> start -> (before_turn -> turn -> took_turn -> answer)* -> finish -> close``

    A step of an environment calls them for a batch of episodes, an
    :class:`~torchrl_envs.episode.async_runner.AsyncEpisodeRunner` for one episode at a time.

    Args:
        calls: runs what events wait for.
        parse: finds the tool calls of a turn.
    """

    def __init__(self, calls: ConcurrentCalls, parse: TurnParser = parse_tool_calls) -> None:
        self.calls = calls
        self.dispatcher = ToolDispatcher(parse)
        """Answers turns that call tools."""
        self.dispatchers: Sequence[ToolDispatcher] = ()
        """It alone, where there are tools: it answers a turn before all others."""
        self.max_turns: int | None = None
        """Most turns of each episode: the smallest ``max_steps`` of all ``StepCounter``."""
        self.answering: Sequence[EpisodeTransform] = ()
        """Those that answer the policy's turns, in order."""
        self._parts: dict[str, list[EpisodeTransform]] = {event: [] for event in _EVENTS}
        self._answer_cuts: Sequence[EpisodeTransform] = ()
        self._open: dict[int, tuple[int, Resources]] = {}
        self.num_draws = 0
        """How often episodes were drawn: names their random numbers where nothing else does."""
        weakref.finalize(self, close_left_open, self._open)

    def set_transforms(self, transforms: Sequence[EpisodeTransform]) -> None:
        """Set the transforms that take part, in order.

        Raises:
            ValueError: two of them have a tool of the same name.
        """
        sources = [transform for transform in transforms if isinstance(transform, ToolSource)]
        owners: dict[str, str] = {}
        for source in sources:
            own = source.tool_names()
            for name in own.keys() & owners.keys():
                raise ValueError(
                    f"Two sources of tools have one named {name!r}: {owners[name]} and "
                    f"{own[name]}. A call could not tell them apart; rename one, or give "
                    "one source a prefix."
                )
            owners.update(own)
        self.dispatcher.sources = sources
        self._answer_cuts = [part for part in transforms if part.answers_cut_turns]
        for number, transform in enumerate(transforms):
            transform.key = f"{type(transform).__name__}.{number}"
        self._parts = {
            event: [part for part in transforms if any(overrides(part, name) for name in forms)]
            for event, forms in _EVENTS.items()
        }
        self.dispatchers = [self.dispatcher] if sources else []
        self.answering = [*self.dispatchers, *self._parts["after_turn"]]

    # Events -------------------------------------------------------------------------------------

    def draw(self, episodes: Sequence[Episode]) -> None:
        """Give new episodes their examples; one without data has a ``stop_reason`` afterwards."""
        self.hold(episodes)
        try:
            for transform in self._parts["draw"]:
                transform.draw(episodes)
            self.drawn(episodes)
        except Exception:  # no data are left, say: these never begin
            self.close(episodes)
            raise
        for episode in episodes:
            if episode.stream is None:
                episode.stream = stream_number("draw", self.num_draws, episode.row)
        self.num_draws += 1

    def drawn(self, episodes: Sequence[Episode]) -> None:
        """Tell that episodes have their examples, groups and seeds; not of those without data."""
        begins = [episode for episode in episodes if not episode.stop_reason]
        for transform in self._parts["drawn"]:
            if concerned := transform.concerned(begins):
                transform.drawn(concerned)

    def hold(self, episodes: Sequence[Episode]) -> None:
        """Keep what new episodes will hold, until they are closed."""
        for episode in episodes:
            self._open[episode.id] = episode.row, episode.resources

    def begin(self, episodes: Sequence[Episode]) -> None:
        """Draw and start episodes; one that can't start gets a ``stop_reason``."""
        self.draw(episodes)
        self.run(self.start, [episode for episode in episodes if not episode.stop_reason])

    async def start(self, episode: Episode) -> None:
        """Start a drawn episode; one that can't start gets a ``stop_reason``."""
        if self.max_turns is not None:
            episode.limit_turns(self.max_turns)
        for transform in self._parts["begin"]:
            await self.take_part(transform, "begin", episode)
            if kind_of(episode.stop_reason) == StopReason.ENVIRONMENT_ERROR:
                # What it holds of others stays until it is closed.
                own, reason = episode.resources, episode.stop_reason
                rest = close_resources(own, reason, self.calls.timeout_s, owner=transform)
                if rest is not None:
                    await rest
                return
        schemas = [
            tool.schema
            for source in self.dispatcher.sources
            if source.show_schemas and source.concerned([episode])
            for tool in source.tools_of(episode).values()
        ]
        episode.tools = schemas or episode.tools

    def took_turn(self, episode: Episode, finish_reason: str) -> bool:
        """Count a turn that the policy has taken.

        A turn that a limit of tokens cut ends its episode there, and so does one that the engine
        could not serve. Neither tools nor environments see it, except for transforms with
        ``answers_cut_turns``.

        Args:
            episode: whose conversation holds the turn.
            finish_reason: of the turn.

        Returns:
            Whether the turn is to be answered.
        """
        episode.finish_reason = finish_reason
        episode.num_turns += 1
        if kind_of(finish_reason) == FinishReason.ERROR:
            episode.truncate(finish_reason)
        elif episode.is_turn_cut and not any(p.concerned([episode]) for p in self._answer_cuts):
            episode.cut_turn()
        return not episode.is_done

    async def answer(
        self, episode: Episode, parts: Sequence[EpisodeTransform] | None = None
    ) -> None:
        """Answer the turn that the policy has taken.

        Args:
            episode: whose turn :meth:`took_turn` has counted.
            parts: those that answer, in order; all of them, tools first, when not given.
        """
        for part in self.answering if parts is None else parts:
            await self.take_part(part, "after_turn", episode)

    async def before_turn(self, episode: Episode) -> None:
        """Bound the next turn of an episode that goes on; or it gets a ``stop_reason``."""
        bounds = self._parts["before_turn"] if episode.start_turn() else ()
        for part in bounds:
            if not episode.is_over:
                await self.take_part(part, "before_turn", episode)

    async def branch(self, episode: Episode, turns: Sequence[TurnPoint]) -> None:
        """Take an episode that has begun to where another one of its draw was before a turn.

        What tools and environments hold for it gets there by taking part in the turns before.

        Args:
            episode: whose first turn has not been taken.
            turns: of the other one, from its first to the one that is to be taken anew.
        """
        if episode.is_over:
            return
        if any(self._takes_part(owner) for owner in episode.resources):
            for turn, following in pairwise(turns):
                await self._replay(episode, turn, following.before)
                if episode.is_over:
                    return
        *_, last = turns
        episode.take_over(last.before, last.after.before_response())

    def _takes_part(self, owner: Any) -> bool:
        """Return whether what an owner holds may depend on the turns of an episode."""
        events = ("before_turn", "after_turn")
        is_part = isinstance(owner, EpisodeTransform) and not isinstance(owner, ToolSource)
        return not is_part or any(overrides(owner, event) for event in events)

    async def _replay(self, episode: Episode, turn: TurnPoint, then: Episode) -> None:
        """Let an episode take a turn that another one took; it fails if it is answered otherwise.

        Args:
            episode: as the other one was when it took the turn.
            turn: the other one's.
            then: the other one, after the answer.
        """
        episode.conversation = turn.after
        if self.took_turn(episode, turn.finish_reason):
            await self.answer(episode)
            episode.end_turn()
        await self.before_turn(episode)
        found, expected = episode.messages, then.messages
        if not episode.is_over and found == expected:
            return
        if episode.stop_reason and kind_of(episode.stop_reason) == StopReason.ENVIRONMENT_ERROR:
            return
        new = f"ended: {episode.stop_reason}" if episode.is_over else _first_other(found, expected)
        error = EpisodeStartError("BranchRollouts")
        error.__cause__ = RuntimeError(
            f"turn {turn.before.num_turns + 1} of the rollout that it branches from is answered in "
            f"another way when it is taken again: {new}. An environment that branches must answer "
            "by its seed and the turns alone."
        )
        fail(episode, error, self, "branch")

    def run(self, event: Callable[[Any], Any], each: Sequence[Any]) -> None:
        """Run an event on each episode to its end, in their order; what they wait for, at once.

        What the first one raised is raised when all are at their ends.
        """
        errors: dict[int, Exception] = {}
        running: dict[int, EventCoroutine] = {}
        answers: dict[int, list[Outcome]] = {}
        todo: Iterable[int] = range(len(each))
        try:
            while True:
                asked: dict[int, Sequence[PendingCall]] = {}
                for number in todo:
                    try:
                        if number not in answers:
                            waiting = event(each[number])
                            if not isinstance(waiting, CoroutineType):
                                continue
                            running[number] = waiting
                        pending = _advance(running[number], answers.get(number))
                        if pending is not None:
                            asked[number] = pending.calls
                    except Exception as error:
                        errors[number] = error
                if not asked:
                    break
                flat = [*itertools.chain(*asked.values())]
                lanes = list(_by_lane(flat).values())
                found = self.calls.run(
                    [[flat[place].call for place in lane] for lane in lanes],
                    [[flat[place].timeout_s for place in lane] for lane in lanes],
                )
                by_place = dict(zip(itertools.chain(*lanes), itertools.chain(*found), strict=True))
                outcomes = map(by_place.__getitem__, range(len(flat)))
                answers = {n: [*itertools.islice(outcomes, len(asked[n]))] for n in asked}
                todo = asked
        finally:
            for coroutine in running.values():
                coroutine.close()
        if errors:
            raise errors[min(errors)]

    async def drive(self, event: Callable[[Episode], Any], episode: Episode) -> None:
        """Run an event of an episode to its end in an event loop; it waits for no other."""
        waiting, answer = event(episode), None
        if not isinstance(waiting, CoroutineType):
            return
        try:
            while (asked := _advance(waiting, answer)) is not None:
                answer = await self._run(asked.calls)
        finally:
            waiting.close()

    async def _run(self, pending: Sequence[PendingCall]) -> list[Outcome]:
        """Run calls, those of one lane in order, also among several events."""
        lanes = _by_lane(pending)
        results = [Outcome()] * len(pending)

        async def run(key: Any, places: list[int]) -> None:
            lane = [pending[place] for place in places]
            chain, limits = [each.call for each in lane], [each.timeout_s for each in lane]
            async with self.calls.lanes.setdefault(key, asyncio.Lock()):
                outcomes = await self.calls.run_async(chain, limits)
            for place, outcome in zip(places, outcomes, strict=True):
                results[place] = outcome

        if len(lanes) == 1:
            await run(*lanes.popitem())
        else:
            await asyncio.gather(*itertools.starmap(run, lanes.items()))
        return results

    async def take_part(self, part: EpisodeTransform, event: str, episode: Episode) -> None:
        """Run an event of an episode, of a transform or of what tools answer.

        What it raises ends this episode alone, truncated and unscorable, with ``stop_reason``
        ``"environment_error: <where>: <type>: <message>"``; nothing more takes part in it then.
        """
        if episode.stop_reason and kind_of(episode.stop_reason) == StopReason.ENVIRONMENT_ERROR:
            return
        try:
            if part.only_for is None or part.only_for(episode):
                waiting = getattr(part, event)(episode)
                if isinstance(waiting, CoroutineType):
                    await waiting
        except (Exception, SystemExit) as error:
            fail(episode, error, part, event)

    def over(self, episodes: Sequence[Episode]) -> None:
        """Tell that episodes are over, each as soon as it is; to be told again says no more."""
        for transform in self._parts["over"]:
            for episode in transform.concerned(episodes):
                transform.over(episode)

    def finish(self, episodes: Sequence[Episode]) -> None:
        """Score episodes that are over; those that failed, or never began, get no reward."""
        self.over(episodes)
        for episode in episodes:
            episode.drop_unanswered()
            episode.score = Score()
            episode.metrics = {LOGGED_EXTRA: episode.notes} if episode.notes else {}
            episode.token_entries = {}
        scored = [episode for episode in episodes if episode.is_scorable]
        for transform in self._parts["finish"]:
            concerned = transform.concerned(scored)
            if concerned and overrides(transform, "finish_batch"):
                transform.finish_batch(concerned)
            if overrides(transform, "finish"):
                self.run(transform.finish, concerned)
        for episode in episodes:
            if not episode.is_scorable:
                kind, _ = stop_reason_of(episode.stop_reason, StopReason.TRUNCATED)
                episode.score = Score(error=episode.stop_reason if kind.is_failure else "")

    def close(self, episodes: Sequence[Episode]) -> None:
        """Give back what episodes hold, once; they are over, finished or given up."""
        opened = [episode for episode in episodes if episode.id in self._open]
        self._give_back({e.id: e.stop_reason if e.is_done else "" for e in opened})

    def close_rows(self, rows: Sequence[int] | None = None) -> None:
        """Give up the episodes that run in some rows of the environment's batch, or all."""
        wanted = None if rows is None else set(rows)
        opened = self._open.items()
        self._give_back({i: "" for i, (row, _) in opened if wanted is None or row in wanted})

    def _give_back(self, reasons: Mapping[int, str]) -> None:
        """Close episodes by their ids, each with the reason why it is over."""
        held = [(its[1], reasons[i]) for i in reasons if (its := self._open.pop(i, None))]
        self.run(lambda own: close_resources(own[0], own[1], self.calls.timeout_s), held)

    def resources_in(self, row: int) -> Resources:
        """Return what the episode holds that runs in a row of the batch; nothing if none does."""
        return next((own for place, own in self._open.values() if place == row), Resources())

    def take_up(self, episodes: Sequence[Episode], finish_reasons: Sequence[str]) -> list[Episode]:
        """Take up episodes whose turns the policy has taken, with the resources that they hold.

        Args:
            episodes: as read from a batch; those with a ``stop_reason`` took none.
            finish_reasons: of the turns, by the row.

        Returns:
            The episodes whose turns are to be answered.
        """
        answered = []
        for episode in episodes:
            held = self._open.get(episode.id)
            episode.resources = Resources() if held is None else held[1]
            if not episode.stop_reason and self.took_turn(episode, finish_reasons[episode.row]):
                answered.append(episode)
        return answered


def _advance(coroutine: EventCoroutine, answer: list[Outcome] | None) -> PendingCalls | None:
    """Return what an event waits for next; nothing where it is at its end."""
    try:
        asked: Any = coroutine.send(answer)  # type: ignore[arg-type]
        while not isinstance(asked, PendingCalls):
            asked = coroutine.throw(
                TypeError(
                    f"An event of an episode awaits self.call(...) only, got {type(asked).__name__}"
                    ". Put what it waits for into a function, sync or async, and await "
                    "self.call(function)."
                )
            )
    except StopIteration:
        return None
    return asked


def _by_lane(pending: Iterable[PendingCall]) -> dict[Hashable, list[int]]:
    """The places of calls that run one after the other; one without a lane is alone in its own."""
    lanes: dict[Hashable, list[int]] = {}
    for place, each in enumerate(pending):
        lanes.setdefault(object() if each.lane is None else each.lane, []).append(place)
    return lanes


def _first_other(found: Sequence[Message], expected: Sequence[Message]) -> str:
    """The first message that is not what it was, and what it was."""
    for new, old in itertools.zip_longest(found, expected):
        if new != old:
            return f"{_shown(new)}, and it was {_shown(old)}"
    return ""


def _shown(message: Message | None) -> str:
    return "nothing" if message is None else f"{message.get('content')!r:.60}"


def fail(episode: Episode, error: BaseException, part: Any, event: str) -> None:
    """An episode is over, or does not begin, because a part of the environment raised."""
    where = "tools" if isinstance(part, ToolDispatcher) else type(part).__name__
    if isinstance(error, EpisodeStartError):
        where, error = error.where, error.__cause__ or error
    tell_lost(f"Row {episode.row}", f"{where} failed in {event}", error)
    episode.stop_reason = ""
    episode.truncate(environment_error(error, where))

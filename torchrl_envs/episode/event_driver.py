"""Events of many episodes at once: what they wait for runs together.

An event of an episode is a plain method, or a coroutine that awaits calls
(:meth:`~torchrl_envs.EpisodeTransform.call`). A coroutine never waits for anything else, so any
loop can drive it: here one that takes all episodes as far as they get, runs what all of them ask
for at once, and goes on.
"""

import asyncio
import itertools
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Sequence,
)
from types import CoroutineType
from typing import Any

from torchrl_envs.concurrency.calls import ConcurrentCalls
from torchrl_envs.concurrency.outcome import Outcome

from .episode import Episode
from .pending_calls import EventCoroutine, PendingCall, PendingCalls


class EventDriver:
    """Runs events, sync or ``async``: many in step with each other, or each by itself in a loop.

    Args:
        calls: runs what they wait for.
    """

    def __init__(self, calls: ConcurrentCalls) -> None:
        self.calls = calls

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

    async def drive(self, event: Callable[["Episode"], Any], episode: "Episode") -> None:
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


def _advance(coroutine: EventCoroutine, answer: list[Outcome] | None) -> PendingCalls | None:
    """What an event waits for next; nothing where it is at its end."""
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

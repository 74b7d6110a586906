"""Events of many episodes at once: what they wait for runs together.

An event of an episode is a plain method, or a coroutine that awaits calls
(:meth:`~torchrl_envs.EpisodeTransform.call`). A coroutine never waits for anything else, so any
loop can drive it: here one that takes all episodes as far as they get, runs what all of them ask
for at once, and goes on.
"""

import asyncio
import inspect
import weakref
from collections.abc import Coroutine, Generator, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torchrl_envs.concurrency.calls import Call, ConcurrentCalls, Outcome

EventCoroutine = Coroutine["PendingCalls", list[Outcome], None]


class PendingCall(NamedTuple):
    """A call that an event waits for."""

    call: Call
    """Takes no arguments; sync, or ``async``."""
    timeout_s: float
    """Deadline, in seconds from when it starts."""
    lane: Hashable
    """Calls of one lane run one after the other, also those of several episodes; none starts after
    one that missed its deadline."""


class PendingCalls(NamedTuple):
    """Calls that an event waits for, all of them; awaiting it gives an outcome for each."""

    calls: Sequence[PendingCall]

    def __await__(self) -> Generator["PendingCalls", list[Outcome], list[Outcome]]:
        return (yield self)


def drive(events: Mapping[int, Any], calls: ConcurrentCalls) -> dict[int, Exception]:
    """Run what events returned, by number, to the end; what was raised, by number."""
    errors: dict[int, Exception] = {}
    running: dict[int, EventCoroutine] = {
        number: event for number, event in events.items() if inspect.iscoroutine(event)
    }
    answers: Mapping[int, list[Outcome] | None] = dict.fromkeys(running)
    try:
        while running:
            asked: dict[int, PendingCalls] = {}
            for number, coroutine in list(running.items()):
                try:
                    asked[number] = _checked(coroutine.send(answers[number]))  # type: ignore[arg-type]
                except StopIteration:
                    del running[number]
                except Exception as error:
                    errors[number] = error
                    del running[number]
            answers = run_pending(asked, calls)
    finally:
        for coroutine in running.values():
            coroutine.close()
    return errors


class LoopDriver:
    """Runs the coroutines of events in an event loop, each by itself: none waits for another.

    Args:
        calls: runs what they wait for.
    """

    def __init__(self, calls: ConcurrentCalls) -> None:
        self._calls = calls
        self._lanes: weakref.WeakValueDictionary[Hashable, asyncio.Lock]
        self._lanes = weakref.WeakValueDictionary()

    async def drive(self, event: Any) -> None:
        """Run what an event returned, a coroutine or ``None``, to its end."""
        if not inspect.iscoroutine(event):
            return
        answer: list[Outcome] | None = None
        try:
            while True:
                asked = _checked(event.send(answer))  # type: ignore[arg-type]
                answer = await self._run(asked.calls)
        except StopIteration:
            return
        finally:
            event.close()

    async def _run(self, pending: Sequence[PendingCall]) -> list[Outcome]:
        """Run calls, those of one lane in order, also among several events."""
        lanes: dict[Hashable, list[int]] = {}
        for place, each in enumerate(pending):
            key = ("alone", place) if each.lane is None else ("lane", each.lane)
            lanes.setdefault(key, []).append(place)
        if len(lanes) == 1:
            ((key, places),) = lanes.items()
            return await self._run_lane(key, [pending[place] for place in places])
        results: list[Any] = [None] * len(pending)

        async def run(key: Hashable, places: list[int]) -> None:
            outcomes = await self._run_lane(key, [pending[place] for place in places])
            for place, outcome in zip(places, outcomes, strict=True):
                results[place] = outcome

        await asyncio.gather(*[run(key, places) for key, places in lanes.items()])
        return results

    async def _run_lane(self, key: Any, lane: Sequence[PendingCall]) -> list[Outcome]:
        chain, limits = [each.call for each in lane], [each.timeout_s for each in lane]
        if key[0] == "alone":
            return (await self._calls.run_async([chain], [limits]))[0]
        lock = self._lanes.get(key)
        if lock is None:
            lock = self._lanes[key] = asyncio.Lock()
        async with lock:
            return (await self._calls.run_async([chain], [limits]))[0]


def _checked(asked: Any) -> PendingCalls:
    if not isinstance(asked, PendingCalls):
        raise TypeError(
            f"An event of an episode awaits self.call(...) only, got {type(asked).__name__}. Put "
            "what it waits for into a function, sync or async, and await self.call(function)."
        )
    return asked


def run_pending(
    asked: Mapping[int, PendingCalls], calls: ConcurrentCalls
) -> dict[int, list[Outcome]]:
    """Run what several events wait for at once; an outcome per call, by number of the event."""
    chains: list[list[PendingCall]] = []
    lanes: dict[Hashable, int] = {}
    places: dict[int, list[tuple[int, int]]] = {}
    for number, pending in asked.items():
        own = places[number] = []
        for each in pending.calls:
            new = len(chains)
            chain = new if each.lane is None else lanes.setdefault(each.lane, new)
            if chain == new:
                chains.append([])
            own.append((chain, len(chains[chain])))
            chains[chain].append(each)
    if not chains:
        return {number: [] for number in asked}
    limits = [[each.timeout_s for each in chain] for chain in chains]
    outcomes = calls.run([[each.call for each in chain] for chain in chains], limits)
    return {n: [outcomes[chain][place] for chain, place in own] for n, own in places.items()}

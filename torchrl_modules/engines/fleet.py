"""Several engines behind one: who draws what, and one version of the weights for all."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, Self, TypeVar, cast

from torch import Tensor

from torchrl_modules.sampling import SamplingParameters
from torchrl_modules.weights import UpdateRefused, next_version

from .bridges import open_async
from .engine import AsyncEngine, EngineDied, EngineLoad, Generation, can_keep_caches, tells_load
from .supervision import Caretaker, EngineHealth, EngineState, Member, close_engine

# Which engine of a fleet draws a response: that of its conversation, or the least loaded.

_MAX_SESSIONS: Final = 1 << 16


class SessionRouter:
    """Keeps conversations with their engines, and gives new ones to whoever has least to do.

    Args:
        max_sessions: so many conversations are remembered, the latest used ones.
    """

    def __init__(self, *, max_sessions: int = _MAX_SESSIONS) -> None:
        self._engines: OrderedDict[Hashable, int] = OrderedDict()
        self._max_sessions = max_sessions

    def choose(self, session: Hashable, outstanding: Mapping[int, int]) -> int:
        """The engine that draws the next response of a conversation.

        Args:
            session: the conversation; ``None``: none in particular.
            outstanding: tokens that each engine that serves has still to read and to draw.
        """
        engine = self._engines.get(session, -1)
        if engine not in outstanding:
            engine = min(outstanding, key=lambda each: (outstanding[each], each))
        if session is not None:
            self._engines[session] = engine
            self._engines.move_to_end(session)
            if len(self._engines) > self._max_sessions:
                self._engines.popitem(last=False)
        return engine

    def end(self, session: Hashable) -> int | None:
        """A conversation is over; gives the engine that it was with."""
        return self._engines.pop(session, None)


# Several engines that are one to whoever asks: :class:`EngineFleet`.

T = TypeVar("T")
Opener = Callable[[], AsyncEngine]


class EngineFleet:
    """Several engines behind one :class:`~torchrl_modules.AsyncEngine`.

    A conversation stays with its engine, which keeps what it has read of it; a new one goes to the
    engine that has the fewest tokens to read and to draw. When an engine dies, what it had in
    flight raises :class:`~torchrl_modules.EngineDied`, and the others go on; it is opened again,
    and serves once it has completed an update to the weights that the others have::

        HEALTHY <-> SUSPECT -> DEAD -> RESTARTING -> STALE -> HEALTHY

    An engine that does not answer is suspected, and gets nothing new until it does. An update goes
    to all engines that serve. If none takes it, it is refused as a whole; if some do, one that does
    not is stale and serves nothing until it takes a later one.

    Calls may come from any event loop. The engines belong to the fleet, which closes them.

    Args:
        engines: each a URL of a vLLM server; a function that opens an engine, which is called again
            when it dies, such as ``partial(open_async, policy.engine)``; or whatever
            :func:`~torchrl_modules.open_async` takes, which nobody opens again. All serve the same
            model.
        max_restarts: engines in a row that may die in one place without finishing a response before
            the place is given up.
        probe_interval_s: between two looks at an engine that is well.
        suspect_timeout_s: an engine that does not answer for so long is dead. One that answers and
            draws no token is found by its own ``stall_timeout_s``.

    Raises:
        ValueError: there is no engine, one stands there twice, they have vocabularies of different
            sizes, or a number is out of range.
        TypeError: one is nothing that can be served.
        Exception: what opening the first engine that can't be opened raised.
    """

    def __init__(
        self,
        engines: Sequence[object],
        *,
        max_restarts: int = 3,
        probe_interval_s: float = 1.0,
        suspect_timeout_s: float = 30.0,
    ) -> None:
        self._check(engines, max_restarts, probe_interval_s, suspect_timeout_s)
        self.weights: Mapping[str, Tensor] | None = None
        """What was pushed last, for engines that come back."""
        self.is_paused = False
        self._is_closed = False
        self._router = SessionRouter()
        self._updating = asyncio.Lock()
        self._changed = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._members = self._opened(engines)
        self._caretakers = [
            Caretaker(
                member,
                self,
                max_restarts=max_restarts,
                probe_interval_s=probe_interval_s,
                suspect_timeout_s=suspect_timeout_s,
            )
            for member in self._members
        ]
        self._version = max(member.engine.version for member in self._members)
        for member in self._members:
            member.known = member.known.wants(self._version).acknowledged(
                member.known.incarnation, member.engine.version
            )
        self._thread = threading.Thread(target=self._serve, name="engine-fleet", daemon=True)
        self._thread.start()

    @staticmethod
    def _check(engines: Sequence[object], max_restarts: int, *seconds: float) -> None:
        if isinstance(engines, str) or not engines:
            raise ValueError(f"EngineFleet takes a list of engines or URLs, got {engines!r}.")
        twice = [each for i, each in enumerate(engines) if _is_in(each, engines[:i])]
        if twice:
            raise ValueError(f"EngineFleet: {twice[0]!r} stands there twice.")
        if max_restarts < 0 or min(seconds) <= 0:
            raise ValueError(
                "EngineFleet: max_restarts must be at least 0, probe_interval_s and "
                f"suspect_timeout_s positive, got {max_restarts}, {seconds[0]} and {seconds[1]}."
            )

    def _opened(self, engines: Sequence[object]) -> list[Member]:
        openers = [as_opener(engine) for engine in engines]
        with ThreadPoolExecutor(len(engines), thread_name_prefix="open-engine") as pool:
            calls = [
                pool.submit(open_async, engine) if opener is None else pool.submit(opener)
                for engine, opener in zip(engines, openers, strict=True)
            ]
        errors = [error for call in calls if (error := call.exception()) is not None]
        opened = [call.result() for call in calls if call.exception() is None]
        sizes = {size for each in opened if (size := getattr(each, "vocab_size", None)) is not None}
        if not errors and len(sizes) > 1:
            errors.append(
                ValueError(
                    "EngineFleet: all engines serve the same model, but these have vocabularies "
                    f"of {sorted(sizes)} tokens."
                )
            )
        if errors:
            for engine in opened:
                close_engine(engine)
            self._loop.close()
            raise errors[0]
        return [
            Member(getattr(engine, "name", "") or f"engine {number}", engine, opener, self._notify)
            for number, (engine, opener) in enumerate(zip(opened, openers, strict=True))
        ]

    # What is known of it ------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of the weights that serve: what all engines have that do."""
        return self._version

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below it, where an engine knows it."""
        return self._least("vocab_size")

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a prompt and its response, where an engine knows it."""
        return self._least("max_model_len")

    def _least(self, name: str) -> int | None:
        known = [getattr(member.engine, name, None) for member in self._members]
        return min((value for value in known if value is not None), default=None)

    def check_sampling(self, params: SamplingParameters) -> None:
        """Check that every engine can draw from a distribution.

        Raises:
            ValueError: one can't.
        """
        for member in self._members:
            if (check := getattr(member.engine, "check_sampling", None)) is not None:
                check(params)

    @property
    def model(self) -> Any:
        """What an engine of this process draws from, if there is one."""
        models = (getattr(member.engine, "model", None) for member in self._members)
        return next((model for model in models if model is not None), None)

    @property
    def can_keep_caches(self) -> bool:
        """Whether every engine's `update_weights` takes ``recompute=False``."""
        return all(can_keep_caches(member.engine) for member in self._members)

    @property
    def tells_load(self) -> bool:
        """Whether every engine tells how full it is."""
        return all(tells_load(member.engine) for member in self._members)

    def health(self) -> list[EngineHealth]:
        """What is known of each engine, in the order in which they were given."""
        return [member.health for member in self._members]

    # For callers, in any event loop -------------------------------------------------------------

    async def respond(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
    ) -> Generation:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.respond`.

        While no engine serves it waits for one that comes back.

        Raises:
            EngineDied: the engine that drew it died; or none serves, and none will.
        """
        budget = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        return await self._run(self._respond(prompt, params, budget, session))

    async def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
    ) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.update_weights`.

        A copy is kept in memory, for engines that come back. Where all engines die over it, it is
        made with those that come back. ``recompute=False`` takes engines that `can_keep_caches`.

        Raises:
            EngineDied: no engine serves, and none will.
            UpdateRefused: no engine takes it; the old weights keep serving.
        """
        await self._run(self._update(state_dict, version, recompute))

    async def measure_load(self) -> EngineLoad:
        """How full the fullest engine is that serves, and the preemptions of all.

        Raises:
            EngineDied: an engine died, or none serves, and none will.
            ConnectionError: one did not answer.
        """
        return await self._run(self._measure_load())

    async def pause(self) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.pause`."""
        await self._run(self._set_paused(True))

    async def resume(self) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.resume`."""
        await self._run(self._set_paused(False))

    def end_session(self, session: Hashable) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.end_session`."""
        with suppress(RuntimeError):  # It is closed, and keeps nothing.
            self._loop.call_soon_threadsafe(self._end_session, session)

    def close(self) -> None:
        """Abort what is in flight, and close the engines. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for caretaker in self._caretakers:
            caretaker.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        with ThreadPoolExecutor(len(self._members), thread_name_prefix="close-engine") as pool:
            list(pool.map(lambda member: close_engine(member.engine), self._members))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.close)

    async def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._is_closed:
            coroutine.close()
            raise RuntimeError("EngineFleet is closed.")
        call: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise RuntimeError("EngineFleet was closed.") from None
            raise

    # In the fleet's event loop ------------------------------------------------------------------

    def _serve(self) -> None:
        for caretaker in self._caretakers:
            self._loop.create_task(caretaker.run())
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.close()

    def _notify(self) -> None:
        """Everybody who waits for an engine looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _serving(self) -> dict[int, Member]:
        """The engines that serve, as soon as there is one."""
        while True:
            serving = {i: each for i, each in enumerate(self._members) if each.known.may_serve}
            if serving:
                return serving
            if not any(caretaker.may_return for caretaker in self._caretakers):
                raise EngineDied(
                    "EngineFleet: no engine serves any more: "
                    + "; ".join(f"{each.name}: {each.reason}" for each in self._members)
                )
            await self._changed.wait()

    async def _respond(
        self, prompt: Sequence[int], params: SamplingParameters, budget: int, session: Hashable
    ) -> Generation:
        serving = await self._serving()
        index = self._router.choose(session, {i: one.outstanding for i, one in serving.items()})
        return await serving[index].respond(prompt, params, budget, session)

    async def _measure_load(self) -> EngineLoad:
        serving = (await self._serving()).values()
        uses = await asyncio.gather(*(member.measure_cache_use() for member in serving))
        return EngineLoad(max(uses), sum(member.num_preemptions for member in self._members))

    def _end_session(self, session: Hashable) -> None:
        index = self._router.end(session)
        if index is not None and self._members[index].known.state is not EngineState.DEAD:
            self._members[index].engine.end_session(session)

    async def _update(
        self, state_dict: Mapping[str, Tensor], version: int | None, recompute: bool
    ) -> None:
        async with self._updating:
            number = next_version(version, self._version, who="EngineFleet.update_weights")
            copying = asyncio.create_task(asyncio.to_thread(_copied, state_dict))
            try:
                await self._push(state_dict, number, recompute)
            finally:
                weights = await copying
            self.weights, self._version = weights, number
            for member in self._members:
                member.become(member.known.wants(number))

    async def _push(self, state_dict: Mapping[str, Tensor], version: int, recompute: bool) -> None:
        """Give all engines that serve new weights, and go on once one has them."""
        while True:
            serving = (await self._serving()).values()
            pushes = (one.push(state_dict, version, recompute=recompute) for one in serving)
            refusals = await asyncio.gather(*pushes)
            if any(member.known.served == version for member in serving):
                return
            for refusal in refusals:
                if refusal is not None:
                    raise UpdateRefused(str(refusal)) from refusal

    async def _set_paused(self, paused: bool) -> None:
        self.is_paused, running = paused, (EngineState.HEALTHY, EngineState.SUSPECT)
        members = [member for member in self._members if member.known.state in running]
        await asyncio.gather(*(member.set_paused(paused) for member in members))


def as_opener(engine: object) -> Opener | None:
    """What opens an engine again when it has died; ``None``: nothing does.

    Args:
        engine: what a fleet was given.
    """
    if isinstance(engine, str):
        return lambda: open_async(engine)
    if callable(engine) and not isinstance(engine, AsyncEngine):
        return cast("Opener", engine)
    return None


def _is_in(engine: object, others: Sequence[object]) -> bool:
    """Whether it is there already; the same function opens another engine each time."""
    if isinstance(engine, str):
        return engine in others
    return as_opener(engine) is None and any(engine is other for other in others)


def _copied(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in state_dict.items()}

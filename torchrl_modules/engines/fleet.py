"""Several engines behind one: who draws what, and one version of the weights for all."""

import asyncio
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

from torch import Tensor

from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import POSITIVE, check_counts, check_numbers
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.weights.adapter_weights import AdapterWeights, mapped
from torchrl_modules.weights.expected_weights import UpdateRefused, next_version
from torchrl_modules.weights.lazy_weights import copied

from .engine import (
    AsyncEngine,
    ClosedOnLeaving,
    EngineDied,
    EngineLoad,
    Generation,
    can_keep_caches,
    push_weights,
)
from .engine_load import tells_load
from .loop_thread import LoopThread
from .open_async import open_async
from .process_state import EngineHealth
from .supervision import EngineState, Supervision

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


# One engine of a fleet: what it has to do, and what becomes of it when it dies.

Opener = Callable[[], AsyncEngine]
_log = logging.getLogger(__name__)
SERVING: Final = (EngineState.HEALTHY, EngineState.SUSPECT)
_PROBE_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 0.5
_LONGEST_RETRY_S: Final = 30.0


@dataclass(eq=False)
class Member:
    """An engine of a fleet, taken from state to state; all is called in the fleet's event loop."""

    fleet: "EngineFleet"
    name: str
    engine: AsyncEngine
    opener: Opener | None
    """Opens another one when it died; ``None``: nobody can."""
    known: Supervision = field(default_factory=lambda: Supervision().started())
    is_paused: bool = False
    num_failures: int = 0
    """Engines in a row that died without a response."""
    num_restarts: int = 0
    outstanding: int = 0
    num_preemptions: int = 0
    """Since it was first asked, whichever engine it was."""
    preemptions_told: float = math.inf
    reason: str = ""
    refused: int | None = None
    """The version that it does not take."""
    check_now: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is to be looked at."""
    requests: set[asyncio.Task[Generation]] = field(default_factory=set)
    answered_s: float = field(default_factory=time.monotonic)

    @property
    def may_return(self) -> bool:
        """Whether it serves, or will one day."""
        if self.known.state is not EngineState.DEAD:
            return True
        return self.opener is not None and self.num_failures <= self.fleet.max_restarts

    def become(self, known: Supervision, reason: str = "") -> None:
        """Another state, and why; everybody who waits looks again."""
        if known == self.known:
            return
        if known.state is not self.known.state:
            say = _log.info if known.may_serve else _log.warning
            say("%s is %s%s", self.name, known.state.value, f": {reason}" if reason else "")
            self.reason = reason
        self.known = known
        self.check_now.set()
        self.fleet._notify()

    def die(self, reason: str) -> None:
        """The engine is gone or stuck: what it had in flight is lost."""
        if self.known.state is EngineState.DEAD:
            return
        self.num_failures += 1
        self.become(self.known.died(self.known.incarnation), reason)
        for request in self.requests:
            request.cancel()

    async def respond(
        self, prompt: Sequence[int], params: SamplingParameters, budget: int, **further: Any
    ) -> Generation:
        """Draw one response.

        Raises:
            EngineDied: the engine died before it was whole.
        """
        version = self.engine.version  # where it does not say which weights drew what
        call = self.engine.respond(prompt, params, max_new_tokens=budget, **further)
        request = asyncio.ensure_future(call)
        # Nobody may be left who asks what it raised.
        request.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self.requests.add(request)
        num_tokens = len(prompt) + budget
        self.outstanding += num_tokens
        try:
            await asyncio.wait({request})
        finally:
            request.cancel()  # The caller was cancelled, if it is not done.
            self.outstanding -= num_tokens
            self.requests.discard(request)
        if request.cancelled():
            raise EngineDied(f"EngineFleet: {self.name} died: {self.reason}")
        error = request.exception()
        if error is None:
            self.num_failures = 0
            drawn = request.result().drawn_by(version)
            self.fleet.note_drawn(drawn)
            return drawn
        if isinstance(error, EngineDied) and hasattr(self.engine, "check_health"):
            self.become(self.known.suspected(self.known.incarnation), str(error))
        elif isinstance(error, EngineDied):  # It can't be asked how it is.
            self.die(str(error))
        elif isinstance(error, RuntimeError | ConnectionError):
            self.die(f"{type(error).__name__}: {error}")
        else:
            raise error
        raise EngineDied(f"EngineFleet: {self.name}: {error}") from error

    async def push(
        self,
        weights: Mapping[str, Tensor],
        version: int,
        *,
        recompute: bool = True,
        acknowledge: bool = True,
    ) -> UpdateRefused | None:
        """Replace its weights; gives why it refuses them. One that fails has died."""
        incarnation = self.known.incarnation
        try:
            await push_weights(self.engine, weights, version=version, recompute=recompute)
        except UpdateRefused as refused:
            self.refused = version
            return refused
        except Exception as error:
            if incarnation == self.known.incarnation:
                self.die(f"it failed in an update: {error}")
        else:
            if acknowledge:
                self.become(self.known.acknowledged(incarnation, version))
        return None

    async def set_paused(self, paused: bool) -> None:
        """Draw no more tokens, or go on; one that can't has died."""
        try:
            await (self.engine.pause() if paused else self.engine.resume())
        except Exception as error:
            self.die(f"{type(error).__name__}: {error}")
        else:
            self.is_paused = paused

    async def run(self) -> None:
        """Look after it until it is given up."""
        while self.may_return:
            self.check_now.clear()
            match self.known.state:
                case EngineState.HEALTHY:
                    try:
                        async with asyncio.timeout(self.fleet.probe_interval_s):
                            await self.check_now.wait()
                    except TimeoutError:
                        await self._probe()
                case EngineState.SUSPECT:
                    if not await self._probe():
                        await asyncio.sleep(_RETRY_S)
                case EngineState.DEAD:
                    await self._restart()
                case EngineState.STALE:
                    await self._refresh()
        _log.error("%s is given up: %s", self.name, self.reason)

    async def _probe(self) -> bool:
        """Return whether it says that it is well."""
        incarnation = self.known.incarnation
        check = getattr(self.engine, "check_health", None)
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                await (asyncio.sleep(0) if check is None else check())
        except EngineDied as error:
            if incarnation == self.known.incarnation:
                self.die(str(error))
            return False
        except Exception as error:
            silent_s = time.monotonic() - self.answered_s
            reason = f"no answer for {silent_s:.0f} s ({type(error).__name__}: {error})"
            self.become(self.known.suspected(incarnation), reason)
            if silent_s >= self.fleet.suspect_timeout_s:
                self.die(reason)
            return False
        self.answered_s = time.monotonic()
        self.become(self.known.cleared(incarnation))
        return True

    async def _restart(self) -> None:
        """Open another engine, in a thread, once the old one has let go of what it held."""
        assert self.opener is not None
        old, opener = self.engine, self.opener
        call: Future[AsyncEngine] = Future()

        def reopen() -> None:
            close_engine(old)
            try:
                engine = opener()
            except Exception as error:
                if call.set_running_or_notify_cancel():
                    call.set_exception(error)
            else:
                if call.set_running_or_notify_cancel():
                    call.set_result(engine)
                else:  # The fleet was closed meanwhile.
                    close_engine(engine)

        self.become(self.known.restarting(), self.reason)
        if self.num_failures > 1:
            await asyncio.sleep(min(_RETRY_S * 2**self.num_failures, _LONGEST_RETRY_S))
        threading.Thread(target=reopen, name="open-engine", daemon=True).start()
        try:
            self.engine = await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            if not call.cancelled() and call.exception() is None:
                close_engine(call.result())
            raise
        except Exception as error:
            self.die(f"it did not come back: {type(error).__name__}: {error}")
            return
        self.num_restarts += 1
        self.is_paused, self.refused = False, None
        self.answered_s = time.monotonic()
        self.become(self.known.started())

    async def _refresh(self) -> None:
        """Give it the weights that are wanted, if there are any that it takes."""
        wanted, incarnation = self.known.wanted, self.known.incarnation
        if self.engine.version != wanted:
            if self.fleet.weights is None or self.refused == wanted:
                await self.check_now.wait()  # until others are wanted, say
                return
            refusal = await self.push(self.fleet.weights, wanted, acknowledge=False)
            if refusal is not None:
                self.reason = str(refusal)
                _log.warning("%s refuses version %d, and serves nothing", self.name, wanted)
            if refusal is not None or self.known.state is EngineState.DEAD:
                return
        while self.is_paused != self.fleet.is_paused:
            await self.set_paused(self.fleet.is_paused)
            if self.known.state is EngineState.DEAD:
                return
        self.become(self.known.acknowledged(incarnation, self.engine.version))


def close_engine(engine: AsyncEngine) -> None:
    """Close an engine that may be broken; what it says to that is logged."""
    try:
        engine.close()
    except Exception:
        _log.warning("An engine could not be closed", exc_info=True)


# Several engines that are one to whoever asks: :class:`EngineFleet`.


class EngineFleet(ChecksAttributes, ClosedOnLeaving):
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

    Example:
        >>> from functools import partial
        >>> from torchrl_modules import TransformersEngine, open_async
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> engine = TransformersEngine(tiny_qwen3(len(tokenizer)))
        >>> fleet = EngineFleet([partial(open_async, engine) for _ in range(2)])  # or two URLs
        >>> len(fleet.health())  # vLLMWrapper(fleet, ...), StreamingCollector(..., engine=fleet)
        2
        >>> fleet.close()
    """

    def __init__(
        self,
        engines: Sequence[object],
        *,
        max_restarts: int = 3,
        probe_interval_s: float = 1.0,
        suspect_timeout_s: float = 30.0,
    ) -> None:
        if isinstance(engines, str) or not engines:
            raise ValueError(f"EngineFleet takes a list of engines or URLs, got {engines!r}.")
        for i, engine in enumerate(engines):  # The same function opens another one each time.
            if engine in engines[:i] and (isinstance(engine, str) or as_opener(engine) is None):
                raise ValueError(f"EngineFleet: {engine!r} stands there twice.")
        self.max_restarts: int = self._checked_change("max_restarts", max_restarts)
        self.probe_interval_s: float = self._checked_change("probe_interval_s", probe_interval_s)
        self.suspect_timeout_s: float = self._checked_change("suspect_timeout_s", suspect_timeout_s)
        self.weights: Mapping[str, Tensor] | None = None
        """What was pushed last, for engines that come back."""
        self.is_paused = False
        self._router = SessionRouter()
        self._updating = asyncio.Lock()
        self._changed = asyncio.Event()
        self._members = self._opened(engines)
        self._version = max(member.engine.version for member in self._members)
        self._drawn = 0
        self._loop = LoopThread("EngineFleet")
        for member in self._members:
            known = member.known.wants(self._version)
            member.known = known.acknowledged(known.incarnation, member.engine.version)
        for member in self._members:
            self._loop.submit(member.run())

    changeable = frozenset({"max_restarts", "probe_interval_s", "suspect_timeout_s"})

    def _checked_change(self, name: str, value: Any) -> Any:
        if name == "max_restarts":
            check_counts("EngineFleet", 0, max_restarts=value)
        else:
            check_numbers("EngineFleet", POSITIVE, **{name: value})
        return value

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
            what = f"but these have vocabularies of {sorted(sizes)} tokens"
            errors.append(ValueError(f"EngineFleet: all engines serve the same model, {what}."))
        adapters = {getattr(each, "max_adapters", 0) > 0 for each in opened}
        if not errors and len(adapters) > 1:
            how = "some take adapters alone (enable_lora) and others whole weights. Start all alike"
            errors.append(ValueError(f"EngineFleet: {how}."))
        reads = {getattr(each, "images", None) is not None for each in opened}
        if not errors and len(reads) > 1:
            how = "some read images and others do not. Give all of them the processor, or none"
            errors.append(ValueError(f"EngineFleet: {how}."))
        if errors:
            for engine in opened:
                close_engine(engine)
            raise errors[0]
        return [
            Member(self, getattr(engine, "name", "") or f"engine {number}", engine, opener)
            for number, (engine, opener) in enumerate(zip(opened, openers, strict=True))
        ]

    # What is known of it ------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights that serve: the one of all engines that do, or take an update.

        No token that was handed out is of a later one: an engine draws with new weights before
        its acknowledgement of them has come.
        """
        served = (member.known.served or 0 for member in self._members)
        now = (each.engine.version for each in self._members if each.known.state in SERVING)
        return max(self._version, self._drawn, *served, *now)

    def note_drawn(self, response: Generation) -> None:
        """Take note of the versions of a response, which is about to be handed out."""
        self._drawn = max(self._drawn, *(span.version for span in response.versions), 0)

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below it, where an engine knows it."""
        return self._least("vocab_size")

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a prompt and its response, where an engine knows it."""
        return self._least("max_model_len")

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response by the model's own settings, where an engine says so."""
        ends = (getattr(member.engine, "end_token_ids", ()) for member in self._members)
        return next((tuple(each) for each in ends if each), ())

    @property
    def update_dtype(self) -> Any:
        """In which type all take weights that are sent; ``None`` where they differ."""
        dtypes = {getattr(member.engine, "update_dtype", None) for member in self._members}
        return dtypes.pop() if len(dtypes) == 1 else None

    @property
    def max_adapters(self) -> int:
        """Sets of adapters that every engine draws with at once; 0: they take whole weights."""
        return self._least("max_adapters") or 0

    @property
    def images(self) -> Any:
        """What images become; ``None`` where rows with images are refused."""
        return getattr(self._members[0].engine, "images", None)

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
        """The model that an engine of this process draws from, if there is one."""
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
        """Return what is known of each engine, in the order in which they were given."""
        return [
            EngineHealth(
                one.name,
                one.known.state,
                one.known.served,
                len(one.requests),
                one.outstanding,
                one.num_restarts,
                one.reason,
            )
            for one in self._members
        ]

    # For callers, in any event loop -------------------------------------------------------------

    async def respond(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
        images: Sequence[str] = (),
    ) -> Generation:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.respond`.

        While no engine serves it waits for one that comes back.

        Raises:
            EngineDied: the engine that drew it died; or none serves, and none will.
        """
        budget = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        further: dict[str, Any] = {"images": images} if images else {}

        async def respond() -> Generation:
            serving = await self._serving()
            tokens = {i: one.outstanding for i, one in serving.items()}
            chosen = serving[self._router.choose(session, tokens)]
            return await chosen.respond(prompt, params, budget, session=session, **further)

        return await self._loop.call(respond())

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
        await self._loop.call(self._update(state_dict, version, recompute))

    async def measure_load(self) -> EngineLoad:
        """Return how full the fullest engine is that serves, and the preemptions of all.

        Raises:
            EngineDied: an engine died, or none serves, and none will.
            ConnectionError: one did not answer.
        """
        return await self._loop.call(self._measure_load())

    async def pause(self) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.pause`."""
        await self._loop.call(self._set_paused(True))

    async def resume(self) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.resume`."""
        await self._loop.call(self._set_paused(False))

    def sleep(self) -> None:
        """Lend the memory of all engines, which draw nothing now, until the next update wakes them.

        Raises:
            EngineDied: no engine serves, and none will.
            RuntimeError: one can't sleep.
        """

        async def sleep(member: Member) -> None:
            try:
                await asyncio.to_thread(cast("Any", member.engine).sleep)
            except ConnectionError as error:
                member.die(f"it was to sleep: {error}")

        async def sleep_all() -> None:
            await asyncio.gather(*map(sleep, (await self._serving()).values()))

        self._loop.run(sleep_all())

    def end_session(self, session: Hashable) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.end_session`."""

        async def end() -> None:
            index = self._router.end(session)
            if index is not None and self._members[index].known.state is not EngineState.DEAD:
                self._members[index].engine.end_session(session)

        with suppress(RuntimeError):  # It is closed, and keeps nothing.
            self._loop.submit(end())

    def close(self) -> None:
        """Abort what is in flight, and close the engines. May be called twice."""
        self._loop.close()
        with ThreadPoolExecutor(len(self._members), thread_name_prefix="close-engine") as pool:
            list(pool.map(lambda member: close_engine(member.engine), self._members))

    # In the fleet's event loop ------------------------------------------------------------------

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
            if not any(member.may_return for member in self._members):
                raise EngineDied(
                    "EngineFleet: no engine serves any more: "
                    + "; ".join(f"{each.name}: {each.reason}" for each in self._members)
                )
            await self._changed.wait()

    async def _measure_load(self) -> EngineLoad:
        serving = (await self._serving()).values()
        asked = (cast("Any", member.engine).measure_load() for member in serving)
        loads: list[EngineLoad] = await asyncio.gather(*asked)
        for member, load in zip(serving, loads, strict=True):
            # One that was replaced counts from 0 again.
            member.num_preemptions += int(max(0, load.num_preemptions - member.preemptions_told))
            member.preemptions_told = load.num_preemptions
        total = sum(member.num_preemptions for member in self._members)
        return EngineLoad(max(load.cache_use for load in loads), total)

    async def _update(
        self, state_dict: Mapping[str, Tensor], version: int | None, recompute: bool
    ) -> None:
        async with self._updating:
            number = next_version(version, self._version, who="EngineFleet.update_weights")
            keep: Callable[[], Mapping[str, Tensor]] = partial(copied, state_dict, device="cpu")
            if isinstance(state_dict, AdapterWeights):
                keep = partial(mapped, state_dict, lambda x: x.detach().to("cpu", copy=True))
            copying = asyncio.create_task(asyncio.to_thread(keep))
            serving: Collection[Member] = ()
            try:
                while not any(member.known.served == number for member in serving):
                    serving = (await self._serving()).values()
                    pushes = (one.push(state_dict, number, recompute=recompute) for one in serving)
                    for refusal in await asyncio.gather(*pushes):
                        if refusal is not None and all(m.known.served != number for m in serving):
                            raise UpdateRefused(str(refusal)) from refusal
            finally:
                weights = await copying
            self.weights, self._version = weights, number
            for member in self._members:
                member.become(member.known.wants(number))

    async def _set_paused(self, paused: bool) -> None:
        self.is_paused = paused
        members = [member for member in self._members if member.known.state in SERVING]
        await asyncio.gather(*(member.set_paused(paused) for member in members))


def as_opener(engine: object) -> Opener | None:
    """Return what opens an engine again when it has died; ``None``: nothing does.

    Args:
        engine: what a fleet was given.
    """
    if isinstance(engine, str):
        return lambda: open_async(engine)
    if callable(engine) and not isinstance(engine, AsyncEngine):
        return cast("Opener", engine)
    return None

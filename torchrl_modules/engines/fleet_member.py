"""One engine of a fleet: what it has to do, and what becomes of it when it dies."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

from torch import Tensor

from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.weights.expected_weights import UpdateRefused

from .engine import AsyncEngine, EngineDied, Generation, push_weights
from .open_async import open_async
from .supervision import EngineState, Supervision

Opener = Callable[[], AsyncEngine]
_log = logging.getLogger(__name__)
SERVING: Final = (EngineState.HEALTHY, EngineState.SUSPECT)
_PROBE_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 0.5
_LONGEST_RETRY_S: Final = 30.0


class FleetState(Protocol):
    """Facts of a fleet that its members go by, and where they tell what they have drawn."""

    max_restarts: int
    probe_interval_s: float
    suspect_timeout_s: float
    weights: Mapping[str, Tensor] | None
    is_paused: bool

    def note_drawn(self, response: Generation) -> None:
        """Take note of a response, which is about to be handed out."""


@dataclass(eq=False)
class FleetMember:
    """An engine of a fleet, taken from state to state; all is called in the fleet's event loop."""

    fleet: FleetState
    on_change: Callable[[], None]
    """Called with each state that it comes to."""
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
        self.on_change()

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

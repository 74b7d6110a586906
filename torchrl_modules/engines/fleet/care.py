"""Looks after one engine of a fleet: is it well, and how does it come back?"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, Protocol

from torch import Tensor

from torchrl_modules.engines.async_protocol import AsyncEngine
from torchrl_modules.engines.engine_state import EngineState
from torchrl_modules.engines.protocol import EngineDied
from torchrl_modules.weights.state import UpdateRefused

from .member import Member

_PROBE_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 0.5
_LONGEST_RETRY_S: Final = 30.0
_log = logging.getLogger(__name__)


class Wanted(Protocol):
    """What an engine that comes back is given."""

    weights: Mapping[str, Tensor] | None
    is_paused: bool


class Caretaker:
    """Takes an engine from state to state, for as long as the fleet lives.

    Args:
        member: the engine.
        wanted: what one that comes back is given.
        max_restarts: engines in a row that may die without a response before it is given up.
        probe_interval_s: between two looks at an engine that is well.
        suspect_timeout_s: one that does not answer for so long is dead.
    """

    def __init__(
        self,
        member: Member,
        wanted: Wanted,
        *,
        max_restarts: int,
        probe_interval_s: float,
        suspect_timeout_s: float,
    ) -> None:
        self._member = member
        self._wanted = wanted
        self._max_restarts = max_restarts
        self._probe_interval_s = probe_interval_s
        self._suspect_timeout_s = suspect_timeout_s
        self._answered_s = time.monotonic()
        self._gate = threading.Lock()
        self._is_closed = False

    @property
    def may_return(self) -> bool:
        """Whether it serves, or will one day."""
        member = self._member
        if member.known.state is not EngineState.DEAD:
            return True
        return member.opener is not None and member.num_failures <= self._max_restarts

    async def run(self) -> None:
        """Look after it until it is given up."""
        steps = {
            EngineState.HEALTHY: self._watch,
            EngineState.SUSPECT: self._examine,
            EngineState.DEAD: self._restart,
            EngineState.STALE: self._refresh,
        }
        while self.may_return:
            self._member.check_now.clear()
            await steps[self._member.known.state]()
        _log.error("%s is given up: %s", self._member.name, self._member.reason)

    async def _watch(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._probe_interval_s):
                await self._member.check_now.wait()
                return
        await self._probe()

    async def _examine(self) -> None:
        if not await self._probe():
            await asyncio.sleep(_RETRY_S)

    async def _probe(self) -> bool:
        """Whether it says that it is well."""
        member = self._member
        incarnation = member.known.incarnation
        check = getattr(member.engine, "check_health", None)
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                await (asyncio.sleep(0) if check is None else check())
        except EngineDied as error:
            if incarnation == member.known.incarnation:
                member.die(str(error))
            return False
        except Exception as error:
            silent_s = time.monotonic() - self._answered_s
            reason = f"no answer for {silent_s:.0f} s ({type(error).__name__}: {error})"
            member.become(member.known.suspected(incarnation), reason)
            if silent_s >= self._suspect_timeout_s:
                member.die(reason)
            return False
        self._answered_s = time.monotonic()
        member.become(member.known.cleared(incarnation))
        return True

    async def _restart(self) -> None:
        member = self._member
        assert member.opener is not None
        member.become(member.known.restarting(), member.reason)
        if member.num_failures > 1:
            await asyncio.sleep(min(_RETRY_S * 2**member.num_failures, _LONGEST_RETRY_S))
        try:
            member.engine = await self._reopened(member.engine, member.opener)
        except Exception as error:
            member.die(f"it did not come back: {type(error).__name__}: {error}")
            return
        member.num_restarts += 1
        member.is_paused = False
        member.refused = None
        self._answered_s = time.monotonic()
        member.become(member.known.started())

    async def _reopened(self, old: AsyncEngine, opener: Callable[[], AsyncEngine]) -> AsyncEngine:
        """Another engine, opened in a thread, once the old one has let go of what it held."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[AsyncEngine] = loop.create_future()

        def reopen() -> None:
            close_engine(old)
            outcome = _outcome(opener)
            with self._gate:
                if not self._is_closed:
                    loop.call_soon_threadsafe(_deliver, opened, outcome)
                    return
            _discard(outcome)

        threading.Thread(target=reopen, name="open-engine", daemon=True).start()
        try:
            return await opened
        except asyncio.CancelledError:
            if not opened.cancelled():
                _discard(opened.exception() or opened.result())
            raise

    async def _refresh(self) -> None:
        """Give it the weights that are wanted, if there are any that it takes."""
        member = self._member
        wanted, incarnation = member.known.wanted, member.known.incarnation
        if member.engine.version != wanted:
            if self._wanted.weights is None or member.refused == wanted:
                await self._wait_for_another(wanted)
                return
            if not await self._push(self._wanted.weights, wanted):
                return
        while member.is_paused != self._wanted.is_paused:
            await member.set_paused(self._wanted.is_paused)
            if member.known.state is EngineState.DEAD:
                return
        member.become(member.known.acknowledged(incarnation, member.engine.version))

    async def _push(self, weights: Mapping[str, Tensor], version: int) -> bool:
        """Whether it takes the weights; it is not acknowledged yet."""
        member = self._member
        incarnation = member.known.incarnation
        try:
            await member.engine.update_weights(weights, version=version)
        except UpdateRefused as error:
            member.refused, member.reason = version, str(error)
            _log.warning("%s refuses version %d, and serves nothing", member.name, version)
            return False
        except Exception as error:
            if incarnation == member.known.incarnation:
                member.die(f"it failed in an update: {error}")
            return False
        return True

    async def _wait_for_another(self, version: int) -> None:
        """Until other weights are wanted than those that it does not take, or it is looked at."""
        member = self._member
        while member.known.state is EngineState.STALE and member.known.wanted == version:
            await member.check_now.wait()
            member.check_now.clear()

    def stop(self) -> None:
        """What is still being opened is closed as it comes."""
        with self._gate:
            self._is_closed = True


def close_engine(engine: AsyncEngine) -> None:
    """Close an engine that may be broken; what it says to that is logged."""
    try:
        engine.close()
    except Exception:
        _log.warning("An engine could not be closed", exc_info=True)


def _outcome(opener: Callable[[], AsyncEngine]) -> AsyncEngine | BaseException:
    try:
        return opener()
    except Exception as error:
        return error


def _deliver(opened: "asyncio.Future[AsyncEngine]", outcome: AsyncEngine | BaseException) -> None:
    if opened.done():  # nobody waits any more
        _discard(outcome)
    elif isinstance(outcome, BaseException):
        opened.set_exception(outcome)
    else:
        opened.set_result(outcome)


def _discard(outcome: AsyncEngine | BaseException) -> None:
    if not isinstance(outcome, BaseException):
        close_engine(outcome)

"""Engines are watched: their state, their process, and how one that died comes back."""

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, cast

from torch import Tensor

from torchrl_modules.sampling import SamplingParameters
from torchrl_modules.weights import UpdateRefused

from .engine import AsyncEngine, EngineDied, Generation, TellsLoad, push_weights

# Whether an engine may serve: a state machine without any engine in it.


class EngineState(Enum):
    """What is known of an engine."""

    DEAD = "dead"
    """There is none, or it is gone or stuck."""
    RESTARTING = "restarting"
    """Another one is being started, or looked for."""
    STALE = "stale"
    """It runs, but has not acknowledged the weights that are wanted."""
    SUSPECT = "suspect"
    """It has acknowledged them, but did not answer as it should; nothing new is asked of it."""
    HEALTHY = "healthy"
    """It runs, and has acknowledged them."""


_RUNNING = (EngineState.STALE, EngineState.SUSPECT, EngineState.HEALTHY)


@dataclass(frozen=True)
class Supervision:
    """What is known of the present engine and the weights that are wanted; never changed in place.

    An engine that comes back is stale, whatever it says it has: only an acknowledgement by the
    present incarnation makes it healthy. News of earlier incarnations change nothing.
    """

    state: EngineState = EngineState.DEAD
    incarnation: int = 0
    """How many engines have been started."""
    served: int | None = None
    """The version that the present one acknowledged."""
    wanted: int = 0
    """The version that may be served; an older one may not."""

    @property
    def may_serve(self) -> bool:
        """Tokens drawn now are of the weights that are wanted."""
        return self.state is EngineState.HEALTHY

    def restarting(self) -> "Supervision":
        """Another engine is being started.

        Raises:
            RuntimeError: the earlier one is not known to be dead.
        """
        self._check_next(EngineState.DEAD)
        return replace(self, state=EngineState.RESTARTING)

    def started(self) -> "Supervision":
        """A new engine runs.

        Raises:
            RuntimeError: the earlier one is not known to be dead.
        """
        self._check_next(EngineState.DEAD, EngineState.RESTARTING)
        return replace(self, state=EngineState.STALE, incarnation=self.incarnation + 1, served=None)

    def _check_next(self, *states: EngineState) -> None:
        if self.state not in states:
            raise RuntimeError(
                f"Supervision: engine {self.incarnation} is {self.state.value}; another one is "
                "started only after it died."
            )

    def acknowledged(self, incarnation: int, version: int) -> "Supervision":
        """An engine says which version it serves; a newer one is wanted from now on."""
        if incarnation != self.incarnation or self.state not in _RUNNING:
            return self
        fresh = version >= self.wanted
        return replace(
            self,
            state=EngineState.HEALTHY if fresh else EngineState.STALE,
            served=version,
            wanted=max(version, self.wanted),
        )

    def wants(self, version: int) -> "Supervision":
        """A newer version is wanted from now on; who serves another one is stale."""
        wanted = max(version, self.wanted)
        is_stale = self.state in _RUNNING and self.served != wanted
        return replace(self, state=EngineState.STALE if is_stale else self.state, wanted=wanted)

    def suspected(self, incarnation: int) -> "Supervision":
        """An engine that serves did not answer as it should."""
        if incarnation != self.incarnation or self.state is not EngineState.HEALTHY:
            return self
        return replace(self, state=EngineState.SUSPECT)

    def cleared(self, incarnation: int) -> "Supervision":
        """An engine that was suspected answers."""
        if incarnation != self.incarnation or self.state is not EngineState.SUSPECT:
            return self
        return replace(self, state=EngineState.HEALTHY)

    def died(self, incarnation: int) -> "Supervision":
        """An engine is gone or stuck, or another one did not start."""
        if incarnation != self.incarnation:
            return self
        return replace(self, state=EngineState.DEAD, served=None)


# Notices an engine in another process that is gone, or makes no progress.
#
# Progress is what counts, not an open connection: a stopped process keeps its connections open.


class StallClock:
    """How long a figure has been the same."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._progress: object = None

    def idle_s(self, progress: object, now_s: float) -> float:
        """For how long a figure shows no progress; ``None`` says that nobody answered."""
        if progress is not None and progress != self._progress:
            self._progress, self._since_s = progress, now_s
        return now_s - self._since_s


class ProgressWatch:
    """Watches an engine from a thread of its own, while somebody waits for it.

    Args:
        probe: gives a figure that grows with the tokens; ``None`` while it can't be had in time,
            which counts as no progress. Raises ``ConnectionError`` if the engine is gone.
        fail: called with the reason, and again while there is somebody who waits, to let them go.
        stall_timeout_s: an engine without progress for so long is stuck.
        interval_s: between two probes.
    """

    def __init__(
        self,
        probe: Callable[[], object],
        fail: Callable[[str], None],
        *,
        stall_timeout_s: float,
        interval_s: float = 0.5,
    ) -> None:
        self._probe = probe
        self._fail = fail
        self._stall_timeout_s = stall_timeout_s
        self._interval_s = min(interval_s, stall_timeout_s / 4)
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Somebody waits for tokens meanwhile."""
        with self._lock:
            self._num_waiting += 1
            if self._num_waiting == 1:
                self._wake = threading.Event()
                threading.Thread(
                    target=self._watch, args=(self._wake,), name="engine-watch", daemon=True
                ).start()
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._wake.set()

    def _watch(self, ended: threading.Event) -> None:
        clock = StallClock(time.monotonic())
        while not ended.wait(self._interval_s):
            try:
                idle_s = clock.idle_s(self._probe(), time.monotonic())
            except ConnectionError as error:
                reason = str(error)
            else:
                if idle_s < self._stall_timeout_s:
                    continue
                reason = f"it has made no progress for {idle_s:.1f} s, though it has requests"
            break
        else:
            return
        self._fail(reason)
        while not ended.wait(self._interval_s):  # Those who came to wait only now, too.
            self._fail(reason)


# Whether a process can do anything at all, without asking it; how one ends with its parent.

_STOPPED = "TtZX"  # by a signal, by a debugger, ended and not yet reaped, gone


def this_process() -> dict[str, Any]:
    """Names this process, for :func:`is_stopped` in another one; as JSON can carry it."""
    return {"pid": os.getpid(), "machine": _machine()}


def is_near(process: Mapping[str, Any]) -> bool:
    """Whether a process is known to see the process ids of this one."""
    return process["machine"] is not None and process["machine"] == _machine()


def is_stopped(process: Mapping[str, Any]) -> bool:
    """Whether a process, or the ``parent`` that it names, makes no step: it is stopped or gone.

    ``False`` also where it can't be known: on another machine or in another container, and on
    systems other than Linux.
    """
    if not is_near(process):
        return False
    return any(_state(process[name]) in _STOPPED for name in ("pid", "parent") if name in process)


def _state(pid: int) -> str:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X"
    # "pid (name) state ...", where the name may hold anything.
    return status.rpartition(") ")[2][:1]


def _machine() -> str | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


# One engine of a fleet: what it has to do, and what becomes of that when it dies.

_log = logging.getLogger(__name__)


class EngineHealth(NamedTuple):
    """What a fleet knows of one of its engines."""

    name: str
    """Its URL, or its number."""
    state: EngineState
    """It is asked for tokens only while this is ``HEALTHY``."""
    version: int | None
    """Of the weights that it has acknowledged; ``None``: of none."""
    num_requests: int
    """That are being drawn."""
    outstanding_tokens: int
    """Most tokens that it has still to read and to draw."""
    num_restarts: int
    """How often it was replaced, or connected to again."""
    reason: str
    """Why it does not serve, if it does not."""


class Member:
    """An engine of a fleet; all of it is called in the fleet's event loop.

    Args:
        name: for messages.
        engine: open already.
        opener: opens another one when it died; ``None``: nobody can.
        on_change: called when its state has changed.
    """

    def __init__(
        self,
        name: str,
        engine: AsyncEngine,
        opener: Callable[[], AsyncEngine] | None,
        on_change: Callable[[], None],
    ) -> None:
        self.name = name
        self.engine = engine
        self.opener = opener
        self.known = Supervision().started()
        self.is_paused = False
        self.num_failures = 0
        """Engines in a row that died without a response."""
        self.num_restarts = 0
        self.outstanding = 0
        self.num_preemptions = 0
        """Since it was first asked, whichever engine it was."""
        self._preemptions_told: float = math.inf
        self.reason = ""
        self.refused: int | None = None
        """The version that it does not take."""
        self.check_now = asyncio.Event()
        """Set when it is to be looked at."""
        self._on_change = on_change
        self._requests: set[asyncio.Task[Generation]] = set()

    @property
    def health(self) -> EngineHealth:
        """For people."""
        return EngineHealth(
            self.name,
            self.known.state,
            self.known.served,
            len(self._requests),
            self.outstanding,
            self.num_restarts,
            self.reason,
        )

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
        self._on_change()

    def die(self, reason: str) -> None:
        """The engine is gone or stuck: what it had in flight is lost."""
        if self.known.state is EngineState.DEAD:
            return
        self.num_failures += 1
        self.become(self.known.died(self.known.incarnation), reason)
        for request in self._requests:
            request.cancel()

    def suspect(self, reason: str) -> None:
        """It did not answer as it should; one that can't be asked how it is has died."""
        if hasattr(self.engine, "check_health"):
            self.become(self.known.suspected(self.known.incarnation), reason)
        else:
            self.die(reason)

    async def respond(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        budget: int,
        session: Hashable,
    ) -> Generation:
        """Draw one response.

        Raises:
            EngineDied: the engine died before it was whole.
        """
        call = self.engine.respond(prompt, params, max_new_tokens=budget, session=session)
        request = asyncio.ensure_future(call)
        request.add_done_callback(_retrieve)
        self._requests.add(request)
        num_tokens = len(prompt) + budget
        self.outstanding += num_tokens
        try:
            await asyncio.wait({request})
        finally:
            request.cancel()  # The caller was cancelled, if it is not done.
            self.outstanding -= num_tokens
            self._requests.discard(request)
        if request.cancelled():
            raise EngineDied(f"EngineFleet: {self.name} died: {self.reason}")
        error = request.exception()
        if error is None:
            self.num_failures = 0
            return request.result()
        self._blame(error)
        raise EngineDied(f"EngineFleet: {self.name}: {error}") from error

    def _blame(self, error: BaseException) -> None:
        """What a request raised is the engine's fault, or else goes on to the caller."""
        if isinstance(error, EngineDied):
            self.suspect(str(error))
        elif isinstance(error, RuntimeError | ConnectionError):
            self.die(f"{type(error).__name__}: {error}")
        else:
            raise error

    async def measure_cache_use(self) -> float:
        """How full its cache is; raises as `measure_load` of an engine."""
        load = await cast("TellsLoad", self.engine).measure_load()
        # One that was replaced counts from 0 again.
        self.num_preemptions += int(max(0, load.num_preemptions - self._preemptions_told))
        self._preemptions_told = load.num_preemptions
        return load.cache_use

    async def push(
        self, weights: Mapping[str, Tensor], version: int, *, recompute: bool
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
            self.become(self.known.acknowledged(incarnation, version))
        return None

    async def set_paused(self, paused: bool) -> None:
        """Draw no more tokens, or go on; one that can't has died."""
        if await self.ask(self.engine.pause if paused else self.engine.resume):
            self.is_paused = paused

    async def ask(self, function: Callable[[], Awaitable[Any]]) -> bool:
        """Whether the engine does something; one that does not has died."""
        try:
            await function()
        except Exception as error:
            self.die(f"{type(error).__name__}: {error}")
            return False
        return True


def _retrieve(request: "asyncio.Task[Generation]") -> None:
    """Nobody may be left who asks what it raised."""
    if not request.cancelled():
        request.exception()


# Looks after one engine of a fleet: is it well, and how does it come back?

_PROBE_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 0.5
_LONGEST_RETRY_S: Final = 30.0


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

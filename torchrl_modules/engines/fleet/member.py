"""One engine of a fleet: what it has to do, and what becomes of that when it dies."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from torchrl_modules.engines.async_protocol import AsyncEngine, push_weights
from torchrl_modules.engines.engine_state import EngineState, Supervision
from torchrl_modules.engines.load import TellsLoad
from torchrl_modules.engines.protocol import EngineDied, Generation
from torchrl_modules.sampling.params import SamplingParameters
from torchrl_modules.weights.state import UpdateRefused

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

"""Asynchronous engines over the client of a server."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from torchrl_modules.sampling.parameters import SamplingParameters

from .engine import ClosedOnLeaving, EngineDied, EngineLoad, Generation
from .responding_engine import RespondingEngine
from .whole_batch_engine import Row


class ServerClient(Protocol):
    """The client of a server, as `VLLMServerEngine` and `SGLangServerEngine` are."""

    @property
    def version(self) -> int:
        """Version of the weights that serve."""
        ...

    def draw_one(self, row: Row, params: SamplingParameters) -> Future[Generation]:
        """Begin to draw one row; the server stops when the future is cancelled."""
        ...

    def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
    ) -> None:
        """Replace the weights, all or none; responses in flight wait."""
        ...

    def pause(self, *, paused: bool = True) -> None:
        """Draw no more tokens, or go on."""
        ...

    def check_health(self) -> None:
        """Ask the server whether it is well."""
        ...

    @property
    def tells_load(self) -> bool:
        """True where it reports its load."""
        ...

    def measure_load(self) -> EngineLoad:
        """How full it is."""
        ...

    def close(self) -> None:
        """End the connections; the server goes on."""
        ...


class AsyncServerEngine(RespondingEngine, ClosedOnLeaving):
    """An :class:`~torchrl_modules.engines.engine.AsyncEngine` over the client of a server.

    More callers than the client has connections (its ``num_connections``) stand in line.

    Args:
        engine: the client; it is not closed with this.
    """

    def __init__(self, engine: ServerClient) -> None:
        self._inside: ServerClient = engine
        self._control = ThreadPoolExecutor(1, thread_name_prefix="engine-control")
        self._prober = ThreadPoolExecutor(1, thread_name_prefix="engine-prober")
        self._running: set[Future[Generation]] = set()
        self._is_closed = False

    async def draw(self, row: Row, params: SamplingParameters) -> Generation:
        """See `RespondingEngine.draw`."""
        self._check_open()
        version, call = self.version, self._inside.draw_one(row, params)
        self._running.add(call)
        try:
            generation = await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise EngineDied("AsyncServerEngine was closed.") from None
            raise
        finally:
            self._running.discard(call)
        # A server that has no labels has one version.
        return generation.drawn_by(version)

    @property
    def can_keep_caches(self) -> bool:
        """True where `update_weights` takes ``recompute=False``."""
        return bool(getattr(self._inside, "can_keep_caches", True))

    async def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
    ) -> None:
        """See :meth:`~torchrl_modules.VLLMServerEngine.update_weights`."""
        update = partial(
            self._inside.update_weights, state_dict, version=version, recompute=recompute
        )
        await self._submit(self._control, update)

    async def pause(self) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.pause`."""
        await self._submit(self._control, self._inside.pause)

    async def resume(self) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.resume`."""
        await self._submit(self._control, lambda: self._inside.pause(paused=False))

    async def check_health(self) -> None:
        """Ask the server whether it is well.

        Raises:
            EngineDied: it is not, or it is gone.
            ConnectionError: it did not answer in time.
        """
        await self._submit(self._prober, self._inside.check_health)

    @property
    def tells_load(self) -> bool:
        """Whether the server reports its load, which it is asked for."""
        return self._inside.tells_load

    async def measure_load(self) -> EngineLoad:
        """See :meth:`~torchrl_modules.VLLMServerEngine.measure_load`."""
        return await self._submit(self._prober, self._inside.measure_load)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("AsyncServerEngine is closed.")

    def _submit(self, pool: ThreadPoolExecutor, function: Callable[[], Any]) -> asyncio.Future[Any]:
        self._check_open()
        return asyncio.wrap_future(pool.submit(function))

    def close(self) -> None:
        """Abort what is in flight and end the threads; the server goes on. May be called twice."""
        self._is_closed = True
        for call in list(self._running):
            call.cancel()
        for pool in (self._control, self._prober):
            pool.shutdown(cancel_futures=True)


class OwnedServer(AsyncServerEngine):
    """An :class:`~torchrl_modules.AsyncEngine` that has its server to itself.

    Args:
        start: the URL of a server that runs; or gives a context manager that starts one, gives its
            URL, and ends it on leaving.
        client: makes the client of a URL.
        client_settings: of the client.

    Raises:
        ConnectionError: nobody answers at the URL.
        RuntimeError: the server can't be started, or takes no token ids.
    """

    def __init__(
        self,
        start: str | Callable[[], AbstractContextManager[str]],
        client: Callable[..., ServerClient],
        **client_settings: Any,
    ) -> None:
        self.name: str = start if isinstance(start, str) else getattr(start, "name", "")
        """Its URL, where that stays the same, or what starts it calls it."""
        with ExitStack() as stack:
            url = stack.enter_context(nullcontext(start) if isinstance(start, str) else start())
            self._client = client(url, **client_settings)
            super().__init__(self._client)
            self._process = stack.pop_all()

    def close(self) -> None:
        """Abort what is in flight, and end the server if it was started here."""
        self._process.close()  # first, so that nobody waits for it any more
        super().close()
        self._client.close()

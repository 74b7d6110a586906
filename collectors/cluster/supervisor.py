"""The trainer's end of a collection on a cluster: starts its actors, and notices when one dies."""

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from torchrl_modules.engines.engine_state import EngineState, Supervision
from torchrl_modules.engines.protocol import EngineDied
from torchrl_modules.weights.state import UpdateRefused

from .door import CollectorDied, is_death, load_ray
from .ledger_service import WHO
from .worker import CollectorWorker, WorkerSettings

T = TypeVar("T")
_MAX_RESTARTS: Final = 3
"""Collectors in a row that may die in one place without finishing a group."""
_STATE_S: Final = 10.0
"""Until a collector has to have said what it remembers."""
_log = logging.getLogger(__name__)


class Weights(NamedTuple):
    """What collectors draw with."""

    reference: Any
    """To a state dict in Ray's memory."""
    version: int
    step: int
    """Of the training that is in them."""


class Supervisor:
    """Keeps collectors running, each with the newest weights, in a thread with an event loop.

    Args:
        ledger: the handle of the ledger's actor.
        settings: what collectors are made of.
        num_collectors: how many.
        remote_config: options of their actors.
    """

    def __init__(
        self,
        ledger: Any,
        settings: WorkerSettings,
        *,
        num_collectors: int,
        remote_config: Mapping[str, Any],
    ) -> None:
        ray = load_ray()
        self._ledger = ledger
        self._settings = ray.put(settings)
        self._actor = ray.remote(CollectorWorker).options(
            **{"num_cpus": 1, **remote_config, "max_concurrency": 1000}
        )
        self.known = [Supervision() for _ in range(num_collectors)]
        """What is known of each collector."""
        self.workers: list[Any] = [None] * num_collectors
        self.weights: Weights | None = None
        self.error: BaseException | None = None
        """Why the collection has failed."""
        self._num_failures = [0] * num_collectors
        self._restored: Any = None
        self._is_to_restore = [False] * num_collectors
        self._changed = asyncio.Event()
        self._updating = asyncio.Lock()
        self._is_stopping = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="ray-collectors", daemon=True)
        self._thread.start()

    # For the trainer's thread -------------------------------------------------------------------

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run something in the event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def check(self) -> None:
        """Check that the collection goes on.

        Raises:
            RuntimeError: it has failed; the cause is attached.
        """
        if self.error is None:
            return
        if isinstance(self.error, CollectorDied):
            raise CollectorDied(str(self.error)) from self.error
        cause = getattr(self.error, "cause", None) or self.error  # Ray tells where it came from.
        raise RuntimeError(
            f"{WHO}: the collection has failed: {type(cause).__name__}: {cause}"
        ) from self.error

    def stop(self, timeout_s: float) -> Any:
        """End the actors; gives the ledger, ``None`` where it is gone.

        Args:
            timeout_s: for collectors to give back what they hold.
        """
        if self._loop.is_closed():
            return None
        self._is_stopping = True
        ledger = self.submit(self._stop(timeout_s)).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        return ledger

    # In the event loop --------------------------------------------------------------------------

    def _serve(self) -> None:
        tasks = [self._loop.create_task(self._watch_ledger())]
        tasks += [self._loop.create_task(self._tend(i)) for i in range(len(self.workers))]
        self._loop.run_forever()
        left = [*tasks, *asyncio.all_tasks(self._loop)]
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.wait(left))
        self._loop.close()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _fail(self, error: BaseException) -> None:
        """The collection is over, because of an error; its actors are ended."""
        if self.error is None and not self._is_stopping:
            self.error = error
            for worker in self.workers:
                if worker is not None:
                    load_ray().kill(worker)
        self._notify()

    async def _watch_ledger(self) -> None:
        try:
            await self._ledger.until_over.remote()
        except Exception as error:
            died = CollectorDied(
                f"{WHO}: the actor of the ledger is gone, and with it which group is where: {error}"
            )
            died.__cause__ = error
            self._fail(died)

    async def _tend(self, index: int) -> None:
        """Keep a collector running."""
        while self.error is None and not self._is_stopping:
            self.known[index] = self.known[index].restarting()
            self.workers[index] = worker = self._actor.remote(self._settings)
            self.known[index] = self.known[index].started()
            try:
                await self._run(index, worker)
            except Exception as error:
                if self._is_stopping or self.error is not None:
                    return
                if not (is_death(error) or isinstance(error, EngineDied)):
                    self._fail(error)
                    return
                load_ray().kill(worker)
                await self._lose(index, error)
            else:
                return

    async def _run(self, index: int, worker: Any) -> None:
        incarnation = self.known[index].incarnation
        version = await worker.open.remote()
        async with self._updating:  # It serves once it has what the others have.
            await self._restore(index)
            if self.weights is not None:
                version = await worker.update_weights.remote(*self.weights)
            await self._ledger.join.remote(index, incarnation)
            self.known[index] = self.known[index].acknowledged(incarnation, version)
        self._notify()
        await worker.run.remote(self._ledger, index, incarnation)

    async def _restore(self, index: int) -> None:
        if self._is_to_restore[index]:
            count = len(self.workers)
            await self.workers[index].load_state.remote(self._restored, index, count)
            self._is_to_restore[index] = False

    async def states(self) -> list[Any]:
        """What each collector remembers; ``None`` of one that does not serve."""
        return await asyncio.gather(*map(self._state_of, range(len(self.workers))))

    async def _state_of(self, index: int) -> Any:
        if not self.known[index].may_serve:
            return None
        return await self._ask(index, "state")

    async def loads(self) -> list[dict[str, float]]:
        """What collectors that serve say of the load that they follow."""
        serving = [index for index, known in enumerate(self.known) if known.may_serve]
        told = await asyncio.gather(*(self._ask(index, "load") for index in serving))
        return [load for load in told if load]

    async def _ask(self, index: int, what: str) -> Any:
        """What a collector tells; ``None`` of one that is gone or late: `_tend` sees to it."""
        try:
            answer = getattr(self.workers[index], what).remote()
            return await asyncio.wait_for(_answer(answer), _STATE_S)
        except Exception as error:
            if not isinstance(error, TimeoutError) and not is_death(error):
                raise
            _log.warning("%s: collector %d did not tell its %s: %s", WHO, index, what, error)
            return None

    async def restore(self, states: Sequence[Any]) -> None:
        """Let each collector go on where it was, before anything is collected.

        Args:
            states: what :meth:`states` gave.

        Raises:
            ValueError: they don't fit.
        """
        await self.ready()  # One of them says whether they fit; who is late gets them as it joins.
        async with self._updating:
            self._restored = load_ray().put(list(states))
            self._is_to_restore = [True] * len(self.workers)
            for index, known in enumerate(self.known):
                if known.may_serve:
                    try:
                        await self._restore(index)
                    except ValueError as error:
                        raise ValueError(str(getattr(error, "cause", error))) from error

    async def _lose(self, index: int, error: BaseException) -> None:
        """A collector is gone; another one takes its place, unless too many were lost."""
        _log.warning("%s: collector %d is gone, and replaced: %s", WHO, index, error)
        incarnation = self.known[index].incarnation
        self.known[index] = self.known[index].died(incarnation)
        with suppress(Exception):  # `_watch_ledger` sees to it.
            if await self._ledger.lose.remote(index, incarnation):
                self._num_failures[index] = 0
        self._num_failures[index] += 1
        self._notify()
        if self._num_failures[index] > _MAX_RESTARTS:
            died = CollectorDied(
                f"{WHO}: {_MAX_RESTARTS + 1} collectors in a row died in place {index} without a "
                f"finished group. The last one: {error}"
            )
            died.__cause__ = error
            self._fail(died)

    async def push(self, weights: Weights) -> None:
        """Give weights to all collectors; those that come back later get them, too.

        Raises:
            UpdateRefused: a collector's engine refuses them; who has taken them is started again.
        """
        async with self._updating:
            present = [
                index
                for index, known in enumerate(self.known)
                if known.state is EngineState.HEALTHY
            ]
            calls = (self._push_one(index, weights) for index in present)
            outcomes = await asyncio.gather(*calls)
            taken = [i for i, each in zip(present, outcomes, strict=True) if each is True]
            for refusal in outcomes:
                if isinstance(refusal, UpdateRefused):
                    for index in taken:  # It comes back with the weights of the others.
                        load_ray().kill(self.workers[index])
                    raise UpdateRefused(str(refusal)) from refusal
            for index in taken:
                known = self.known[index]
                self.known[index] = known.acknowledged(known.incarnation, weights.version)
            self.weights = weights
            await self._ledger.pulled.remote(weights.step)

    async def _push_one(self, index: int, weights: Weights) -> UpdateRefused | bool:
        """Whether a collector has taken weights, or why it refuses them."""
        incarnation = self.known[index].incarnation
        try:
            await self.workers[index].update_weights.remote(*weights)
        except UpdateRefused as error:
            return error
        except EngineDied:  # It has no engine any more: another collector makes new ones.
            load_ray().kill(self.workers[index])
            return False
        except Exception as error:
            if not is_death(error):  # `_tend` sees to one that has died.
                self._fail(error)
            return False
        return incarnation == self.known[index].incarnation

    async def ready(self) -> None:
        """Wait until a collector serves, or the collection has failed."""
        while self.error is None and not any(known.may_serve for known in self.known):
            await self._changed.wait()

    async def _stop(self, timeout_s: float) -> Any:
        ledger = None
        with suppress(Exception):  # It may be gone.
            ledger = await asyncio.wait_for(_answer(self._ledger.stop.remote()), timeout_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*map(_close, self.workers))
        ray = load_ray()
        for actor in (*self.workers, self._ledger):
            if actor is not None:
                ray.kill(actor)
        return ledger


async def _answer(reference: Any) -> Any:
    return await reference


async def _close(worker: Any) -> None:
    if worker is not None:
        try:
            await worker.close.remote()
        except Exception as error:
            if not is_death(error):
                _log.warning("%s: a collector could not be closed", WHO, exc_info=True)

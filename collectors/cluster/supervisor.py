"""The trainer's end of a collection on a cluster: starts its actors, and notices when one dies."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from collectors.ledger import GroupLedger
from collectors.streaming.loop_thread import CollectionThread
from torchrl_modules.engines.engine import EngineDied
from torchrl_modules.engines.supervision import Supervision
from torchrl_modules.weights.expected_weights import UpdateRefused

from .ledger_service import WHO
from .ray_door import CollectorDied, death_text, is_death, is_unreadable, load_ray
from .served_engine import ServedEngine
from .worker import CollectorWorker, PartlyRefused, WorkerSettings

T = TypeVar("T")
_MAX_RESTARTS: Final = 3
"""Collectors in a row that may die in one place without finishing a group."""
_STATE_S: Final = 10.0
"""Until a collector has to have said what it remembers."""
CLOSE_S: Final = 30.0
_KILL_S: Final = 10.0
_LOOK_S: Final = 1.0
"""Between two looks whether Ray's head is there."""
AWAY_S: Final = 30.0
"""It may be away on a cluster, where it may be started again; Ray ends this process after 60 s."""
_TELL_S: Final = 30.0
"""Between two warnings that no collector serves yet."""
GONE_S: Final = 3.0
"""The same of a Ray that this process has started, whose head never comes back."""
_log = logging.getLogger(__name__)


class Weights(NamedTuple):
    """The weights that collectors draw with."""

    references: Mapping[str, Any]
    """To a state dict of each agent in Ray's memory; of one policy to that of :data:`ALL`."""
    version: int
    step: int
    """Of the training that is in them."""

    async def give(self, worker: Any) -> int:
        """Let a collector have them; gives the version that it has then.

        Args:
            worker: the handle of its actor.
        """
        # Ray hands over what a reference is to where the reference itself is an argument.
        agents, values = [*self.references], self.references.values()
        return await worker.update_weights.remote(agents, self.version, self.step, *values)

    def over(self, before: "Weights | None") -> "Weights":
        """These, with those of agents that they lack as they were before."""
        known = before.references if before else {}
        return self._replace(references={**known, **self.references})


class Supervisor(CollectionThread):
    """Keeps collectors running, each with the newest weights.

    Args:
        ledger: the handle of the ledger's actor.
        settings: what collectors are made of.
        num_collectors: how many.
        remote_config: options of their actors.
        away_s: how long Ray's head may be away.
    """

    def __init__(
        self,
        ledger: Any,
        settings: WorkerSettings,
        *,
        num_collectors: int,
        remote_config: Mapping[str, Any],
        away_s: float,
    ) -> None:
        super().__init__(WHO)
        ray = load_ray()
        self._ledger = ledger
        self.last_ledger: GroupLedger | None = None
        """When it has ended; ``None`` where the ledger's actor is gone."""
        self._close_s = CLOSE_S
        self._settings = ray.put(settings)
        self._asked_for = {"num_cpus": 1, **remote_config}
        self._actor = ray.remote(CollectorWorker).options(
            **{**self._asked_for, "max_concurrency": 1000}
        )
        self.known = [Supervision() for _ in range(num_collectors)]
        """What is known of each collector."""
        self.workers: list[Any] = [None] * num_collectors
        self.weights: Weights | None = None
        self.first_version = 0
        """Of the weights that collectors are made with."""
        self.served: ServedEngine | None = None
        """The facts of their engines, once a collector was made."""
        self._num_failures = [0] * num_collectors
        self._restored: Any = None
        self._is_to_restore = [False] * num_collectors
        self._changed = asyncio.Event()
        self._updating = asyncio.Lock()
        watches = self._watch_ledger(), self._watch_head(away_s)
        self.start(*watches, *map(self._tend, range(num_collectors)))

    # For the trainer's thread -------------------------------------------------------------------

    def check_open(self) -> None:
        """Check that the collection goes on.

        Raises:
            CollectorDied: the ledger, or a place of collectors, is gone.
            RuntimeError: it has failed, or was stopped; what it failed of is the cause.
        """
        if isinstance(self.error, CollectorDied):
            raise CollectorDied(str(self.error)) from self.error
        super().check_open()

    def ask(self, question: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine gives, run in the event loop."""
        return self.result_of(self.submit(question))

    def stop(self, timeout_s: float) -> None:
        """End the actors.

        Args:
            timeout_s: for the ledger to be given, and for collectors to give back what they hold.
        """
        self._close_s = timeout_s
        super().stop(2 * timeout_s + _KILL_S)

    # In the event loop --------------------------------------------------------------------------

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _fail(self, error: BaseException) -> None:
        """The collection is over, because of an error; its actors are ended."""
        if not self.is_over:
            self._kill(*self.workers)
            super()._fail(error)

    def _kill(self, *actors: Any) -> None:
        for actor in actors:
            if actor is not None:
                load_ray().kill(actor)

    async def _watch_ledger(self) -> None:
        try:
            await self._ledger.until_over.remote()
        except Exception as error:
            raise CollectorDied(
                f"{WHO}: the actor of the ledger is gone, and with it which group is where: "
                f"{death_text(error)}"
            ) from error

    async def _watch_head(self, away_s: float) -> None:
        """Fail when Ray's head is away for too long, before Ray ends this process for it."""
        address = load_ray().get_runtime_context().gcs_address
        host, _, port = address.rpartition(":")
        num_missed = 0
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                async with asyncio.timeout(_LOOK_S):
                    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                writer.close()
                num_missed = 0
            except OSError as error:
                num_missed += 1
                if num_missed == 1:
                    _log.warning("%s: Ray's head does not answer at %s: %s", WHO, address, error)
                if num_missed * _LOOK_S >= away_s:
                    raise CollectorDied(
                        f"{WHO}: Ray's head, its GCS at {address}, is gone: {error}"
                    ) from error

    async def _tend(self, index: int) -> None:
        """Keep a collector running."""
        while not self.is_over:
            self.known[index] = self.known[index].restarting()
            self.workers[index] = worker = self._actor.remote(self._settings)
            self.known[index] = self.known[index].started()
            try:
                await self._run(index, worker)
                return
            except Exception as error:
                if self.is_over:
                    return
                if not (is_death(error) or isinstance(error, EngineDied)):
                    raise
                if is_unreadable(error):  # another one could not either
                    raise CollectorDied(
                        f"{WHO}: collector {index} is gone: {death_text(error)}"
                    ) from error
                self._kill(worker)
                # Another one takes its place, unless too many were lost.
                _log.warning("%s: collector %d is gone, and replaced: %s", WHO, index, error)
                incarnation = self.known[index].incarnation
                self.known[index] = self.known[index].died(incarnation)
                with suppress(Exception):  # `_watch_ledger` sees to it.
                    if await self._ledger.lose.remote(index, incarnation):
                        self._num_failures[index] = 0
                self._num_failures[index] += 1
                self._notify()
                if self._num_failures[index] > _MAX_RESTARTS:
                    raise CollectorDied(
                        f"{WHO}: {_MAX_RESTARTS + 1} collectors in a row died in place {index} "
                        f"without a finished group. The last one: {error}"
                    ) from error

    async def _run(self, index: int, worker: Any) -> None:
        incarnation = self.known[index].incarnation
        version, self.served = await worker.open.remote()
        async with self._updating:  # It serves once it has what the others have.
            await self._restore(index)
            if self.weights is None:
                self.first_version = max(self.first_version, version)
            else:
                version = await self.weights.give(worker)
            await self._ledger.join.remote(index, incarnation, version)
            self.known[index] = self.known[index].acknowledged(incarnation, version)
        self._notify()
        await worker.run.remote(self._ledger, index, incarnation)

    async def _restore(self, index: int) -> None:
        if self._is_to_restore[index]:
            count = len(self.workers)
            await self.workers[index].load_state.remote(self._restored, index, count)
            self._is_to_restore[index] = False

    async def ask_all(self, what: str) -> list[Any]:
        """Ask each collector for its ``state`` or ``load``; ``None`` where one does not serve."""
        return await asyncio.gather(*(self._ask(i, what) for i in range(len(self.workers))))

    async def _ask(self, index: int, what: str) -> Any:
        """Return what a collector tells; ``None`` of one that does not serve or is late."""
        if not self.known[index].may_serve:
            return None
        try:
            async with asyncio.timeout(_STATE_S):
                return await getattr(self.workers[index], what).remote()
        except Exception as error:
            if not isinstance(error, TimeoutError) and not is_death(error):
                raise
            _log.warning("%s: collector %d did not tell its %s: %s", WHO, index, what, error)
            return None

    async def restore(self, states: Sequence[Any]) -> None:
        """Let each collector go on where it was, before anything is collected.

        Args:
            states: what :meth:`ask_all` gave.

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

    async def push(self, weights: Weights) -> None:
        """Give weights to all collectors; those that come back later get them, too.

        Raises:
            UpdateRefused: a collector's engine refuses them; who has taken them is started again.
        """
        async with self._updating:
            present = [index for index, known in enumerate(self.known) if known.may_serve]
            outcomes = await asyncio.gather(*(self._push_one(index, weights) for index in present))
            taken = [i for i, each in zip(present, outcomes, strict=True) if each is True]
            for refusal in outcomes:
                if isinstance(refusal, UpdateRefused):
                    # Who has taken any comes back with the weights of the others.
                    pairs = zip(present, outcomes, strict=True)
                    taken += [i for i, each in pairs if isinstance(each, PartlyRefused)]
                    self._kill(*(self.workers[index] for index in taken))
                    raise UpdateRefused(str(refusal)) from refusal
            for index in taken:
                known = self.known[index]
                self.known[index] = known.acknowledged(known.incarnation, weights.version)
            self.weights = weights.over(self.weights)
            await self._ledger.pulled.remote(weights.step)

    async def _push_one(self, index: int, weights: Weights) -> UpdateRefused | bool:
        """Return whether a collector has taken weights, or why it refuses them."""
        incarnation = self.known[index].incarnation
        try:
            await weights.give(self.workers[index])
        except UpdateRefused as error:
            return error
        except EngineDied:  # It has no engine any more: another collector makes new ones.
            self._kill(self.workers[index])
            return False
        except Exception as error:
            if not is_death(error):  # `_tend` sees to one that has died.
                self._fail(error)
            return False
        return incarnation == self.known[index].incarnation

    async def ready(self) -> None:
        """Wait until a collector serves, or the collection has failed; warns while none does."""
        begin_s = time.monotonic()
        while not any(known.may_serve for known in self.known):
            try:
                await asyncio.wait_for(self._changed.wait(), _TELL_S)
            except TimeoutError:
                ray = load_ray()
                has = await asyncio.to_thread(ray.cluster_resources)
                free = await asyncio.to_thread(ray.available_resources)
                _log.warning(
                    "%s: no collector serves after %.0f s: Ray has not started its actor, or its "
                    "policy is not made yet. A collector asks for %s; Ray has %s, of which %s are "
                    "free.",
                    WHO,
                    time.monotonic() - begin_s,
                    self._asked_for,
                    has,
                    free,
                )

    async def _end(self) -> None:
        with suppress(Exception):  # It may be gone.
            async with asyncio.timeout(self._close_s):
                self.last_ledger = await self._ledger.stop.remote()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._close_s):
                await asyncio.gather(*map(_close, self.workers))
        self._kill(*self.workers, self._ledger)


async def _close(worker: Any) -> None:
    if worker is not None:
        try:
            await worker.close.remote()
        except Exception as error:
            if not is_death(error):
                _log.warning("%s: a collector could not be closed", WHO, exc_info=True)

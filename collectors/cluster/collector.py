"""Collection on a Ray cluster: workers are started, watched and replaced."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from tensordict import TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.data import ReplayBuffer

from collectors.composition_checks import advantages_of, check_groups, check_storage, weigh_sources
from collectors.ledger import GroupLedger, StalenessPolicy, Wait
from collectors.llm_collector import PostProcessing
from collectors.streaming.collector import BackgroundCollector, SnapshotUpdater, shares_memory
from collectors.streaming.load import LoadCap, together
from collectors.streaming.producer import LoopThread
from collectors.weight_update.weights import gathered_state_dict
from objectives.advantages.mc_advantage import start_ray
from torchrl_data.checks import check_counts
from torchrl_envs.datasets.primer import DataExhaustedError
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_modules import LLMWrapperBase
from torchrl_modules.engines.engine import EngineDied
from torchrl_modules.engines.supervision import Supervision
from torchrl_modules.weights import UpdateRefused

from .ledger_service import WHO, CollectorDied, LedgerClient, LedgerService, is_death, load_ray
from .worker import CollectorWorker, WorkerSettings

# The trainer's end of a collection on a cluster: starts its actors, and notices when one dies.

T = TypeVar("T")
_MAX_RESTARTS: Final = 3
"""Collectors in a row that may die in one place without finishing a group."""
_STATE_S: Final = 10.0
"""Until a collector has to have said what it remembers."""
_CLOSE_S: Final = 30.0
_KILL_S: Final = 10.0
_LOOK_S: Final = 1.0
"""Between two looks whether Ray's head is there."""
_AWAY_S: Final = 30.0
"""It may be away on a cluster, where it may be started again; Ray ends this process after 60 s."""
_GONE_S: Final = 3.0
"""The same of a Ray that this process has started, whose head never comes back."""
_log = logging.getLogger(__name__)


class Weights(NamedTuple):
    """What collectors draw with."""

    reference: Any
    """To a state dict in Ray's memory."""
    version: int
    step: int
    """Of the training that is in them."""


class Supervisor(LoopThread):
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
        self._close_s = _CLOSE_S
        self._settings = ray.put(settings)
        self._actor = ray.remote(CollectorWorker).options(
            **{"num_cpus": 1, **remote_config, "max_concurrency": 1000}
        )
        self.known = [Supervision() for _ in range(num_collectors)]
        """What is known of each collector."""
        self.workers: list[Any] = [None] * num_collectors
        self.weights: Weights | None = None
        self.first_version = 0
        """Of the weights that collectors are made with."""
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
        """What a coroutine gives, run in the event loop."""
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
                f"{WHO}: the actor of the ledger is gone, and with it which group is where: {error}"
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
        version = await worker.open.remote()
        async with self._updating:  # It serves once it has what the others have.
            await self._restore(index)
            if self.weights is None:
                self.first_version = max(self.first_version, version)
            else:
                version = await worker.update_weights.remote(*self.weights)
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
        """Of each collector its ``state`` or ``load``; ``None`` of one that does not serve."""
        return await asyncio.gather(*(self._ask(i, what) for i in range(len(self.workers))))

    async def _ask(self, index: int, what: str) -> Any:
        """What a collector tells; ``None`` of one that does not serve or is late."""
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
                    # Who has taken them comes back with the weights of the others.
                    self._kill(*(self.workers[index] for index in taken))
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
            self._kill(self.workers[index])
            return False
        except Exception as error:
            if not is_death(error):  # `_tend` sees to one that has died.
                self._fail(error)
            return False
        return incarnation == self.known[index].incarnation

    async def ready(self) -> None:
        """Wait until a collector serves, or the collection has failed."""
        while not any(known.may_serve for known in self.known):
            await self._changed.wait()

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


# Collection on a Ray cluster, beside training: :class:`RayLLMCollector`.
#
# Shape legend: B rows.

_REQUEST_TIMEOUT_S: Final = 600.0


class RayLLMCollector(BackgroundCollector):
    """Collects with several collectors, each a Ray actor, beside training.

    It is used as :class:`~collectors.StreamingCollector` is::

        with RayLLMCollector(make_env, policy_factory=make_policy, replay_buffer=buffer,
                             num_collectors=4) as collector:
            for batch in collector:
                train(buffer)
                collector.update_policy_weights_(model)

    One actor without CPUs of its own has the ledger and draws the data; collectors ask it for
    groups, and run them as a :class:`~collectors.StreamingCollector` does. A group stays in one
    collector. Rows stay where they were made until a batch of them is taken; what goes to and fro
    before are references.

    A collector that dies is replaced; its groups run again with the same seeds, in another one. A
    collector serves only with the weights that the others have.

    Args:
        env: a :class:`~torchrl_envs.ChatEnv` with its transforms, or a function that makes one in
            each actor.
        policy: whose turns are taken; a copy goes to each collector. It gets every update itself,
            so that it can be tested.
        policy_factory: makes the policy in each collector, in the place of copies of ``policy``,
            for instance over servers of its own (:class:`~torchrl_modules.EngineFleet`).
        replay_buffer: extended with every batch.
        groups_per_step: groups of a batch; as many as the environment's batch holds when not given.
        staleness: how old tokens may be, see :class:`~collectors.StreamingCollector`.
        max_inflight_tasks: most episodes that run at once in one collector; -1: all that are
            admitted; a :class:`~collectors.LoadCap`: as many as its engine has room for.
        total_trajectories: stop after this many; ``None`` goes on while there are data.
        postproc: changes a batch before it goes into the buffer.
        num_collectors: actors that collect.
        ray_init_config: for ``ray.init``, where this process is not connected to Ray yet. Where no
            Ray runs, one is started on this machine's loopback, and ends with the collector.
        remote_config: options of the collectors' actors, as for ``ray.remote``: ``num_cpus`` (1),
            ``num_gpus``, ``resources``, ``runtime_env``, ``scheduling_strategy`` (for placement
            groups).

    Raises:
        ImportError: Ray is not installed.
        ValueError: environment, policy, buffer and settings don't fit together.
        TypeError: neither ``policy`` nor ``policy_factory`` is given.
        CollectorDied: the actor of the ledger can't be started.
    """

    def __init__(
        self,
        env: EpisodeEnv | Callable[[], EpisodeEnv],
        *,
        policy: LLMWrapperBase | None = None,
        policy_factory: Callable[[], LLMWrapperBase] | None = None,
        replay_buffer: ReplayBuffer | None = None,
        groups_per_step: int | None = None,
        staleness: StalenessPolicy | None = None,
        max_inflight_tasks: int | LoadCap = -1,
        total_trajectories: int | None = None,
        postproc: PostProcessing | None = None,
        num_collectors: int = 1,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
    ) -> None:
        if policy is None and policy_factory is None:
            raise TypeError(f"{WHO} takes one of policy and policy_factory, or both.")
        check_counts(WHO, num_collectors=num_collectors, groups_per_step=groups_per_step)
        check_counts(WHO, total_trajectories=total_trajectories)
        is_cap = isinstance(max_inflight_tasks, LoadCap)
        most = max_inflight_tasks.max_inflight_tasks if is_cap else max_inflight_tasks
        if most != -1:
            check_counts(WHO, max_inflight_tasks=most)
        ray = load_ray()
        self._owns_ray = start_ray(ray_init_config)
        self._follows_load = is_cap
        remote_config = dict(remote_config or {})
        self._updater = _RemoteUpdater(self, to_copies=policy_factory is None)
        super().__init__(
            policy,
            [],
            replay_buffer=replay_buffer,
            total_episodes=total_trajectories,
            postproc=postproc,
            weight_updater=self._updater,
        )
        if policy_factory is None and policy is not None:
            self._pushed_version = policy.policy_version
        self.staleness = Wait() if staleness is None else staleness
        self._is_lockstep = self.staleness.max_staleness == 0
        runtime = {k: v for k, v in remote_config.items() if k == "runtime_env"}
        service = ray.remote(LedgerService).options(num_cpus=0, max_concurrency=1000, **runtime)
        self._actor = service.remote(env, groups_per_step=groups_per_step, staleness=self.staleness)
        try:
            client = self._ledger_client = LedgerClient(self._actor)
            self.groups_per_step, self.group_size, num_slots, weights = client.ask("open")
            weigh_sources(replay_buffer, weights)
            check_storage(replay_buffer, self.groups_per_step * self.group_size, postproc, who=WHO)
            check_groups([self.group_size], replay_buffer, who=WHO)
        except BaseException:
            ray.kill(self._actor)
            raise
        all_tasks = num_slots * self.group_size
        settings = WorkerSettings(
            env,
            policy if policy_factory is None else policy_factory,  # type: ignore[arg-type]
            self.group_size,
            all_tasks if most == -1 else min(all_tasks, most),
            advantages_of(replay_buffer),
            None if self._is_lockstep else _REQUEST_TIMEOUT_S,
            self.staleness,
            max_inflight_tasks,
            num_slots,
        )
        self._loop = self._supervisor = Supervisor(
            self._actor,
            settings,
            num_collectors=num_collectors,
            remote_config=remote_config,
            away_s=_GONE_S if self._owns_ray else _AWAY_S,
        )
        self._source = self._ledger_client
        self._ledger_client.supervisor = self._supervisor
        self._wait_s, self._since_s = 0.0, time.monotonic()
        self._ledger: GroupLedger | None = None
        self._is_closed = False
        if is_cap or not getattr(self.staleness, "recompute", True):
            # A collector has to say whether its engine can do what is asked of it.
            try:
                self._supervisor.ask(self._supervisor.ready())
            except RuntimeError as error:
                self.async_shutdown()
                raise getattr(error.__cause__, "cause", None) or error from error

    # Collecting ---------------------------------------------------------------------------------

    def _run_batch(self) -> tuple[TensorDictBase, int]:
        self._supervisor.check_open()
        client = self._ledger_client
        if client.taken:
            self._wait_for_push()
            client.ask("unchanged", client.used(), self.policy_version)
        begin_s = time.monotonic()
        rows, num_groups = client.take_batch()
        self._wait_s += time.monotonic() - begin_s
        if not num_groups:
            raise DataExhaustedError(f"{WHO}: all data were drawn and trained.")
        return lazy_stack(rows), num_groups * self.group_size

    # Weights ------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The version that collectors have acknowledged, or are being given."""
        return max(self._pushed_version, self._supervisor.first_version)

    @property
    def _served_version(self) -> int:
        weights = self._supervisor.weights
        return self._supervisor.first_version if weights is None else weights.version

    def _push(
        self, source: nn.Module | Mapping[str, Tensor], version: int | None, *, is_restored: bool
    ) -> int:
        self._supervisor.check_open()
        self._wait_for_push()
        if self._supervisor.weights is None:  # a collector says which version it begins with
            self._supervisor.ask(self._supervisor.ready())
        present = self.policy_version
        number = present + 1 if version is None else version
        if number <= present:
            raise ValueError(
                f"{WHO}.update_policy_weights_: version {number} is not above the present one, "
                f"{present}."
            )
        snapshot = self._updater.snapshot(source)
        if self.policy is not None and not shares_memory(source, self.policy.engine):
            self.policy.update_weights(snapshot, version=number)
        weights = load_ray().put({name: value.cpu() for name, value in snapshot.items()})
        used = [] if is_restored else self._ledger_client.used()
        step = self._ledger_client.ask("push", used, number)
        push = self._supervisor.push(Weights(weights, number, step))
        self._push_under_way = self._supervisor.submit(push)
        self._pushed_version = number
        return number

    # What it was like ---------------------------------------------------------------------------

    @property
    def ledger(self) -> GroupLedger:
        """A copy of the ledger: what became of every group.

        Raises:
            CollectorDied: its actor is gone.
        """
        if self._ledger is not None:
            return self._ledger
        self._supervisor.check_open()
        return self._ledger_client.ask("report")[0]

    def metrics(self) -> dict[str, float]:
        """What collection was like since the last call, and of the ledger's all.

        Returns:
            ``collect/trainer_wait_fraction``, of the time; ``collect/queued_groups``, finished ones
            that wait; ``collect/num_collectors`` that serve; ``collect/driver_bytes_per_row`` that
            this process was sent and has sent about rows, beside the rows themselves; with a
            ``LoadCap`` ``collect/max_groups`` that may run and ``collect/preemptions``, of all
            collectors, and ``collect/cache_use`` of the fullest engine; and the ledger's, see
            :meth:`~collectors.GroupLedger.metrics`.
        """
        now_s = time.monotonic()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        waited_s, self._wait_s = self._wait_s, 0.0
        client = self._ledger_client
        _, found = client.ask("report")
        loads = self._supervisor.ask(self._supervisor.ask_all("load")) if self._follows_load else []
        return {f"ledger/{name}": value for name, value in found.items()} | {
            "collect/trainer_wait_fraction": waited_s / elapsed_s if elapsed_s else 0.0,
            "collect/queued_groups": found["in_flight/waiting"],
            "collect/num_collectors": float(sum(k.may_serve for k in self._supervisor.known)),
            "collect/driver_bytes_per_row": client.num_bytes / max(1, client.num_rows),
            **together([load for load in loads if load]),
        }

    # The end ------------------------------------------------------------------------------------

    def async_shutdown(self, timeout: float | None = None) -> None:
        """Cancel what runs, and end the actors. May be called twice.

        What was in flight is accounted for as returned; :attr:`ledger` stays to be read.

        Args:
            timeout: seconds for collectors to give back what they hold; 30 when not given.

        Raises:
            UpdateRefused: a collector refused the last push.
        """
        if self._is_closed:
            return
        self._is_closed = True
        push, self._push_under_way = self._push_under_way, None
        had_ended = push is not None and push.done()
        self._supervisor.stop(_CLOSE_S if timeout is None else timeout)
        self._ledger = self._supervisor.last_ledger
        _log.info("%s", self._ledger)
        if self._owns_ray:
            load_ray().shutdown()
        if push is None or not push.done() or push.cancelled() or self._supervisor.error:
            return  # the end came first: nobody refused it
        error = push.exception()
        if error is not None and (had_ended or not is_death(error)):  # else its actors were ended
            raise error


class _RemoteUpdater(SnapshotUpdater):
    """Copies the trainer's weights; the collector sends them."""

    def __init__(self, collector: RayLLMCollector, *, to_copies: bool) -> None:
        super().__init__()
        self._collector = collector
        self._to_copies = to_copies

    @property
    def version(self) -> int:
        """Of the collector."""
        return self._collector.policy_version

    def _gathered(self, source: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        # Copies of the policy have its adapters; other engines have none.
        return super()._gathered(source) if self._to_copies else gathered_state_dict(source)

"""Collection on a Ray cluster, beside training: :class:`RayLLMCollector`.

The loop::

    trainer                  actor of the ledger            actors of the collectors, one or many
    collect()  <- batch --   LedgerService: admission, <--  CollectorWorker: asks for a group,
                             data, order of batches   -->   runs its episodes, keeps its rows,
       |       rows by reference, from their owners         says how each episode ended
       v
    update_policy_weights_ -> object store -> every collector; the next push waits for this one
    Supervisor: starts the actors, notices when one dies; its groups are offered again

Back-pressure is the ledger's, as in :class:`~collectors.StreamingCollector`.

Shape legend: B rows.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from tensordict import TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.data import ReplayBuffer

from collectors.collector import PostProcessing
from collectors.composition_checks import check_groups, check_storage, weigh_sources
from collectors.ledger import GroupLedger, StalenessPolicy, Wait
from collectors.refill import max_draws_of, refusing_parts
from collectors.streaming.background_collector import BackgroundCollector
from collectors.streaming.load_cap import LoadCap, together
from collectors.streaming.program_end import shut_down_at_end, was_shut_down
from collectors.streaming.snapshot_updater import SnapshotUpdater, shares_memory
from objectives.advantages.ray_mc_advantage import start_ray
from torchrl_data.checks import check_counts
from torchrl_envs.datasets.primer import DataExhaustedError
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_modules import LLMWrapperBase
from torchrl_modules.weights.adapter_weights import mapped
from torchrl_modules.weights.agent_weights import AgentWeights

from .ledger_client import LedgerClient
from .ledger_service import WHO, LedgerService
from .ray_door import is_death, load_ray
from .served_engine import ServedEngine
from .supervisor import AWAY_S, CLOSE_S, GONE_S, Supervisor, Weights
from .worker import ALL, WorkerSettings

_log = logging.getLogger(__name__)

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
        parts = refusing_parts(replay_buffer)
        sizes = {"groups_per_step": groups_per_step, "max_draws": max_draws_of(parts)}
        self._actor = service.remote(env, staleness=self.staleness, **sizes)
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
            parts,
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
            away_s=GONE_S if self._owns_ray else AWAY_S,
        )
        self._source = self._ledger_client
        self._ledger_client.supervisor = self._supervisor
        self._wait_s, self._since_s = 0.0, time.monotonic()
        self._ledger: GroupLedger | None = None
        self._is_closed = False
        shut_down_at_end(self)
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
    def served(self) -> ServedEngine:
        """The facts of its engines. A collector has to have told them, which is waited for."""
        if self._supervisor.served is None:
            self._supervisor.ask(self._supervisor.ready())
        assert self._supervisor.served is not None
        return self._supervisor.served

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
        parts: Any = snapshot if isinstance(snapshot, AgentWeights) else {ALL: snapshot}
        weights = {n: load_ray().put(mapped(own, Tensor.cpu)) for n, own in parts.items()}
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
        """Return what collection was like since the last call, and of the ledger's all.

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
        was_shut_down(self)
        push, self._push_under_way = self._push_under_way, None
        had_ended = push is not None and push.done()
        self._supervisor.stop(CLOSE_S if timeout is None else timeout)
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
        """Version of the collector."""
        return self._collector.policy_version

    def _taker(self) -> Any:
        # Copies of the policy have its adapters.
        return super()._taker() if self._to_copies else self._collector.served

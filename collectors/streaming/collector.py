"""Collection beside training: no row waits for another, and every token's age is bounded.

Shape legend: B rows, T tokens of a row (ragged).
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

from tensordict import TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.data import ReplayBuffer
from torchrl.envs import Transform

from collectors.base import BackgroundCollector, PostProcessing, remembering
from collectors.composition_checks import advantages_of, check_room
from collectors.ledger import GroupLedger, StalenessPolicy, Wait
from torchrl_data.validation import check_counts
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.episode.async_runner import AsyncEpisodeRunner
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.rewards.functions import RewardFunctions
from torchrl_modules import LLMWrapperBase
from torchrl_modules.engines.async_protocol import AsyncEngine
from torchrl_modules.engines.batching_engine import BatchingEngine
from torchrl_modules.engines.open_async import open_async
from torchrl_modules.policies.async_policy import AsyncPolicy

from .checks import (
    WHO,
    check_adapters,
    check_streaming,
    is_wanted,
    most_episodes,
    most_waiting,
    recomputes,
    turn_timeout_s,
)
from .evaluation import EvaluationPoint, Evaluations
from .finished_groups import FinishedGroups
from .group_runner import GroupRunner
from .load_cap import LoadCap
from .load_follower import LoadFollower, follower_of
from .monitor import Monitor
from .producer import Producer
from .prompt_queue import PromptQueue
from .trace import Timeline
from .updater import SnapshotUpdater, check_own_memory
from .weights import WeightPushes, paused

_CLOSE_S: Final = 60.0
_MAX_UNWANTED: Final = 16
"""Groups without a signal in a row, in steps of training, before the collection gives up."""
_log = logging.getLogger(__name__)


class StreamingCollector(BackgroundCollector):
    """Collects beside training: episodes run by themselves, groups are trained as they finish.

    Iterate it, train on each batch, and push the weights; generation goes on meanwhile::

        with StreamingCollector(env, policy, replay_buffer=buffer) as collector:
            for batch in collector:
                train(buffer)
                collector.update_policy_weights_(model)

    No turn, tool or reward of an episode waits for another's; groups complete in any order, and a
    batch is ``groups_per_step`` complete groups. A :class:`~collectors.GroupLedger` admits them: by
    construction no token is older at its use than ``staleness`` allows, and with the default
    nothing is thrown away and no slow prompt starves. New weights are taken up in the middle of
    responses; every token knows the version that drew it.

    With ``staleness=OnPolicy()`` generation and training take turns, and everything is, to the bit,
    what :class:`~collectors.LLMCollector` gives.

    Args:
        env: a :class:`~torchrl_envs.ChatEnv` with its transforms, as for
            :class:`~collectors.LLMCollector`. The size of its batch does not matter, but as the
            default of ``groups_per_step``.
        policy: whose turns are taken.
        replay_buffer: extended with every batch; its
            :class:`~objectives.advantages.MCAdvantage` says which groups are worth training.
        groups_per_step: groups of a batch; as many as the environment's batch holds when not given.
        staleness: how old tokens may be, and what is done about it: :class:`~collectors.Wait`,
            :class:`~collectors.Drop` or :class:`~collectors.OnPolicy`; with ``recompute=False``
            responses in flight go on with what old weights have read.
        weight_sync_steps: batches that are trained for each push of weights.
        max_inflight_tasks: most episodes that run at once; -1: all that are admitted; a
            :class:`~collectors.LoadCap`: as many as the engine has room for.
        queue_maxsize: the most finished episodes that wait for the trainer; before they could be
            more, no group begins. 1024 when not given, or what ``staleness`` needs if that is more.
        request_timeout: seconds that one turn's generation may take, pauses included; what takes
            longer ends as ``"error: ..."``, alone. 600 when not given, and none on policy, where a
            step is one batch.
        engine: serves the policy's engine to many callers; made of it when not given.
        total_trajectories: stop after this many; ``None`` goes on while there are data.
        postproc: changes a batch before it goes into the buffer.

    Raises:
        ValueError: environment, policy, buffer and settings don't fit together.
        TypeError: the environment has no transforms, or the policy or the engine is none.
    """

    def __init__(
        self,
        env: EpisodeEnv,
        policy: LLMWrapperBase,
        *,
        replay_buffer: ReplayBuffer | None = None,
        groups_per_step: int | None = None,
        staleness: StalenessPolicy | None = None,
        weight_sync_steps: int = 1,
        max_inflight_tasks: int | LoadCap = -1,
        queue_maxsize: int | None = None,
        request_timeout: float | None = None,
        engine: AsyncEngine | None = None,
        total_trajectories: int | None = None,
        postproc: PostProcessing | None = None,
    ) -> None:
        loaders = check_streaming(env, policy, replay_buffer, postproc)
        check_counts(WHO, groups_per_step=groups_per_step, total_trajectories=total_trajectories)
        group_size = loaders[0].group_size if loaders else 1
        if groups_per_step is None:
            groups_per_step = max(1, env.batch_size.numel() // group_size)
        self.group_size = group_size
        ages = Wait() if staleness is None else staleness
        sizes = (groups_per_step, group_size, weight_sync_steps)
        self.ledger = GroupLedger(
            groups_per_step=groups_per_step,
            group_size=group_size,
            policy=ages,
            weight_sync_steps=weight_sync_steps,
            buffer_capacity=most_waiting(ages, queue_maxsize, *sizes),
        )
        """Knows what became of every group; to be read while nothing is collected."""
        self.env = env
        self.timeline = Timeline()
        """What took how long."""
        max_episodes = most_episodes(self.ledger, max_inflight_tasks)
        timeout_s = turn_timeout_s(self.ledger, request_timeout)
        check_room(replay_buffer, groups_per_step * group_size, who=WHO)
        updater = SnapshotUpdater(policy)
        super().__init__(
            policy,
            [],  # the data run ahead of the batches
            replay_buffer=replay_buffer,
            total_episodes=total_trajectories,
            postproc=postproc,
            weight_updater=updater,
            reward_functions=list(env.transforms_of(RewardFunctions)),
        )
        serves, follower = self._opened(engine, policy, max_inflight_tasks)
        self._async_policy = AsyncPolicy(policy, serves, request_timeout_s=timeout_s)
        runner = AsyncEpisodeRunner(env)
        self._prompts = PromptQueue(runner, self.ledger, group_size, next(iter(loaders), None))
        self._producer = Producer(
            partial(
                GroupRunner,
                runner,
                self._async_policy,
                group_size=group_size,
                max_episodes=max_episodes,
                further_entries=env.reward_entries,
                timeline=self.timeline,
            ),
            self._async_policy,
            self.ledger,
            self._prompts,
            is_wanted=partial(is_wanted, advantages_of(replay_buffer)),
            max_unwanted=_MAX_UNWANTED * groups_per_step,
            follower=follower,
        )
        parts = (self._producer, self._async_policy)
        self._weights = WeightPushes(*parts, self.ledger, updater, self.timeline)
        self._evaluations = Evaluations(*parts, self.timeline)
        self._monitor = Monitor(self._producer, self.ledger, self.timeline, follower)
        self._finished = FinishedGroups(self._producer, self.ledger, self._prompts, self._monitor)
        self._is_closed = False

    # What it is made of -------------------------------------------------------------------------

    def _opened(
        self, engine: AsyncEngine | None, policy: LLMWrapperBase, max_inflight_tasks: int | LoadCap
    ) -> tuple[AsyncEngine, LoadFollower | None]:
        """What draws, and what follows its load."""
        serves = engine or self._engine_of(policy)
        try:
            check_adapters(serves, self.ledger.policy)
            recomputes(serves, self.ledger.policy)
            return serves, follower_of(serves, self.ledger.num_slots, max_inflight_tasks)
        except BaseException:
            if engine is None:
                serves.close()
            raise

    def _engine_of(self, policy: LLMWrapperBase) -> AsyncEngine:
        if not self.ledger.is_on_policy:
            return open_async(policy.engine)
        return BatchingEngine(policy.engine, num_expected=lambda: self._producer.num_expected())

    # Collecting ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to collect in the background, if that has not begun; iterating does so too.

        On policy a batch begins when it is asked for: nothing is sampled between the steps.
        """
        self._open()
        if not self.ledger.is_on_policy:
            self._producer.begin()

    def _open(self) -> None:
        if not self._producer.is_alive:
            self._producer.check_open()
            self._producer.start()

    @property
    def is_running(self) -> bool:
        """Whether it collects in the background."""
        return self._producer.is_alive and self._producer.error is None

    def collect(self) -> TensorDictBase:
        """The next batch: complete groups, as soon as there are enough.

        Returns:
            Rows ``[B]`` as :meth:`LLMCollector.collect` gives them, the groups in the order in
            which they are trained. The same rows are in the replay buffer.

        Raises:
            DataExhaustedError: there are no more data, and nothing is under way.
            RuntimeError: the collection has failed; the cause is attached.
        """
        return super().collect()

    def _run_batch(self) -> tuple[TensorDictBase, int]:
        self.start()
        if self._finished.are_taken:
            self._weights.unchanged(self._finished.used)
        with self._producer.released() if self.ledger.is_on_policy else nullcontext():
            groups = self._finished.take()
        rows = [row for group in groups for row in group.rows]
        return lazy_stack(rows), len(groups) * self.group_size

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Draw no token and begin no group meanwhile; what runs goes on afterwards."""
        self._open()
        with paused(self._producer, self._async_policy):
            yield

    # Weights ------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The version that new tokens are stamped with."""
        return self._async_policy.version

    @property
    def _is_lockstep(self) -> bool:
        return self.ledger.is_on_policy

    @property
    def _pushed_version(self) -> int:
        return self._weights.version

    def _wait_for_push(self) -> None:
        self._weights.wait()

    def _push(
        self, source: nn.Module | Mapping[str, Tensor], version: int | None, *, is_restored: bool
    ) -> int:
        if not self.ledger.is_on_policy:
            check_own_memory(source, self._async_policy.engine)
        self._open()
        return self._weights.push(source, tuple if is_restored else self._finished.used, version)

    # Resume -------------------------------------------------------------------------------------

    def _reached_caller(self, has_reached: bool) -> None:
        self._finished.is_with_caller = has_reached

    def _position(self) -> dict[str, Any]:
        return self._finished.state()

    def _go_to(self, position: Mapping[str, Any]) -> None:
        self._finished.load(position)

    def _stateful(self) -> list[Transform]:
        return [t for t in remembering(self.env) if not isinstance(t, DataLoadingPrimer)]

    # Evaluation ---------------------------------------------------------------------------------

    def evaluate(self, env: EpisodeEnv, *, wait: bool = False) -> EvaluationPoint | None:
        """Evaluate the weights that serve now, beside training; they stay until it is over.

        Pushes wait meanwhile, and no group begins. A point that is asked for while another runs
        comes after it with ``wait``, and else is skipped, and says so. What is over waits for
        :meth:`take_evaluations`; what broke a point that nobody waited for is raised there, or
        here by the next one.

        Args:
            env: with held-out data, of which one batch is taken from the beginning.
            wait: until it is over.

        Returns:
            The point, if it was waited for or skipped.

        Raises:
            ValueError: environment and policy don't fit together.
        """
        self._open()
        return self._evaluations.ask(env, self.ledger.version, wait=wait)

    def take_evaluations(self) -> list[EvaluationPoint]:
        """The points that are over, as they ended, skipped ones too; given once, then forgotten.

        Raises whatever broke one that nobody waited for, such as
        :class:`~torchrl_modules.EngineDied`.
        """
        return self._evaluations.take()

    # What it was like ---------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """What collection was like since the last call, and of the ledger's all.

        Returns:
            ``collect/trainer_wait_fraction``, of the time; ``collect/queued_groups``, finished
            ones that were left when the trainer took its own; ``collect/open_episodes``; where the
            load is followed ``collect/max_groups`` that may run, ``collect/cache_use`` and
            ``collect/preemptions``, see :class:`~torchrl_modules.EngineLoad`;
            ``collect/<what>_s``, seconds summed over episodes by what was done; and the ledger's,
            see :meth:`~collectors.GroupLedger.metrics`.
        """
        return self._monitor.metrics()

    def write_trace(self, path: str | Path) -> None:
        """Write what happened when to a JSON file, for chrome://tracing or ui.perfetto.dev."""
        self.timeline.write(path)

    # The end ------------------------------------------------------------------------------------

    def async_shutdown(self, timeout: float | None = None) -> None:
        """Cancel what runs, give back everything, and close environment and engine.

        What was in flight is accounted for as returned. May be called twice.

        Args:
            timeout: seconds until it has to be over; 60 when not given.

        Raises:
            TimeoutError: it is not.
            UpdateRefused: the engine refused the last push.
        """
        self._producer.stop(_CLOSE_S if timeout is None else timeout)
        if self._is_closed:
            return
        self._is_closed = True
        self._async_policy.engine.close()
        self.env.close(raise_if_closed=False)
        _log.info("%s", self.ledger)
        if self._producer.error is None:
            self._weights.close()

"""Collection beside training: no row waits for another, and every token's age is bounded.

The loop::

    trainer's thread                         event loop of the producer
    collect() <- take a batch of groups <- finished <- group runner: all episodes of a group
        |          waits until the ledger     |           |  each: begin, turns, finish
        v          has one for this step      |           v
    train                                     |         engine: draws for all episodes at once
        |                                     |           ^
    update_policy_weights_ -- push: new weights ----------+
        |                     waits for the push before
        v
    ledger: may a group begin? <--- admission: a staleness policy bounds how old its tokens get,
                                    a cap how many episodes run; what is too old is dropped or kept
                                    waiting, and its prompt is drawn again

Back-pressure: no group begins while the finished ones would be too old when they are trained.

Shape legend: B rows, T tokens of a row (ragged).
"""

import logging
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final

from tensordict import TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.data import ReplayBuffer

from collectors.collector import PostProcessing
from collectors.composition_checks import check_storage
from collectors.ledger import GroupLedger, StalenessPolicy, Wait
from collectors.refill import refusing_parts
from torchrl_data.checks import check_counts
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.rewards.functions import RewardFunctions
from torchrl_modules import LLMWrapperBase
from torchrl_modules.engines.batching_engine import BatchingEngine
from torchrl_modules.engines.engine import AsyncEngine
from torchrl_modules.engines.open_async import open_async
from torchrl_modules.policies.async_policy import AsyncPolicy

from .background_collector import BackgroundCollector
from .checks import (
    WHO,
    check_adapters,
    check_agents_apart,
    check_barriers,
    check_streaming,
    most_episodes,
    most_waiting,
    recomputes,
    turn_timeout_s,
)
from .evaluation_point import EvaluationPoint
from .load_cap import LoadCap, cap_of
from .producer import Producer
from .program_end import shut_down_at_end, was_shut_down
from .snapshot_updater import SnapshotUpdater, shares_memory
from .timeline import Timeline

_CLOSE_S: Final = 60.0
_log = logging.getLogger(__name__)


class StreamingCollector(BackgroundCollector):
    """Collects beside training: episodes run by themselves, groups are trained as they finish.

    Iterate it, train on each batch, and push the weights; generation goes on meanwhile::

        with StreamingCollector(env, policy, replay_buffer=buffer) as collector:
            for batch in collector:
                train(buffer)
                collector.update_policy_weights_(model)

    No turn, tool or reward of an episode waits for another's; groups complete in any order, and a
    batch, rows ``[B]``, is ``groups_per_step`` complete groups. A :class:`~collectors.GroupLedger`
    admits them: by construction no token is older at its use than ``staleness`` allows, and with
    the default nothing is thrown away and no slow prompt starves. New weights are taken up in the
    middle of responses; every token knows the version that drew it.

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
        weight_sync_steps: batches that are trained for each push of weights:
            :meth:`update_policy_weights_` after each of them pushes the last one's, and in between
            gives the version that was pushed before.
        max_inflight_tasks: most episodes that run at once; -1: all that are admitted; a
            :class:`~collectors.LoadCap`: as many as the engine has room for.
        queue_maxsize: the most finished episodes that wait for the trainer; before they could be
            more, no group begins. 1024 when not given, or what ``staleness`` needs if that is more.
        request_timeout: seconds that one turn's generation may take, pauses included; what takes
            longer ends as ``"error: ..."``, alone. 600 when not given, and none on policy, where a
            step is one batch.
        engine: serves the policy's engine to many callers, or what
            :func:`~torchrl_modules.open_async` makes one of; the policy's own when not given.
        total_trajectories: stop after this many; ``None`` goes on while there are data.
        postproc: changes a batch before it goes into the buffer.

    Raises:
        ValueError: environment, policy, buffer and settings don't fit together.
        TypeError: the environment has no transforms, or the policy or the engine is none.

    Example:
        >>> from torchrl_envs import ChatEnv, DataLoadingPrimer, StepCounter
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> model, sampling = tiny_qwen3(len(tokenizer)), {"max_new_tokens": 8}
        >>> policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=sampling)
        >>> data = DataLoadingPrimer([{"prompt": f"{n} + 2?"} for n in range(9)], group_size=2)
        >>> env = ChatEnv(batch_size=(4,)).append_transform(data).append_transform(StepCounter(1))
        >>> with StreamingCollector(env, policy, total_trajectories=8) as collector:
        ...     for rows in collector:  # two groups of two
        ...         version = collector.update_policy_weights_(model)
        ...         print(rows.shape, rows["group_id"].unique().numel(), version)
        torch.Size([4]) 2 1
        torch.Size([4]) 2 2
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
        check_barriers(env, self.ledger)
        self.env = env
        self.timeline = Timeline()
        """What took how long."""
        most = most_episodes(self.ledger, max_inflight_tasks)
        timeout_s = turn_timeout_s(self.ledger, request_timeout)
        check_storage(replay_buffer, groups_per_step * group_size, postproc, who=WHO)
        self._updater = SnapshotUpdater(policy)
        super().__init__(
            policy,
            [],  # the data run ahead of the batches
            replay_buffer=replay_buffer,
            total_episodes=total_trajectories,
            postproc=postproc,
            weight_updater=self._updater,
            reward_functions=list(env.transforms_of(RewardFunctions)),
        )
        serves = engine
        if serves is None and self.ledger.is_on_policy:
            number = lambda: self._producer.num_expected()  # noqa: E731 - it is made below
            serves = BatchingEngine(policy.engine, num_expected=number)
        serves = open_async(serves or policy.engine)
        try:
            check_agents_apart(policy, serves)
            check_adapters(serves, ages)
            cap = cap_of(serves, self.ledger.num_slots, max_inflight_tasks, who=WHO)
            self._async_policy = AsyncPolicy(policy, serves, request_timeout_s=timeout_s)
            self._recompute = recomputes(serves, ages, who=WHO)
            self._loop = self._source = self._producer = Producer(
                *(env, self._async_policy, self.ledger, next(iter(loaders), None)),
                max_episodes=most,
                advantages=refusing_parts(replay_buffer),
                timeline=self.timeline,
                cap=cap,
            )
            self._is_lockstep, self._pushed_version = self.ledger.is_on_policy, self.policy_version
        except BaseException:
            if serves is not engine:
                serves.close()
            raise
        self._since_s = time.monotonic()
        self._is_closed = False

    # Collecting ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to collect in the background, if that has not begun; iterating does so too.

        On policy a batch begins when it is asked for: nothing is sampled between the steps.
        """
        self._open()
        if not self.ledger.is_on_policy:
            self._producer.begin()

    def _open(self) -> None:
        self._producer.open()
        shut_down_at_end(self)

    def _run_batch(self) -> tuple[TensorDictBase, int]:
        self.start()
        if self._producer.taken:
            if self.ledger.weight_sync_steps == 1:
                self._wait_for_push()  # it is older than what the generators will count as
            self._producer.unchanged()
        with self._producer.holding(-1) if self.ledger.is_on_policy else nullcontext():
            groups = self._producer.take()
        # Copies of the entries' names: a ``postproc`` that fails may have set some, and is called
        # again with the same groups.
        rows = [row.copy() for group in groups for row in group.rows]
        return lazy_stack(rows), len(groups) * self.group_size

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Draw no token and begin no group meanwhile; what runs goes on afterwards."""
        self._open()
        engine = self._async_policy.engine
        with self._producer.holding():
            self._producer.submit(engine.pause()).result()
            try:
                yield
            finally:
                self._producer.submit(engine.resume()).result()

    # Weights ------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The version that new tokens are stamped with."""
        return self._async_policy.version

    def _push(
        self, source: nn.Module | Mapping[str, Tensor], version: int | None, *, is_restored: bool
    ) -> int:
        if not self.ledger.is_on_policy and shares_memory(source, self._async_policy.engine):
            raise ValueError(
                f"{WHO}: the policy draws from the tensors that are trained, so that its tokens "
                "would be of no version. Give the policy a copy of the model, "
                "TransformersWrapper(copy.deepcopy(model), ...), or take staleness=OnPolicy()."
            )
        producer, ledger = self._producer, self.ledger
        self._open()
        due = producer.queue.steps[self._pushed_version] + ledger.weight_sync_steps
        if not is_restored and producer.taken and ledger.version + 1 < due:
            producer.unchanged()
            return self._pushed_version
        self._wait_for_push()
        with producer.timeline.span("copy weights", "trainer", 0):
            dtype = getattr(self._async_policy.engine, "update_dtype", None)
            weights = self._updater.snapshot(source, dtype)
        number = self.policy_version + 1 if version is None else version
        with producer.changed:
            producer.check_open()
            step = producer.queue.trained([] if is_restored else producer.used(), number)
        push = producer.push(weights, number, step, recompute=self._recompute)
        self._push_under_way, self._pushed_version = producer.submit(push), number
        return number

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
        return self._producer.evaluate(env, wait=wait)

    def take_evaluations(self) -> list[EvaluationPoint]:
        """The points that are over, as they ended, skipped ones too; given once, then forgotten.

        Raises whatever broke one that nobody waited for, such as
        :class:`~torchrl_modules.EngineDied`.
        """
        return self._producer.take_evaluations()

    # What it was like ---------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return what collection was like since the last call, and of the ledger's all.

        Returns:
            ``collect/trainer_wait_fraction``, of the time; ``collect/queued_groups``, finished
            ones that were left when the trainer took its own; ``collect/open_episodes``; where the
            load is followed ``collect/max_groups`` that may run, ``collect/cache_use`` and
            ``collect/preemptions``, see :class:`~torchrl_modules.EngineLoad`;
            ``collect/<what>_s``, seconds summed over episodes by what was done (``environment``,
            tools among it, once an episode is over); and the ledger's, see
            :meth:`~collectors.GroupLedger.metrics`.
        """
        now_s = time.monotonic()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        seconds = self.timeline.take_totals()
        waited_s = seconds["wait for rollouts"]
        with self._producer.changed:
            ledger = {f"ledger/{name}": value for name, value in self.ledger.metrics().items()}
        cap = self._producer.cap
        return {
            **ledger,
            **({} if cap is None else cap.metrics()),
            "collect/trainer_wait_fraction": waited_s / elapsed_s if elapsed_s else 0.0,
            "collect/queued_groups": float(self._producer.num_queued),
            "collect/open_episodes": float(self._producer.runner.num_open),
            "collect/generate_s": seconds["generate"],
            "collect/environment_s": seconds["environment"],
            "collect/score_s": seconds["score"],
        }

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
        was_shut_down(self)
        self._async_policy.engine.close()
        self.env.close(raise_if_closed=False)
        _log.info("%s", self.ledger)
        push = self._push_under_way
        if push is not None and self._producer.error is None:
            with suppress(CancelledError):  # it was cut short
                push.result()

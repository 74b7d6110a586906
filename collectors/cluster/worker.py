"""A worker of a cluster: it runs groups with an engine of its own."""

import asyncio
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from collectors.ledger import StalenessPolicy, Ticket
from collectors.ledger.groups import LOAD
from collectors.llm_collector import remembering
from collectors.resume import random_state, set_random_state
from collectors.streaming.group_runner import Group, GroupRunner, Timeline
from collectors.streaming.load import (
    LoadCap,
    LoadFollower,
    check_streaming,
    follower_of,
    is_wanted,
    recomputes,
)
from objectives import MCAdvantage
from torchrl_envs.datasets.primer import DataLoadingPrimer, rollout_rewards
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_env import AsyncEpisodeRunner, EpisodeEnv
from torchrl_envs.rewards.functions import RewardFunctions
from torchrl_modules import LLMWrapperBase, TransformersEngine, open_async
from torchrl_modules.engines.engine import EngineDied, push_weights
from torchrl_modules.policies.base import AsyncPolicy

from .ledger_service import WHO, EpisodeEnd, Scored, built, load_ray

# The groups that a collector runs, and how many it may.


class RunningGroups:
    """Counts groups, and gives the youngest back where they are too many; for one event loop."""

    def __init__(self) -> None:
        self._groups: list[Group] = []  # the oldest first
        self._most: float = math.inf
        self._changed = asyncio.Event()
        self.num_ended = 0
        """Groups whose episodes have all run to their ends."""

    @property
    def num_running(self) -> int:
        """Groups whose episodes are not all over."""
        return len(self._groups)

    async def wait_for_room(self) -> None:
        """Until another group may run."""
        while self.num_running >= self._most:
            self._changed.clear()
            await self._changed.wait()

    def limit_groups(self, most: int) -> None:
        """Let at most so many groups run; the youngest of those that do are cancelled.

        Args:
            most: at least 1.
        """
        self._most = most
        for group in self._groups[most:]:
            group.cancel(LOAD)
        self._changed.set()

    def add(self, group: Group) -> None:
        """It begins to run."""
        self._groups.append(group)

    def note_end(self, group: Group) -> None:
        """An episode of a group is over, or was cancelled."""
        group.num_open -= 1
        if not group.num_open:
            self.num_ended += not group.cancelled_for
            self.remove(group)

    def remove(self, group: Group) -> None:
        """It runs no more, if it did."""
        # By identity: equality would compare rows.
        self._groups = [each for each in self._groups if each is not group]
        self._changed.set()


# What the collectors of a collection remember, each for itself: transforms and random numbers.

WorkerState = Mapping[str, Any]


def state_of(env: EpisodeEnv) -> dict[str, Any]:
    """What transforms of an environment and this process's random numbers are at."""
    # The data are drawn elsewhere.
    return {
        "transforms": [
            {"type": type(part).__name__, "state": part.get_extra_state()}
            for part in remembering(env)
            if not isinstance(part, DataLoadingPrimer)
        ],
        "random": random_state(),
    }


def load_state(
    env: EpisodeEnv, saved: Sequence[WorkerState | None], *, index: int, num_collectors: int
) -> None:
    """Go on where a collector of its number was.

    Where there were more or fewer of them, a transform with ``deal_extra_states(states, count)``
    says what becomes of what they remember; random numbers go on in those that were there.

    Args:
        env: of this collector.
        saved: what :func:`state_of` gave, by collector; ``None`` of one that did not serve then.
        index: the number of this collector.
        num_collectors: how many there are.

    Raises:
        ValueError: the environment has other transforms; or there were more or fewer collectors,
            and a transform does not say what becomes of its states.
    """
    known = [state for state in saved if state is not None]
    parts = [part for part in remembering(env) if not isinstance(part, DataLoadingPrimer)]
    here = [type(part).__name__ for part in parts]
    for state in known:
        there = [each["type"] for each in state["transforms"]]
        if there != here:
            raise ValueError(
                f"{WHO}: the saved collectors' environments had the transforms {there}, these have "
                f"{here}."
            )
    own = saved[index] if index < len(saved) else None
    for number, part in enumerate(parts):
        states = [state["transforms"][number]["state"] for state in known]
        if len(saved) != num_collectors and states:
            part.set_extra_state(_dealt(part, states, len(saved), num_collectors)[index])
        elif own is not None:
            part.set_extra_state(own["transforms"][number]["state"])
    if own is not None:
        set_random_state(own["random"])


def _dealt(part: Any, states: Sequence[Any], num_saved: int, count: int) -> Sequence[Any]:
    """The states of a transform in another number of collectors."""
    if not hasattr(part, "deal_extra_states"):
        raise ValueError(
            f"{WHO}: the saved run had num_collectors={num_saved}, this one has {count}, and what "
            f"{type(part).__name__} remembers belongs to one of them. Take as many as there were, "
            "or give it deal_extra_states(states, count)."
        )
    return part.deal_extra_states(states, count)


# What lives in a collector's actor: an environment, a policy, and the episodes of its groups.

_MAX_DEATHS: Final = 3
"""Groups that die with their engine, none between them, for each that runs."""


class WorkerSettings(NamedTuple):
    """What every collector of a collection is made of."""

    env: EpisodeEnv | Callable[[], EpisodeEnv]
    policy: LLMWrapperBase | Callable[[], LLMWrapperBase]
    group_size: int
    max_episodes: int
    """That run at once in one collector."""
    advantages: Sequence[MCAdvantage]
    """They say whether a group is worth training; groups never cross collectors."""
    request_timeout_s: float | None
    staleness: StalenessPolicy
    max_inflight_tasks: int | LoadCap
    most_groups: int
    """That the ledger admits."""


class CollectorWorker:
    """Runs the groups that the ledger hands out, and keeps their rows where it is.

    Args:
        settings: what it is made of.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._env: EpisodeEnv
        self._policy: AsyncPolicy
        self.timeline = Timeline()
        self._ends: dict[Ticket, dict[int, EpisodeEnd]] = {}
        self._groups: GroupRunner | None = None
        self._running = RunningGroups()
        self._follower: LoadFollower | None
        self._recompute: bool
        self._num_deaths = 0

    async def pid(self) -> int:
        """Of the actor's process."""
        return os.getpid()

    async def open(self) -> int:
        """Make environment and policy; gives the version of the weights that serve.

        Raises:
            ValueError: they don't fit together, or the engine can't do what is asked of it.
            TypeError: one of them is none.
        """
        settings = self._settings
        self._env = built(settings.env, EpisodeEnv)
        policy = built(settings.policy, LLMWrapperBase)
        check_streaming(self._env, policy, None, None)
        engine = policy.engine
        options = {"copy_model": False} if isinstance(engine, TransformersEngine) else {}
        self._policy = AsyncPolicy(
            policy, open_async(engine, **options), request_timeout_s=settings.request_timeout_s
        )
        serves = self._policy.engine
        most, asked = settings.most_groups, settings.max_inflight_tasks
        self._follower = follower_of(serves, most, asked, who=WHO)
        self._recompute = recomputes(serves, settings.staleness, who=WHO)
        return self._policy.version

    async def load(self) -> dict[str, float]:
        """Of its engine, see :meth:`LoadFollower.metrics`; empty where it is not followed."""
        return {} if self._follower is None else self._follower.metrics()

    async def state(self) -> dict[str, Any]:
        """What it remembers, see :func:`state_of`."""
        return state_of(self._env)

    async def load_state(
        self, saved: Sequence[WorkerState | None], index: int, num_collectors: int
    ) -> None:
        """Go on where a collector was, see :func:`load_state`.

        Args:
            saved: states by collector.
            index: of this one.
            num_collectors: how many there are.

        Raises:
            ValueError: it can't.
        """
        load_state(self._env, saved, index=index, num_collectors=num_collectors)

    async def update_weights(
        self, state_dict: Mapping[str, Tensor], version: int, step: int
    ) -> int:
        """Replace the weights; gives the version that serves.

        Args:
            state_dict: parameter name to value.
            version: the number of the weights.
            step: of the training, which reward functions are told.

        Raises:
            UpdateRefused: the engine refuses them.
        """
        if self._policy.version != version:
            # Ray's tensors lie in memory that nobody may write to.
            own = {name: value.clone() for name, value in state_dict.items()}
            engine = self._policy.engine
            await push_weights(engine, own, version=version, recompute=self._recompute)
        for functions in self._env.transforms_of(RewardFunctions):
            functions.trainer_state.global_step = step
        return self._policy.version

    async def run(self, ledger: Any, worker: int, incarnation: int) -> None:
        """Run groups until the ledger says that it is over.

        Args:
            ledger: the handle of its actor.
            worker: the number of this collector.
            incarnation: how many collectors had this number before.
        """
        settings = self._settings
        runner = AsyncEpisodeRunner(self._env)
        self._groups = GroupRunner(
            runner,
            self._policy,
            group_size=settings.group_size,
            max_episodes=settings.max_episodes,
            further_entries=self._env.reward_entries,
            timeline=self.timeline,
            on_end=self._note_end,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._follower is not None:
                    tasks.create_task(self._follower.run(self._running))
                while (work := await self._next_group(ledger, worker, incarnation)) is not None:
                    ticket, prompt = work
                    episodes = runner.draw_again(prompt, ticket.seed, settings.group_size)
                    group = Group(ticket, prompt, episodes)
                    self._running.add(group)
                    tasks.create_task(self._run_group(ledger, worker, incarnation, group))
                raise _Over
        except BaseExceptionGroup as errors:
            failed = [error for error in _leaves(errors) if not isinstance(error, _Over)]
            if failed:
                raise failed[0] from None

    async def _next_group(self, ledger: Any, worker: int, incarnation: int) -> Any:
        await self._running.wait_for_room()
        return await ledger.next_group.remote(worker, incarnation)

    async def _run_group(self, ledger: Any, worker: int, incarnation: int, group: Group) -> None:
        assert self._groups is not None
        ticket, episodes = group.ticket, group.episodes
        self._ends[ticket] = {}
        try:
            await group.run(self._groups)
        except EngineDied:
            await self._groups.give_up(episodes)
            await ledger.give_back.remote(worker, incarnation, ticket)
            self._num_deaths += 1
            if self._num_deaths >= _MAX_DEATHS * max(1, len(self._ends)):
                raise  # Another collector makes engines anew.
        except asyncio.CancelledError:
            await self._groups.give_up(episodes)
            if not group.cancelled_for:
                raise
            await ledger.give_back.remote(worker, incarnation, ticket, group.cancelled_for)
        else:
            self._num_deaths = 0
            ends = [self._ends[ticket][index] for index in range(len(episodes))]
            wanted = is_wanted(self._settings.advantages, group.rows)
            rows = [load_ray().put(group.rows)] if wanted else []
            scored = Scored(rows, len(group.rows), rollout_rewards(group.rows))
            await ledger.finish.remote(worker, incarnation, ticket, ends, scored)
        finally:
            del self._ends[ticket]
            self._running.remove(group)

    def _note_end(self, group: Group, number: int, episode: Episode) -> None:
        self._running.note_end(group)
        if not episode.is_done:  # it was cancelled
            return
        drawn = np.concatenate([part.policy_versions(0).numpy() for part in episode.rows])
        drawn = drawn[drawn >= 0]
        versions = (int(drawn.min()), int(drawn.max())) if len(drawn) else None
        self._ends[group.ticket][number] = EpisodeEnd(len(drawn), versions, episode.stop_reason)

    async def close(self) -> None:
        """Give back everything that it holds."""
        if self._groups is not None:
            self._groups.abandon()
            await asyncio.to_thread(self._groups.close)
        if hasattr(self, "_policy"):
            await asyncio.to_thread(self._policy.engine.close)
            await asyncio.to_thread(self._env.close, raise_if_closed=False)


class _Over(Exception):
    """The ledger has no more groups; what runs is cancelled."""


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors of a group that are no groups."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in _leaves(each)]

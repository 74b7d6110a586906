"""Worker of a cluster in an actor: an environment, a policy, and the episodes of its groups."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor

from collectors.collector import remembering, states_of
from collectors.ledger import StalenessPolicy
from collectors.ledger.reasons import ENGINE_DIED
from collectors.refill import is_wanted
from collectors.resume.random_numbers import random_state, set_random_state
from collectors.streaming.checks import (
    check_adapters,
    check_streaming,
    recomputes,
)
from collectors.streaming.group_runner import GroupRunner, RunningGroup
from collectors.streaming.load_cap import GroupCap, LoadCap, cap_of
from collectors.streaming.timeline import Timeline
from objectives.advantages.mc_advantage import ByGroups
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.rewards.functions import RewardFunctions
from torchrl_modules import LLMWrapperBase, TransformersEngine, open_async
from torchrl_modules.engines.agent_engines import AgentEngines
from torchrl_modules.engines.engine import EngineDied, push_weights
from torchrl_modules.policies.async_policy import AsyncPolicy
from torchrl_modules.weights.adapter_weights import mapped
from torchrl_modules.weights.agent_weights import AgentWeights
from torchrl_modules.weights.expected_weights import UpdateRefused

from .ledger_service import WHO, Scored, built
from .ray_door import load_ray
from .served_engine import ServedEngine

ALL: Final = ""
"""In the place of an agent's name: weights of one policy."""


class WorkerSettings(NamedTuple):
    """The settings that all collectors of a collection share."""

    env: EpisodeEnv | Callable[[], EpisodeEnv]
    policy: LLMWrapperBase | Callable[[], LLMWrapperBase]
    group_size: int
    max_episodes: int
    """That run at once in one collector."""
    advantages: Sequence[ByGroups]
    """They say whether a group is worth training; groups never cross collectors."""
    request_timeout_s: float | None
    staleness: StalenessPolicy
    max_inflight_tasks: int | LoadCap
    most_groups: int
    """That the ledger admits."""


class Opened(NamedTuple):
    """The message of a collector once it is made."""

    version: int
    """Of the weights that serve."""
    engine: ServedEngine


class PartlyRefused(UpdateRefused):
    """Weights of which the engines of some agents have theirs, and another one refused its own."""


class CollectorWorker:
    """Runs the groups that the ledger hands out, and keeps their rows where it is.

    Args:
        settings: what it is made of.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._env: EpisodeEnv
        self._policy: AsyncPolicy
        self._groups: GroupRunner | None = None
        self._cap: GroupCap | None
        self._recompute: bool

    async def open(self) -> Opened:
        """Make environment and policy.

        Raises:
            ValueError: they don't fit together, or the engine can't do what is asked of it.
            TypeError: one of them is none.
        """
        settings = self._settings
        self._env = built(settings.env, EpisodeEnv)
        policy = built(settings.policy, LLMWrapperBase)
        check_streaming(self._env, policy, None, None)
        engine = policy.engine
        is_here = isinstance(engine, TransformersEngine | AgentEngines)
        options = {"copy_model": False} if is_here else {}
        self._policy = AsyncPolicy(
            policy, open_async(engine, **options), request_timeout_s=settings.request_timeout_s
        )
        serves = self._policy.engine
        most, asked = settings.most_groups, settings.max_inflight_tasks
        self._cap = cap_of(serves, most, asked, who=WHO)
        self._recompute = recomputes(serves, settings.staleness, who=WHO)
        check_adapters(serves, settings.staleness)
        return Opened(self._policy.version, ServedEngine.of(serves))

    async def load(self) -> dict[str, float]:
        """Metrics of its engine, see :meth:`GroupCap.metrics`; empty where it is not followed."""
        return {} if self._cap is None else self._cap.metrics()

    async def state(self) -> dict[str, Any]:
        """State of its transforms, and of the process's random numbers."""
        # The data are drawn elsewhere.
        parts = remembering(self._env, data=False)
        return {"transforms": states_of(parts), "random": random_state()}

    async def load_state(
        self, saved: Sequence[Mapping[str, Any] | None], index: int, num_collectors: int
    ) -> None:
        """Go on where a collector of its number was.

        Where there were more or fewer of them, a transform with ``deal_extra_states(states,
        count)`` says what becomes of what they remember; random numbers go on in those that were
        there.

        Args:
            saved: what :meth:`state` gave, by collector; ``None`` of one that did not serve then.
            index: the number of this collector.
            num_collectors: how many there are.

        Raises:
            ValueError: the environment has other transforms; or there were more or fewer
                collectors, and a transform does not say what becomes of its states.
        """
        known = [state for state in saved if state is not None]
        parts: list[Any] = remembering(self._env, data=False)
        here = [type(part).__name__ for part in parts]
        for state in known:
            there = [each["type"] for each in state["transforms"]]
            if there != here:
                raise ValueError(
                    f"{WHO}: the saved collectors' environments had the transforms {there}, these "
                    f"have {here}."
                )
        own = saved[index] if index < len(saved) else None
        for number, part in enumerate(parts):
            states = [state["transforms"][number]["state"] for state in known]
            if len(saved) != num_collectors and states:
                if not hasattr(part, "deal_extra_states"):
                    raise ValueError(
                        f"{WHO}: the saved run had num_collectors={len(saved)}, this one has "
                        f"{num_collectors}, and what {type(part).__name__} remembers belongs to "
                        "one of them. Take as many as there were, or give it "
                        "deal_extra_states(states, count)."
                    )
                part.set_extra_state(part.deal_extra_states(states, num_collectors)[index])
            elif own is not None:
                part.set_extra_state(own["transforms"][number]["state"])
        if own is not None:
            set_random_state(own["random"])

    async def update_weights(
        self, agents: Sequence[str], version: int, step: int, *state_dicts: Mapping[str, Tensor]
    ) -> int:
        """Replace the weights; gives the version that serves.

        Args:
            agents: whose they are, one of each; of one policy :data:`ALL`.
            version: the number of the weights.
            step: of the training, which reward functions are told.
            *state_dicts: of each agent, parameter name to value.

        Raises:
            UpdateRefused: the engine refuses them.
            PartlyRefused: the engine of an agent does, and those of others have theirs.
            EngineDied: one is gone.
        """
        if self._policy.version != version:
            # Ray's tensors lie in memory that nobody may write to.
            own = [mapped(state_dict, Tensor.clone) for state_dict in state_dicts]
            by_agent = AgentWeights(zip(agents, own, strict=True))
            weights: Any = by_agent.get(ALL, by_agent)
            engine = self._policy.engine
            try:
                await push_weights(engine, weights, version=version, recompute=self._recompute)
            except RuntimeError as error:  # of the engines of agents, of which some have taken them
                if isinstance(error.__cause__, UpdateRefused):
                    raise PartlyRefused(str(error)) from error
                if isinstance(error.__cause__, EngineDied):
                    raise EngineDied(str(error)) from error
                raise
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
        self._groups = groups = GroupRunner(
            self._env,
            self._policy,
            group_size=settings.group_size,
            max_episodes=settings.max_episodes,
            timeline=Timeline(max_spans=0),  # nobody asks for it
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._cap is not None:
                    tasks.create_task(self._cap.follow(groups))
                while True:
                    while not groups.has_room:
                        groups.wake.clear()
                        await groups.wake.wait()
                    work = await ledger.next_group.remote(worker, incarnation)
                    if work is None:
                        raise _Over
                    ticket, prompt = work
                    episodes = groups.episodes.draw_again(prompt, ticket.seed, settings.group_size)
                    group = groups.add(ticket, prompt, episodes)
                    tasks.create_task(self._run_group(ledger, worker, incarnation, groups, group))
        except BaseExceptionGroup as errors:
            _, failed = errors.split(_Over)
            if failed is not None:
                raise failed.exceptions[0] from None
        finally:
            await groups.end()

    async def _run_group(
        self, ledger: Any, worker: int, incarnation: int, groups: GroupRunner, group: RunningGroup
    ) -> None:
        ticket = group.ticket
        why = await groups.run(group)
        if why:
            why = "" if why == ENGINE_DIED else why
            await ledger.give_back.remote(worker, incarnation, ticket, why)
        else:
            ends = [group.ends[index] for index in range(len(group.episodes))]
            wanted = is_wanted(group.rows, self._settings.advantages)
            rows = [load_ray().put(group.rows)] if wanted else []
            pools = [loader.pools for loader in self._env.transforms_of(DataLoadingPrimer)]
            rewards = [] if not pools or pools[0] is None else pools[0].rewards_of(group.rows)
            scored = Scored(rows, len(group.rows), rewards)
            await ledger.finish.remote(worker, incarnation, ticket, ends, scored)
        del groups.groups[ticket]
        groups.wake.set()

    async def close(self) -> None:
        """Give back everything that it holds."""
        if self._groups is not None:
            await self._groups.end()
        if hasattr(self, "_policy"):
            await asyncio.to_thread(self._policy.engine.close)
            await asyncio.to_thread(self._env.close, raise_if_closed=False)


class _Over(Exception):
    """The ledger has no more groups; what runs is cancelled."""

"""An environment per rollout: its methods are tools, and it owns its state and its reward."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torchrl_data.tool_calls.parse import ToolCall
from torchrl_envs.concurrency.calls import ConcurrentCalls, accepted_arguments
from torchrl_envs.concurrency.cleanup import close_all
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.entries.observations import with_observation
from torchrl_envs.entries.rewards import RewardSource
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeStartError, EpisodeTransform, Event
from torchrl_envs.episode.tool_source import Job, ToolSource
from torchrl_envs.tool_calls.results import MAX_RESULT_BYTES
from torchrl_envs.tool_calls.schemas import Tool, environment_tools

from .instances import Factory, Instance, start_instance

if TYPE_CHECKING:
    from torchrl_envs.episode.episode_transform import EpisodeEnvironment


class EnvironmentTools(ToolSource, RewardSource):
    """Gives every rollout an environment of its own.

    An environment is plain Python: ``reset(**row)`` gets the columns of the data row that it names
    (all of them if it takes ``**kwargs``), and ``seed``, the group's seed, if it names it; what it
    returns, a string or a list of content parts, is added to the last user message (a string after
    a blank line), or becomes a user message if there is none. Every other public method is a tool
    (class methods too, static ones not, as with TRL).
    ``get_reward()`` is asked once, when the episode ends; it gets ``messages``, the whole
    conversation, if it names it, and ``None`` from it means that it does not apply. ``close()`` is
    always called. All may be ``async``.

    The calls of one rollout run in the order in which the model wrote them, unless the environment
    may be called while it is being called; those of different rollouts run at once. A call that
    fails, is malformed or misses its deadline is answered with an error that the model can read;
    the other rollouts are not disturbed. A row whose environment can't be made or reset in time
    ends at its first step, truncated and unscorable, with the error in ``stop_reason``.

    Args:
        factory: a class or callable that makes an environment, or ``{name: factory}`` routed by a
            column of the data.
        route_column: the column that names the factory.
        overlap_calls: whether the calls of one turn may run at once on one environment.
        timeout_s: deadline of one call, in seconds; also of ``get_reward`` and ``close``.
        start_timeout_s: deadline of making an environment, and of its ``reset``.
        max_result_bytes: longer results are cut, with a mark.
        show_schemas: whether the chat template shows the tools to the model.

    Raises:
        TypeError: a factory can't be called, a class can't be made without arguments, or its
            ``get_reward`` or ``close`` requires arguments that nobody gives.
        ValueError: a tool lacks a docstring or type hints, or there is no tool at all.
    """

    def __init__(
        self,
        factory: Factory | Mapping[str, Factory],
        *,
        route_column: str = "environment",
        overlap_calls: bool = False,
        timeout_s: float = 30.0,
        start_timeout_s: float = 120.0,
        max_result_bytes: int = MAX_RESULT_BYTES,
        show_schemas: bool = True,
    ) -> None:
        super().__init__(
            timeout_s=timeout_s, max_result_bytes=max_result_bytes, show_schemas=show_schemas
        )
        self.is_routed = isinstance(factory, Mapping)
        self.factories: dict[str, Factory] = (
            dict(factory) if isinstance(factory, Mapping) else {"": factory}
        )
        self.route_column = route_column
        self.overlap_calls = overlap_calls
        self.types = {name: _environment_type(f, timeout_s) for name, f in self.factories.items()}
        for cls in self.types.values():
            _check_lifecycle(cls)
        if not self.is_routed:  # known by its class, also where a lambda or a partial makes it
            name = self.types[""].__name__
            self.factories, self.types = {name: self.factories[""]}, {name: self.types[""]}
        self.tools: dict[str, dict[str, Tool]] = {
            name: environment_tools(cls) for name, cls in self.types.items()
        }
        self.start_timeout_s = start_timeout_s

    # Composition --------------------------------------------------------------------------------

    @property
    def reward_names(self) -> list[str]:
        """Environments that own a reward."""
        return [name for name, cls in self.types.items() if hasattr(cls, "get_reward")]

    def check(self, env: "EpisodeEnvironment") -> None:
        """Data and environments fit together, and somebody gives a reward.

        Raises:
            ValueError: the routing column or a column that ``reset`` requires is missing, a row
                names an unknown environment, or there is no reward at all.
        """
        loaders = list(env.transforms_of(DataLoadingPrimer))
        if loaders:
            self._check_columns(loaders[0])
        sources = [s for s in env.transforms_of(EpisodeTransform) if isinstance(s, RewardSource)]
        if not any(source.reward_names for source in sources):
            raise ValueError(
                f"No reward: neither {', '.join(self.types)} has a get_reward() method, nor are "
                "there reward functions. Define get_reward(self) -> float on the environment, or "
                "append RewardFunctions([...])."
            )

    def _check_columns(self, loader: DataLoadingPrimer) -> None:
        columns = set(loader.columns)
        if self.is_routed:
            if self.route_column not in columns:
                raise ValueError(
                    f"EnvironmentTools routes by the column {self.route_column!r}, which the data "
                    f"lacks; its columns are {sorted(columns)}. Add it or name another one with "
                    "route_column=."
                )
            if self.only_for is None:
                loader.require("environment", self._route_error)
        for name, cls in self.types.items():
            missing = _required_parameters(cls) - columns - {"seed"}
            if missing:
                raise ValueError(
                    f"{name}.reset needs the columns {sorted(missing)}, which the data lacks; its "
                    f"columns are {sorted(columns)}. Add them, or give the parameters a default."
                )

    def _route_error(self, row: Mapping[str, Any]) -> str:
        name = row.get(self.route_column)
        known = sorted(self.factories)
        return "" if name in known else f"it names the environment {name!r}; there are {known}"

    # Lifecycle ----------------------------------------------------------------------------------

    def instance(self, episode: Episode | int) -> Any:
        """The environment of an episode that is running, or being scored; ``None`` if it has none.

        Args:
            episode: any, or the number of the row in which it runs.
        """
        if isinstance(episode, int):
            found = self._environment().resources_in(episode).get(self)
        else:
            found = episode.resources.get(self)
        return None if found is None else found.environment

    async def begin(self, episode: Episode) -> None:
        """Make and reset an environment; add what it says to the query.

        Raises:
            EpisodeStartError: it can't be made or reset; that ends this episode alone.
        """
        columns = dict(episode.example or {})
        name = columns.get(self.route_column) if self.is_routed else next(iter(self.factories))
        if name not in self.factories:
            known = sorted(self.factories)
            raise EpisodeStartError(f"{name}: route") from ValueError(
                f"there is no such environment; there are {known}"
            )
        observation = await start_instance(
            self,
            episode,
            Instance(name, self.factories[name]),
            self.types[name],
            {"seed": episode.seed, **columns},
            start_timeout_s=self.start_timeout_s,
            timeout_s=self.timeout_s,
        )
        try:
            query = [] if episode.query is None else episode.query
            episode.query = with_observation(query, observation)
        except TypeError as error:
            raise EpisodeStartError(f"{name}: reset") from error

    # Tools --------------------------------------------------------------------------------------

    def tool_names(self) -> dict[str, str]:
        """Every tool of every environment."""
        return {
            tool: f"the environment {name}" for name, tools in self.tools.items() for tool in tools
        }

    def tools_of(self, episode: Episode) -> Mapping[str, Tool]:
        """The tools of the environment that an episode has."""
        instance = episode.resources.get(self)
        return {} if instance is None else self.tools[instance.name]

    def bind(self, episode: Episode, call: ToolCall) -> Job:
        """A call of a method of the episode's environment."""
        method = getattr(self.instance(episode), call.name)
        lane = None if self.overlap_calls else episode.id
        return self.job(call, functools.partial(method, **call.arguments), lane=lane)

    # Reward -------------------------------------------------------------------------------------

    def finish(self, episode: Episode) -> Event:
        """Ask the environment for its reward."""
        instance: Instance | None = episode.resources.get(self)
        if instance is None or not hasattr(self.types[instance.name], "get_reward"):
            return None
        return self._score(episode, instance)

    async def _score(self, episode: Episode, instance: Instance) -> None:
        get_reward = instance.environment.get_reward
        arguments = accepted_arguments(get_reward, {"messages": episode.messages})
        (outcome,) = await self.call(
            functools.partial(get_reward, **arguments), timeout_s=self.timeout_s
        )
        episode.score.add_outcome(instance.name, outcome, who=f"{instance.name}.get_reward")


def _environment_type(factory: Factory, timeout_s: float) -> type:
    """The class that a factory makes; a callable that is not a class is called once to see."""
    if isinstance(factory, type):
        missing = _required_arguments(factory)
        if missing:
            raise TypeError(
                f"The environment {factory.__name__} is made without arguments, but its "
                f"constructor requires {missing}. Give them defaults, or give a factory: "
                f"EnvironmentTools(lambda: {factory.__name__}({missing[0]}=...))."
            )
        return factory
    if not callable(factory):
        raise TypeError(
            "EnvironmentTools takes a class, a callable without arguments that makes an "
            f"environment, or a dict of them by name; got {factory!r}."
        )
    probe = factory()
    calls = ConcurrentCalls(timeout_s=timeout_s)
    try:
        close_all([probe], calls)
    finally:
        calls.close()
    return type(probe)


def _check_lifecycle(cls: type) -> None:
    """Methods that are called for the environment require no arguments that nobody gives."""
    for name, given in (("get_reward", ("messages",)), ("close", ())):
        method = getattr(cls, name, None)
        if method is None:
            continue
        if not callable(method):
            raise TypeError(
                f"{cls.__name__}.{name} must be a method, got {type(method).__name__}: "
                f"{method!r:.80}."
            )
        bound = not isinstance(inspect.getattr_static(cls, name), types.FunctionType)
        missing = [a for a in _required_arguments(method)[0 if bound else 1 :] if a not in given]
        if missing:
            gets = f"{', '.join(given)} if it names it" if given else "no arguments"
            raise TypeError(
                f"{cls.__name__}.{name} requires {missing}, which nobody gives: it gets {gets}. "
                "Keep what it needs on the environment (reset gets the data row), or give the "
                "arguments defaults."
            )


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    """What a call must be given; nothing where that can't be told."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a class that is not written in Python
        return []
    return [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]


def _required_parameters(cls: type) -> set[str]:
    reset = getattr(cls, "reset", None)
    if reset is None:
        raise ValueError(
            f"The environment {cls.__name__} has no reset(self, **row) method; add one (it may "
            "return None)."
        )
    return set(_required_arguments(reset)[1:])

"""Environment per rollout: its methods are tools, and it owns its state and its reward."""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs.concurrency.calls import ConcurrentCalls, accepted_arguments
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.entries.observations import with_observation
from torchrl_envs.entries.rewards import RewardSource
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeStartError, EpisodeTransform, OpenedTurns
from torchrl_envs.episode.tool_source import Job, ToolSource
from torchrl_envs.graders.answers import as_opened
from torchrl_envs.tool_results import MAX_RESULT_BYTES
from torchrl_envs.tool_schemas import Tool, environment_tools

from .instances import Factory, Instance, log_close_error, start_instance

if TYPE_CHECKING:
    from torchrl_envs.episode.episode_transform import EpisodeEnvironment


class EnvironmentTools(OpenedTurns, ToolSource, RewardSource):
    """Gives every rollout an environment of its own.

    An environment is plain Python: ``reset(**row)`` gets the columns of the data row that it names
    (all of them if it takes ``**kwargs``), and ``seed``, the group's seed, if it names it; what it
    returns, a string or a list of content parts, is added to the last user message (a string after
    a blank line), or becomes a user message if there is none. Every other public method is a tool
    (class methods too, static ones not, as with TRL), but for those that ``user_tool`` marks: they
    are called by the :class:`SimulatedUser`, and the policy does not see them.
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

    Example:
        >>> from torchrl.envs.transforms import Compose
        >>> class Counter:
        ...     def reset(self, start: int) -> str:  # a column of the data
        ...         self.count = start
        ...         return f"The counter is at {start}."
        ...     def increase(self) -> str:  # a tool
        ...         '''Add one to the counter.'''
        ...         self.count += 1
        ...         return str(self.count)
        ...     def get_reward(self) -> float:
        ...         return float(self.count)
        >>> data = DataLoadingPrimer([{"prompt": "Count to 5.", "start": 4}])
        >>> parts = Compose(data, EnvironmentTools(Counter))
        >>> env = ChatEnv(batch_size=(2,)).append_transform(parts)
        >>> call = '<tool_call>{"name": "increase", "arguments": {}}</tool_call>'
        >>> batch = env.reset().set("text_response", [call, "It is at 4."])
        >>> out = env.step(batch)["next"]
        >>> out["history"].prompt.to_chats()[0][-1]
        {'role': 'tool', 'content': '5', 'name': 'increase'}
        >>> out["done"].flatten(), out["reward"].flatten()
        (tensor([False,  True]), tensor([0., 4.]))
    """

    keeps_prompt = True

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
        self.route_column = route_column
        self.overlap_calls = overlap_calls
        self.start_timeout_s = start_timeout_s
        self.factories: dict[str, Factory] = {}
        self.types: dict[str, type] = {}
        given = factory.items() if isinstance(factory, Mapping) else [(None, factory)]
        made = [(name, make, _environment_type(make, timeout_s)) for name, make in given]
        for name, make, cls in made:
            _check_lifecycle(cls)
            # One alone is known by its class, also where a lambda or a partial makes it.
            known_as = cls.__name__ if name is None else name
            self.factories[known_as], self.types[known_as] = make, cls
        self.tools = {name: environment_tools(cls) for name, cls in self.types.items()}
        self.user_tools = {
            name: environment_tools(cls, of_user=True) for name, cls in self.types.items()
        }

    # Composition --------------------------------------------------------------------------------

    @property
    def reward_names(self) -> list[str]:
        """Environments that own a reward."""
        return [name for name, cls in self.types.items() if hasattr(cls, "get_reward")]

    def reward_names_of(self, row: Mapping[str, Any]) -> list[str]:
        """The environment that a row has, where it owns a reward."""
        if not self.is_routed:
            return self.reward_names
        return [name for name in self.reward_names if name == row.get(self.route_column)]

    def check(self, env: "EpisodeEnvironment") -> None:
        """Data and environments fit together, and somebody gives a reward.

        Raises:
            ValueError: the routing column or a column that ``reset`` requires is missing, a row
                names an unknown environment, or there is no reward at all.
        """
        self.note_environment(env)
        known, column = sorted(self.factories), self.route_column
        for loader in env.transforms_of(DataLoadingPrimer):
            if self.is_routed:
                do = " Add what says of each row its environment, or name another one by "
                loader.require_columns(
                    *("EnvironmentTools", [column], f"{do}route_column=."),
                    of=self.takes_part_in_row,
                )
                if self.only_for is None:
                    loader.require(
                        "environment",
                        lambda row: (
                            ""
                            if row.get(column) in known
                            else f"it names the environment {row.get(column)!r}; there are {known}"
                        ),
                    )
            for name, cls in self.types.items():
                if not hasattr(cls, "reset"):
                    missing = "no reset(self, **row) method; add one (it may return None)"
                    raise ValueError(f"The environment {cls.__name__} has {missing}.")
                needed = set(_required_arguments(cls.reset)[1:]) - {"seed"}
                do = " Add them, or give the parameters a default."
                of = functools.partial(self._has_environment, name)
                loader.require_columns(f"{name}.reset", sorted(needed), do, of=of)
        sources = [s for s in env.transforms_of(EpisodeTransform) if isinstance(s, RewardSource)]
        if not any(source.reward_names for source in sources):
            raise ValueError(
                f"No reward: neither {', '.join(self.types)} has a get_reward() method, nor are "
                "there reward functions. Define get_reward(self) -> float on the environment, or "
                "append RewardFunctions([...])."
            )

    def check_policy(self, policy: Any) -> None:
        """Note what the policy's prompts open of its turns."""
        self.note_encoder(getattr(policy, "encoder", None))

    def _has_environment(self, name: str, row: Mapping[str, Any]) -> bool:
        """Return whether the episodes that start from a row have an environment of that name."""
        return self._name_for(row) == name and self.takes_part_in_row(row)

    def _name_for(self, row: Mapping[str, Any]) -> Any:
        """The name of the environment that a row has, which may be none of them."""
        return row.get(self.route_column) if self.is_routed else next(iter(self.factories))

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
        name = self._name_for(columns)
        if name not in self.factories:
            unknown = f"there is no such environment; there are {sorted(self.factories)}"
            raise EpisodeStartError(f"{name}: route") from ValueError(unknown)
        instance, columns = Instance(name, self.factories[name]), {"seed": episode.seed, **columns}
        observation = await start_instance(self, episode, instance, self.types[name], columns)
        try:
            query = [] if episode.query is None else episode.query
            episode.query = with_observation(query, observation)
        except TypeError as error:
            raise EpisodeStartError(f"{name}: reset") from error

    # Tools --------------------------------------------------------------------------------------

    def tool_names(self) -> dict[str, str]:
        """Every tool of every environment."""
        return _owners(self.tools)

    def user_tool_names(self) -> dict[str, str]:
        """Every method of an environment that is a tool of the simulated user's."""
        return _owners(self.user_tools)

    def tools_of(self, episode: Episode) -> Mapping[str, Tool]:
        """The tools of the environment that an episode has."""
        instance = episode.resources.get(self)
        return {} if instance is None else self.tools[instance.name]

    def user_tools_of(self, episode: Episode) -> Mapping[str, Tool]:
        """The methods of the episode's environment that are tools of the simulated user's."""
        return self.user_tools.get(self._name_for(episode.example or {}), {})

    def bind(self, episode: Episode, call: ToolCall) -> Job:
        """A call of a method of the episode's environment."""
        method = getattr(self.instance(episode), call.name)
        lane = None if self.overlap_calls else episode.id
        return self.job(call, functools.partial(method, **call.arguments), lane=lane)

    # Reward -------------------------------------------------------------------------------------

    async def finish(self, episode: Episode) -> None:
        """Ask the environment for its reward, if it has ``get_reward``."""
        instance: Instance | None = episode.resources.get(self)
        if instance is None or not hasattr(self.types[instance.name], "get_reward"):
            return
        get_reward = instance.environment.get_reward
        messages, first = episode.messages, episode.first_response
        messages = [*messages[:first], *as_opened(messages[first:], self.opened_text)]
        arguments = accepted_arguments(get_reward, {"messages": messages})
        ask = functools.partial(get_reward, **arguments)
        (outcome,) = await self.call(ask, timeout_s=self.timeout_s)
        episode.score.add_outcome(instance.name, outcome, who=f"{instance.name}.get_reward")


def _owners(tools: Mapping[str, Mapping[str, Tool]]) -> dict[str, str]:
    """The environment that has a tool, by the tool's name."""
    return {tool: f"the environment {name}" for name, own in tools.items() for tool in own}


def _environment_type(factory: Factory, timeout_s: float) -> type:
    """The class that a factory makes; a callable that is not a class is called once to see."""
    if isinstance(factory, type):
        if missing := _required_arguments(factory):
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
    if getattr(probe, "close", None) is not None:
        calls = ConcurrentCalls(timeout_s=timeout_s)
        try:
            ((outcome,),) = calls.run([[probe.close]])
            log_close_error(probe, outcome)
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
            found = f"{type(method).__name__}: {method!r:.80}"
            raise TypeError(f"{cls.__name__}.{name} must be a method, got {found}.")
        is_function = isinstance(inspect.getattr_static(cls, name), types.FunctionType)
        missing = [a for a in _required_arguments(method)[is_function:] if a not in given]
        if missing:
            gets = f"{', '.join(given)} if it names it" if given else "no arguments"
            raise TypeError(
                f"{cls.__name__}.{name} requires {missing}, which nobody gives: it gets {gets}. "
                "Keep what it needs on the environment (reset gets the data row), or give the "
                "arguments defaults."
            )


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    """Return what a call must be given; nothing where that can't be told."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a class that is not written in Python
        return []
    named = (p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
    return [p.name for p in named if p.default is p.empty]

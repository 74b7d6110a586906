"""Tools with a state per episode: environments whose methods are tools, or that have a step."""

import functools
import inspect
import logging
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, get_args

from torchrl_data.checks import POSITIVE, check_numbers, one_of
from torchrl_data.messages import Message
from torchrl_data.stop_reason import StopReason
from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs.concurrency.calls import ConcurrentCalls, accepted_arguments, run_call
from torchrl_envs.concurrency.outcome import Call, Outcome
from torchrl_envs.concurrency.own_random import OwnRandom
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.entries.observations import with_observation
from torchrl_envs.entries.rewards import RewardOf, RewardSource, reward_of_steps
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeStartError, EpisodeTransform, OpenedTurns
from torchrl_envs.episode.tool_source import Job, ToolSource
from torchrl_envs.graders.answers import as_opened
from torchrl_envs.tool_results import MAX_RESULT_BYTES, environment_error
from torchrl_envs.tool_schemas import Tool, environment_tools

if TYPE_CHECKING:
    from torchrl_envs.episode.episode_transform import EpisodeEnvironment


# One user's environment per episode: made, reset, and always closed.

Factory = Callable[[], Any]
_log = logging.getLogger(__name__)


class Instance:
    """The environment of one episode; it appears when its constructor returns."""

    def __init__(self, name: str, factory: Factory) -> None:
        self.name = name
        self._factory = factory
        self._lock = threading.Lock()
        self._abandoned = False
        self.environment: Any = None

    def make(self) -> None:
        """Call the constructor; what comes after :meth:`closing` was asked closes itself."""
        environment = self._factory()
        with self._lock:
            self.environment = environment
            too_late = self._abandoned
        if too_late and hasattr(environment, "close"):
            _log_close_error(environment, run_call(environment.close))

    def reset(self, columns: Mapping[str, Any]) -> Any:
        """Reset it with what it asks for; nothing where it could not be made."""
        if self.environment is None:
            return None
        reset = self.environment.reset
        return reset(**accepted_arguments(reset, columns, drop="seed"))

    async def reset_async(self, columns: Mapping[str, Any]) -> Any:
        """The same for an environment whose ``reset`` is ``async``."""
        waiting = self.reset(columns)
        return None if waiting is None else await waiting

    def closing(self, reason: str) -> Call | None:
        """Nobody needs it any more: how it is closed, if it has been made and can be."""
        del reason
        with self._lock:
            self._abandoned = True
        return getattr(self.environment, "close", None)


async def start_instance(
    owner: Any,  # an EpisodeTransform with timeout_s and start_timeout_s
    episode: Episode,
    instance: Instance,
    cls: type,
    columns: Mapping[str, Any],
) -> Any:
    """Make and reset the environment of an episode, which holds it from then on."""
    closing: Any = {"closing": instance.closing, "timeout_s": owner.timeout_s}
    episode.resources.add(owner, instance, name=cls.__name__, **closing)
    is_async = inspect.iscoroutinefunction(getattr(cls, "reset", None))
    reset = functools.partial(instance.reset_async if is_async else instance.reset, columns)
    outcomes = await owner.call(instance.make, reset, timeout_s=owner.start_timeout_s)
    for outcome, what in zip(outcomes, ("constructor", "reset"), strict=True):
        if outcome.error is not None:
            raise EpisodeStartError(f"{instance.name}: {what}") from outcome.error
    return outcomes[-1].value


def _log_close_error(closed: Any, outcome: Outcome) -> None:
    if outcome.error is not None:
        _log.warning("%s.close failed", type(closed).__name__, exc_info=outcome.error)


# An environment per rollout: its methods are tools, and it owns its state and its reward.


class EnvironmentTools(OpenedTurns, ToolSource, RewardSource):
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
        """Whether the episodes that start from a row have an environment of that name."""
        its = row.get(self.route_column) if self.is_routed else name
        return its == name and self.takes_part_in_row(row)

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
            _log_close_error(probe, outcome)
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
    """What a call must be given; nothing where that can't be told."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a class that is not written in Python
        return []
    named = (p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
    return [p.name for p in named if p.default is p.empty]


# Environments that are stepped with what the policy wrote: Gymnasium's, GEM's, SkyRL Gym's.
#
# None of them is imported: they are known by their methods and by what these return.

Kind = Literal["gymnasium", "skyrl_gym"]


class StepEnvironments(EpisodeTransform, RewardSource):
    """Gives every rollout an environment of its own, stepped with the whole text of each turn.

    Two protocols are known, by their methods:

    - ``reset(seed=, options=) -> (observation, info)`` and ``step(text) -> (observation, reward,
      terminated, truncated, info)``, observations being text: Gymnasium's and GEM's;
    - ``init(messages) -> (messages, metadata)`` and ``step(text) -> {"observations": messages,
      "reward": ..., "done": ...}``: SkyRL Gym's.

    What the reset says is added to the last user message; what a step says is the user's next
    message. A turn that a tool of another part has answered is no step. An environment that raises,
    gives what its protocol does not know, or is late, ends its episode alone, truncated and not
    scorable; ``close()`` is always called.

    Args:
        factory: makes the environment of an episode from its row of the data.
        name: of the reward.
        reward: ``"sum"`` of the steps' rewards, or the ``"last"`` one.
        reset_columns: columns of the data that are ``options`` of ``reset``.
        global_random: the environments draw from Python's global random numbers, as GEM's games do:
            each gets a state of its own, from the group's seed, and they step one after the other.
        timeout_s: deadline of a step, in seconds; also of ``close``.
        start_timeout_s: deadline of making an environment, and of its reset.

    Raises:
        TypeError: the factory can't be called.
        ValueError: a setting is out of range.

    Example:
        >>> class Corridor:
        ...     def reset(self, *, seed=None, options=None):
        ...         self.place = 0
        ...         return "You are at 0.", {}
        ...     def step(self, text):
        ...         self.place += text == "on"
        ...         return f"You are at {self.place}.", 1.0, self.place == 2, False, {}
        >>> data = DataLoadingPrimer([{"prompt": "Go to 2."}])
        >>> corridors = StepEnvironments(lambda row: Corridor())
        >>> env = ChatEnv(batch_size=(2,)).append_transform(data).append_transform(corridors)
        >>> out = env.step(env.reset().set("text_response", ["on", "back"]))["next"]
        >>> [messages[-1]["content"] for messages in out["history"].prompt.to_chats()]
        ['You are at 1.', 'You are at 0.']
    """

    def __init__(
        self,
        factory: Callable[[Mapping[str, Any]], Any],
        *,
        name: str = "environment",
        reward: RewardOf | str = "sum",
        reset_columns: Sequence[str] = (),
        global_random: bool = False,
        timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        super().__init__()
        if not callable(factory):
            takes = "takes a function that makes an environment from a row"
            raise TypeError(f"StepEnvironments {takes}, got {factory!r:.80}.")
        limits = {"timeout_s": timeout_s, "start_timeout_s": start_timeout_s}
        check_numbers("StepEnvironments", POSITIVE, **limits)
        self.factory = factory
        self.name = name
        self.reward: RewardOf = one_of("reward", reward, get_args(RewardOf), who="StepEnvironments")
        self.reset_columns = self.required_columns = tuple(reset_columns)
        self.global_random = global_random
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s

    @property
    def reward_names(self) -> list[str]:
        """The environment's reward."""
        return [self.name]

    async def begin(self, episode: Episode) -> None:
        """Make and reset an environment; what it says is a part of the query.

        Raises:
            EpisodeStartError: it can't be made or reset; that ends this episode alone.
        """
        row = dict(episode.example or {})
        guard = OwnRandom(episode.seed) if self.global_random else nullcontext
        instance = _Stepped(self.name, functools.partial(self.factory, row), guard)
        options = {column: row[column] for column in self.reset_columns}
        columns = {"query": episode.query, "seed": episode.seed, "options": options}
        episode.query = await start_instance(self, episode, instance, _Stepped, columns)

    async def after_turn(self, episode: Episode) -> None:
        """Step with what the policy wrote."""
        instance: _Stepped | None = episode.resources.get(self)
        if instance is None or episode.is_done or not episode.awaits_answer:
            return
        step = functools.partial(instance.step, str(episode.last_message["content"]))
        (outcome,) = await self.call(step, timeout_s=self.timeout_s)
        if outcome.error is not None:
            episode.truncate(environment_error(outcome.error, self.name))
            return
        messages, is_terminated, is_truncated = outcome.value
        episode.say(*messages)
        if is_terminated:
            episode.terminate(StopReason.ENVIRONMENT_DONE)
        elif is_truncated:
            episode.truncate(self.name)

    def finish(self, episode: Episode) -> None:
        """Add up what the steps gave."""
        instance: _Stepped | None = episode.resources.get(self)
        # A first turn that was cut is the policy's doing, and earned nothing.
        rewards = [] if instance is None else instance.rewards or [0.0]
        total = reward_of_steps(rewards, self.reward)
        episode.score.add_outcome(self.name, Outcome(total), who=f"{self.name}.step")


def protocol_of(environment: Any) -> Kind | None:
    """Which protocol an environment follows, by its methods; none where it has no such methods.

    Args:
        environment: any object.
    """
    if not callable(getattr(environment, "step", None)):
        return None
    if callable(getattr(environment, "init", None)):
        return "skyrl_gym"
    return "gymnasium" if callable(getattr(environment, "reset", None)) else None


class _Stepped(Instance):
    """The environment of one episode, its rewards so far, and its own random numbers."""

    def __init__(
        self,
        name: str,
        factory: Callable[[], Any],
        guard: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__(name, factory)
        self._guard = guard
        self.rewards: list[float] = []

    def make(self) -> None:
        """Call the factory."""
        with self._guard():
            super().make()

    def reset(self, columns: Mapping[str, Any]) -> Any:
        """The query of the episode, with what its environment says."""
        if self.environment is None:
            return None  # it could not be made, which is the episode's error
        kind = protocol_of(self.environment)
        if kind is None:
            raise TypeError(
                f"{type(self.environment).__name__} has neither reset() and step() nor init() and "
                "step()"
            )
        query, options = columns["query"], columns["options"]
        with self._guard():
            if kind == "skyrl_gym":
                prompt = [{"role": "user", "content": query}] if isinstance(query, str) else query
                given = self.environment.init(list(prompt or []))
                form = "init() gives (messages, metadata)"
            else:
                more = {"options": dict(options)} if options else {}
                given = self.environment.reset(seed=columns["seed"], **more)
                form = "reset() gives (observation, info)"
        if not (isinstance(given, tuple) and len(given) == 2):
            raise TypeError(f"{form}, got {given!r:.80}")
        if kind == "skyrl_gym":
            return _messages(given[0], "init()")
        return with_observation([] if query is None else query, _text(given[0]))

    def step(self, text: str) -> tuple[list[Message], bool, bool]:
        """Step with a turn: what is said to it, and whether that terminates or truncates."""
        with self._guard():
            given = self.environment.step(text)
        if protocol_of(self.environment) == "skyrl_gym":
            missing = {"observations", "reward", "done"}
            missing -= set(given if isinstance(given, Mapping) else ())
            if missing:
                raise TypeError(f"step() gives a dict with {sorted(missing)}, got {given!r:.80}")
            if given.get("postprocessed_action") not in (None, text):
                raise ValueError(
                    "step() has changed the policy's turn (postprocessed_action), and the tokens "
                    "that were sampled stay as they are: let the engine stop there instead"
                )
            messages = _messages(given["observations"], "step()")
            reward, is_terminated, is_truncated = given["reward"], given["done"], False
        else:
            if not (isinstance(given, tuple) and len(given) == 5):
                is_tuple = isinstance(given, tuple)
                found = f"{len(given)} values" if is_tuple else type(given).__name__
                raise TypeError(
                    "step() gives (observation, reward, terminated, truncated, info), got " + found
                )
            observation, reward, is_terminated, is_truncated, _ = given
            said = _text(observation)
            messages = [{"role": "user", "content": said}] if said else []
        self.rewards.append(float(reward))
        return messages, bool(is_terminated), bool(is_truncated)


def _text(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    raise TypeError(
        f"observations are text here, got {type(observation).__name__}: wrap the environment, as "
        "with gymnasium.wrappers.TransformObservation"
    )


def _messages(given: Any, who: str) -> list[Message]:
    if isinstance(given, Sequence) and all(
        isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in given
    ):
        return [dict(message) for message in given]  # type: ignore[misc]
    raise TypeError(f"{who} gives messages with role and content, got {given!r:.80}")

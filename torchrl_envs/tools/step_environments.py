"""Environments that are stepped with what the policy wrote: Gymnasium's, GEM's, SkyRL Gym's.

None of them is imported: they are known by their methods and by what these return.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal, NamedTuple

from torchrl_data.conversation.record import Message
from torchrl_data.stop_reasons import ENVIRONMENT_DONE, ENVIRONMENT_ERROR
from torchrl_data.validation import check_numbers, one_of
from torchrl_envs.concurrency.calls import Call, Outcome
from torchrl_envs.concurrency.own_random import OwnRandom
from torchrl_envs.entries.observations import with_observation
from torchrl_envs.entries.rewards import RewardSource
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform
from torchrl_envs.tool_calls.results import error_line

from .instances import Instance, start_instance

RewardOf = Literal["sum", "last"]
Kind = Literal["gymnasium", "skyrl_gym"]
REWARDS_OF: Final[tuple[RewardOf, ...]] = ("sum", "last")


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
            raise TypeError(
                f"StepEnvironments takes a function that makes an environment from a row, got "
                f"{factory!r:.80}."
            )
        limits = {"timeout_s": timeout_s, "start_timeout_s": start_timeout_s}
        check_numbers("StepEnvironments", "(0, inf)", **limits)
        self.factory = factory
        self.name = name
        self.reward: RewardOf = one_of("reward", reward, REWARDS_OF, who="StepEnvironments")
        self.reset_columns = tuple(reset_columns)
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
        episode.query = await start_instance(
            self,
            episode,
            instance,
            _Stepped,
            {"query": episode.query, "seed": episode.seed, "options": options},
            start_timeout_s=self.start_timeout_s,
            timeout_s=self.timeout_s,
        )

    async def after_turn(self, episode: Episode) -> None:
        """Step with what the policy wrote."""
        instance: _Stepped | None = episode.resources.get(self)
        if instance is None or episode.is_done or not episode.awaits_answer:
            return
        step = functools.partial(instance.step, str(episode.last_message["content"]))
        (outcome,) = await self.call(step, timeout_s=self.timeout_s)
        if outcome.error is not None:
            reason = f"{ENVIRONMENT_ERROR}: {self.name}: {error_line(outcome.error)}"
            episode.truncate(reason)
            return
        result: StepResult = outcome.value
        episode.say(*result.messages)
        if result.is_terminated:
            episode.terminate(ENVIRONMENT_DONE)
        elif result.is_truncated:
            episode.truncate(ENVIRONMENT_DONE)

    def finish(self, episode: Episode) -> None:
        """Add up what the steps gave."""
        instance: _Stepped | None = episode.resources.get(self)
        rewards = [] if instance is None else instance.rewards
        total = None
        if rewards:
            total = sum(rewards) if self.reward == "sum" else rewards[-1]
        episode.score.add_outcome(self.name, Outcome(total), who=f"{self.name}.step")


class StepResult(NamedTuple):
    """What a step of an environment gave, whatever its protocol."""

    messages: list[Message]
    reward: float
    is_terminated: bool
    is_truncated: bool


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

    def reset(self, cls: type, columns: Mapping[str, Any]) -> Call:
        """A call that gives the query of the episode."""
        del cls
        return functools.partial(self._start, **columns)

    def _start(self, query: Any, seed: int, options: Mapping[str, Any]) -> Any:
        if self.environment is None:
            return None  # it could not be made, which is the episode's error
        kind = protocol_of(self.environment)
        if kind is None:
            raise TypeError(
                f"{type(self.environment).__name__} has neither reset() and step() nor init() and "
                "step()"
            )
        with self._guard():
            if kind == "skyrl_gym":
                return _start_messages(self.environment, query)
            more = {"options": dict(options)} if options else {}
            given = self.environment.reset(seed=seed, **more)
        return with_observation([] if query is None else query, _observation(given))

    def step(self, text: str) -> StepResult:
        """Step with a turn of the policy."""
        with self._guard():
            given = self.environment.step(text)
        kind = protocol_of(self.environment)
        result = _result_of_dict(given, text) if kind == "skyrl_gym" else _result_of_tuple(given)
        self.rewards.append(result.reward)
        return result


def _observation(given: Any) -> str:
    if not (isinstance(given, tuple) and len(given) == 2):
        raise TypeError(f"reset() gives (observation, info), got {given!r:.80}")
    return _text(given[0])


def _text(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    raise TypeError(
        f"observations are text here, got {type(observation).__name__}: wrap the environment, as "
        "with gymnasium.wrappers.TransformObservation"
    )


def _result_of_tuple(given: Any) -> StepResult:
    if not (isinstance(given, tuple) and len(given) == 5):
        raise TypeError(
            "step() gives (observation, reward, terminated, truncated, info), got "
            f"{len(given) if isinstance(given, tuple) else type(given).__name__}"
            f"{' values' if isinstance(given, tuple) else ''}"
        )
    observation, reward, terminated, truncated, _ = given
    text = _text(observation)
    messages: list[Message] = [{"role": "user", "content": text}] if text else []
    return StepResult(messages, float(reward), bool(terminated), bool(truncated))


def _start_messages(environment: Any, query: Any) -> Any:
    prompt = [{"role": "user", "content": query}] if isinstance(query, str) else list(query or [])
    given = environment.init(prompt)
    if not (isinstance(given, tuple) and len(given) == 2):
        raise TypeError(f"init() gives (messages, metadata), got {given!r:.80}")
    return _messages(given[0], "init()")


def _result_of_dict(given: Any, text: str) -> StepResult:
    missing = {"observations", "reward", "done"} - set(given if isinstance(given, Mapping) else ())
    if missing:
        raise TypeError(f"step() gives a dict with {sorted(missing)}, got {given!r:.80}")
    changed = given.get("postprocessed_action")
    if changed not in (None, text):
        raise ValueError(
            "step() has changed the policy's turn (postprocessed_action), and the tokens that were "
            "sampled stay as they are: let the engine stop there instead"
        )
    messages = _messages(given["observations"], "step()")
    return StepResult(messages, float(given["reward"]), bool(given["done"]), False)


def _messages(given: Any, who: str) -> list[Message]:
    if isinstance(given, Sequence) and all(
        isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in given
    ):
        return [dict(message) for message in given]  # type: ignore[misc]
    raise TypeError(f"{who} gives messages with role and content, got {given!r:.80}")

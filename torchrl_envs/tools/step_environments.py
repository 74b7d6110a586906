"""Environments that are stepped with what the policy wrote: Gymnasium's, GEM's, SkyRL Gym's.

None of them is imported: they are known by their methods and by what these return.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

from torchrl_data.checks import POSITIVE, check_numbers, one_of
from torchrl_data.messages import Message
from torchrl_data.stop_reason import StopReason
from torchrl_envs.concurrency.outcome import Outcome
from torchrl_envs.concurrency.own_random import OwnRandom
from torchrl_envs.entries.observations import with_observation
from torchrl_envs.entries.rewards import RewardOf, RewardSource, reward_of_steps
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform
from torchrl_envs.tool_results import environment_error

from .instances import Instance, start_instance

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
        instance = SteppedInstance(self.name, functools.partial(self.factory, row), guard)
        options = {column: row[column] for column in self.reset_columns}
        columns = {"query": episode.query, "seed": episode.seed, "options": options}
        episode.query = await start_instance(self, episode, instance, SteppedInstance, columns)

    async def after_turn(self, episode: Episode) -> None:
        """Step with what the policy wrote."""
        instance: SteppedInstance | None = episode.resources.get(self)
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
        instance: SteppedInstance | None = episode.resources.get(self)
        # A first turn that was cut is the policy's doing, and earned nothing.
        rewards = [] if instance is None else instance.rewards or [0.0]
        total = reward_of_steps(rewards, self.reward)
        episode.score.add_outcome(self.name, Outcome(total), who=f"{self.name}.step")


def protocol_of(environment: Any) -> Kind | None:
    """Protocol that an environment follows, by its methods; none where it has no such methods.

    Args:
        environment: any object.
    """
    if not callable(getattr(environment, "step", None)):
        return None
    if callable(getattr(environment, "init", None)):
        return "skyrl_gym"
    return "gymnasium" if callable(getattr(environment, "reset", None)) else None


class SteppedInstance(Instance):
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

"""Reward functions: plain functions of finished episodes.

Shape legend: B rows, T tokens of a row.
"""

import math
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

from tensordict import TensorDictBase

from torchrl_data.conversation.batched_object import read_objects
from torchrl_data.keys import NUM_TOOL_CALLS
from torchrl_data.validation import one_of
from torchrl_envs.concurrency.calls import ConcurrentCalls
from torchrl_envs.concurrency.cleanup import run_all
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.entries.rewards import SCORED_BY, RewardSource
from torchrl_envs.entries.trajectory_batches import copied_rows, joined_rows
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform
from torchrl_envs.episode.tool_source import ToolSource
from torchrl_envs.tools.environment_tools import EnvironmentTools

from .calls import (
    RewardFunction,
    TrainerState,
    missing_arguments,
    needs_messages,
    read_outcomes,
    reward_inputs,
    scores_one_rollout,
    scoring_calls,
    unique_names,
)
from .finished_rows import check_prompts_are_known, finished_episodes, write_finished

if TYPE_CHECKING:
    from torchrl_envs.episode.episode_transform import EpisodeEnvironment

Level = Literal["trajectory", "turn"]
LEVELS: Final[tuple[Level, ...]] = ("trajectory", "turn")
CompletionFormat = Literal["auto", "text", "messages"]
COMPLETION_FORMATS: Final[tuple[CompletionFormat, ...]] = ("auto", "text", "messages")


class RewardFunctions(EpisodeTransform, RewardSource):
    """Scores finished episodes with functions of TRL's signature.

    A function gets lists, one item per episode that has just finished: ``prompts`` (what came
    before the policy's first turn) and ``completions`` (everything after it), ``prompt_ids`` and
    ``completion_ids`` (their tokens), ``environments`` (``None`` where there is none), and every
    column of the data. As with TRL prompts and completions are strings where the data's prompts
    are, and lists of messages where those are; with tools, which TRL's strings do not have, always
    messages. It returns as many rewards; ``None`` means that it does not apply, an exception in the
    list that this rollout could not be scored. It may be ``async``, and an object with
    ``__call__``. A function marked with :func:`~torchrl_envs.rewards.calls.row_reward` scores one
    rollout at a time.

    In an environment it is one of the sources whose rewards are summed. As a collector's
    ``postproc``, or in a replay buffer (after ``MCAdvantage`` in a ``Compose``, because inverse
    transforms run last to first), it scores the rows that come in.

    Three arguments are no lists: ``trainer_state.global_step``; ``log_metric(name, value)``, whose
    mean over the step's rollouts becomes the metric ``logged/<name>``; and ``log_extra(column,
    values)``, a value per rollout, which goes with its row (``logged_extra``).

    A wrong shape (not one number per rollout) is an error of the program: it is raised the first
    time that the function is used. Later, and for everything else that goes wrong, the rollouts
    concerned become unscorable; :class:`~torchrl_envs.RewardErrorLimit` says how
    many may.

    Args:
        functions: the functions, or one. Those that have a ``close`` are closed with the transform.
        weights: one per function; 1 for each when not given. 0 is for a metric.
        level: ``"trajectory"``: one reward per rollout; ``"turn"``: a list of rewards, one per turn
            of the policy, and the ``reward`` becomes dense, ``[B, T, 1]``, each at the last token
            of its turn.
        nan_applies: whether NaN is an error; ``False`` takes it for ``None``, as TRL does.
        timeout_s: deadline of one call.
        completion_format: ``"text"`` where the prompt is a string, whether or not there are tools
            (all that was said after it, message by message, a line break between them);
            ``"messages"`` always; ``"auto"`` as above.

    Raises:
        ValueError: there is no function, not as many finite weights as functions, or the level or
            the format is unknown.
        TypeError: a function can't be called.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction] | RewardFunction,
        *,
        weights: Sequence[float] | None = None,
        level: Level | str = "trajectory",
        nan_applies: bool = True,
        timeout_s: float = 60.0,
        completion_format: CompletionFormat | str = "auto",
    ) -> None:
        super().__init__()
        listed = list(functions) if isinstance(functions, Sequence) else [functions]
        _check_settings(listed, weights, level, timeout_s)
        self.completion_format = one_of("completion_format", completion_format, COMPLETION_FORMATS)
        self.trainer_state = TrainerState()
        """What functions get under this name; a collector keeps ``global_step`` up to date."""
        self._has_tools = False
        self._own_calls: ConcurrentCalls | None = None
        self._id = uuid.uuid4().hex
        self.functions = dict(zip(unique_names(listed), listed, strict=True))
        self.weights = list(weights) if weights is not None else [1.0] * len(listed)
        self.level = level
        self.nan_applies = nan_applies
        self._used: set[str] = set()
        self.timeout_s = timeout_s

    @property
    def reward_names(self) -> list[str]:
        """Unique name of each function."""
        return list(self.functions)

    @property
    def by_token(self) -> bool:
        """Whether the functions score turns."""
        return self.level == "turn"

    def check(self, env: "EpisodeEnvironment") -> None:
        """Functions get what they require, and have names of their own.

        Raises:
            ValueError: a function requires an argument that is neither a column of the data nor
                one of those that all functions get.
        """
        self._has_tools = any(True for _ in env.transforms_of(ToolSource))
        functions = list(self.functions.values())
        taken: list[str] = []
        for source in _other_sources(env, self):
            taken += source.reward_names
        self.functions = dict(zip(unique_names(functions, taken), functions, strict=True))
        for loader in env.transforms_of(DataLoadingPrimer):
            for name, function in self.functions.items():
                missing = missing_arguments(function, loader.columns)
                if missing:
                    raise ValueError(
                        f"The reward function {name} requires {missing}, which is neither a column "
                        f"of the data, {sorted(loader.columns)}, nor given to every function. "
                        "Rename it, or give it a default."
                    )

    def finish_batch(self, episodes: Sequence[Episode]) -> None:
        """Score episodes, see :meth:`score`."""
        self.score(episodes, self.calls, self.env_transforms(EnvironmentTools))

    def score(
        self,
        episodes: Sequence[Episode],
        calls: ConcurrentCalls,
        environments: Sequence[EnvironmentTools] = (),
    ) -> None:
        """Score finished episodes; a function that fails makes them unscorable.

        Args:
            episodes: get the rewards.
            calls: runs the functions.
            environments: what gives episodes environments.

        Raises:
            ValueError: a function that is used for the first time returned a wrong shape; the
                message says what it returned and what is expected.
        """
        own = [_environment(environments, episode) for episode in episodes]
        inputs = {
            as_text: reward_inputs(episodes, own, as_text=as_text)
            for as_text in {self._reads_text(function) for function in self.functions.values()}
        }
        calls_of = {
            name: scoring_calls(
                function, inputs[self._reads_text(function)], episodes, self.trainer_state
            )
            for name, function in self.functions.items()
        }
        made = [call for each in calls_of.values() for call in each]
        results = iter(calls.run([[call.function] for call in made], self.timeout_s))
        for (name, function), weight in zip(self.functions.items(), self.weights, strict=True):
            result = read_outcomes(
                name,
                [next(results)[0] for _ in calls_of[name]],
                episodes,
                by_turn=self.level == "turn",
                nan_applies=self.nan_applies,
                one_each=scores_one_rollout(function),
            )
            if result.wrong_shape and name not in self._used:
                raise ValueError(f"The reward function {result.wrong_shape}")
            self._used.add(name)
            for episode, reward in zip(episodes, result.rewards, strict=True):
                episode.score.add(name, reward, weight=weight)
        for call in made:
            call.log.write_to(call.episodes)

    # On finished trajectories -------------------------------------------------------------------

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Score finished trajectories; their environments are gone.

        Args:
            tensordict: rows ``[B]`` of a collector; of an episode of several rows all.

        Returns:
            A batch of the same size with ``reward``, ``scorable``, ``rewards`` and
            ``reward_errors`` in the place of what was there; the batch itself if this transform
            has scored it already.

        Raises:
            MissingEntryError: nobody knows whether the prompts were strings.
            ValueError: rows of an episode are missing, or a function that is used for the first
                time returned a wrong shape.
        """
        rows = copied_rows(tensordict)
        if all(read_objects(row, SCORED_BY)[0] == self._id for row in rows):
            return tensordict  # on the way into this replay buffer, say
        who = self._get_name()
        found = finished_episodes(rows, who)
        self._has_tools = rows[0].get(NUM_TOOL_CALLS, None) is not None
        if any(map(self._reads_text, self.functions.values())):
            check_prompts_are_known(found, who)
        if self._own_calls is None:
            self._own_calls = ConcurrentCalls()
        scored = [episode for episode, _ in found if episode.is_scorable]
        if scored:
            self.score(scored, self._own_calls)
        for finished in found:
            write_finished(finished, self.reward_names)
        for row in rows:
            row.set_non_tensor(SCORED_BY, self._id)
        return joined_rows(rows, tensordict.batch_size)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        if tensordict is None or self.in_environment:
            return tensordict
        return self.forward(tensordict)

    def _reads_text(self, function: RewardFunction) -> bool:
        """Whether a function gets strings where prompts are strings."""
        if needs_messages(function):
            return False
        if self.completion_format != "auto":
            return self.completion_format == "text"
        return self.level == "trajectory" and not self._has_tools

    def close(self) -> None:
        """Close the functions that can be, all of them; an error is raised at the end."""
        closes = [getattr(function, "close", None) for function in self.functions.values()]
        own = [] if self._own_calls is None else [self._own_calls.close]
        run_all([*own, *(close for close in closes if close is not None)])


def _check_settings(
    functions: Sequence[RewardFunction],
    weights: Sequence[float] | None,
    level: str,
    timeout_s: float,
) -> None:
    if not functions:
        raise ValueError("RewardFunctions needs at least one function.")
    for function in functions:
        if not callable(function):
            raise TypeError(f"RewardFunctions: {function!r:.80} can't be called.")
    if weights is not None and len(weights) != len(functions):
        raise ValueError(f"RewardFunctions: {len(functions)} functions but {len(weights)} weights.")
    if weights is not None and not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"RewardFunctions: the weights must be finite, got {list(weights)}.")
    if not timeout_s > 0:
        raise ValueError(f"RewardFunctions: timeout_s must be positive, got {timeout_s!r}.")
    if level not in LEVELS:
        raise ValueError(f"RewardFunctions: level must be one of {LEVELS}, got {level!r}.")


def _other_sources(env: "EpisodeEnvironment", own: RewardFunctions) -> list[RewardSource]:
    """Sources whose names come first: earlier functions, and everything that is no function."""
    transforms = list(env.transforms_of(EpisodeTransform))
    before = transforms[: next(i for i, t in enumerate(transforms) if t is own)]
    return [
        source
        for source in transforms
        if isinstance(source, RewardSource)
        and source is not own
        and (source in before or not isinstance(source, RewardFunctions))
    ]


def _environment(sources: Sequence[EnvironmentTools], episode: Episode) -> object:
    found = [source.instance(episode) for source in sources]
    return next((environment for environment in found if environment is not None), None)

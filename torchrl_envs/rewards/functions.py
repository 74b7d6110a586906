"""Rewards by functions.

What they are called with, what they may answer, and what an error costs.
"""

import functools
import inspect
import math
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_data.batch_io import read_conversations
from torchrl_data.batch_objects import read_objects
from torchrl_data.checks import MissingEntryError, one_of
from torchrl_data.keys import (
    EPISODE_ID,
    FULL,
    GROUP_ID,
    NUM_SEGMENTS,
    NUM_TOOL_CALLS,
    REWARD,
    REWARDS,
    ROW,
    SCORABLE,
    SEGMENT,
    STOP_REASON,
)
from torchrl_data.messages import Message
from torchrl_envs.concurrency import Call, ConcurrentCalls, Outcome, accepted_arguments, run_all
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.datasets.rows import PROMPT_COLUMNS
from torchrl_envs.entries import (
    REWARD_ERRORS,
    SCORED_BY,
    RewardSource,
    RowReward,
    copied_rows,
    dense_reward,
    joined_rows,
    number_or_error,
    raised_text,
    turn_ends,
)
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.tool_source import ToolSource
from torchrl_envs.episode.transform import EpisodeTransform
from torchrl_envs.graders.answers import message_text
from torchrl_envs.tools.environments import EnvironmentTools

if TYPE_CHECKING:
    from torchrl_envs.episode.transform import EpisodeEnvironment


# What a reward function is called with and logs, and whether what it gives has the right shape.

RewardFunction = Callable[..., Any]
F = TypeVar("F", bound=RewardFunction)
SINGULAR: Final = {
    "prompts": "prompt",
    "completions": "completion",
    "prompt_ids": "prompt_ids",
    "completion_ids": "completion_ids",
    "environments": "environment",
}
"""What a function of many rollouts may name, beside the columns, and what one of one calls it."""
LISTS: Final = tuple(SINGULAR)
OF_TRAINING: Final[tuple[str, ...]] = ("trainer_state", "log_metric", "log_extra")
"""What a function of either kind may name that is no list."""
LOGGED_METRICS: Final = "logged_metrics"
"""Numbers that reward functions logged, a dictionary per row."""
LOGGED_EXTRA: Final = "logged_extra"
"""Further values of each rollout that reward functions logged, a dictionary per row."""


@dataclass
class TrainerState:
    """How far the training is: what a reward function gets as ``trainer_state``."""

    global_step: int = 0
    """Updates of the policy's weights since the first batch; a collector counts them."""
    max_steps: int = 0
    """Of the whole training; 0 where nobody has set it."""


class RewardLog:
    """What one call of a reward function logs, of the rollouts that it scores.

    Args:
        num_rollouts: how many.
    """

    def __init__(self, num_rollouts: int) -> None:
        self.num_rollouts = num_rollouts
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._extra: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Log a number; a step's metric is the mean over the rollouts of the calls that log it.

        Args:
            name: of the metric.
            value: a number; of several in one call the mean counts.

        Raises:
            TypeError: it is none.
        """
        number = float(value)
        self._metrics[str(name)].append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a value of each rollout, to be shown beside it.

        Args:
            column: its name.
            values: one per rollout, in order.

        Raises:
            ValueError: there are more or fewer.
        """
        given = list(values)
        if len(given) != self.num_rollouts:
            raise ValueError(
                f"log_extra({column!r}) takes one value per rollout: expected "
                f"{self.num_rollouts}, got {len(given)}."
            )
        self._extra[str(column)] = given

    def log_value(self, column: str, value: Any) -> None:
        """:meth:`log_extra` of a function of one rollout."""
        self.log_extra(column, [value])

    def write_to(self, episodes: Sequence[Episode]) -> None:
        """Give the rollouts what was logged of them.

        Args:
            episodes: the rollouts.
        """
        # A function that missed its deadline may still be logging.
        means = {name: fmean(values) for name, values in list(self._metrics.items())}
        extra = dict(self._extra)
        if not (means or extra):
            return
        for i, episode in enumerate(episodes):
            own = {column: values[i] for column, values in extra.items()}
            for key, values in ((LOGGED_METRICS, means), (LOGGED_EXTRA, own)):
                if values:
                    episode.metrics[key] = {**episode.metrics.get(key, {}), **values}


def row_reward(function: F) -> F:
    """Mark a reward function that scores one rollout at a time.

    It gets ``prompt``, ``completion``, ``prompt_ids``, ``completion_ids``, ``environment`` and the
    columns of its own rollout, ``trainer_state``, ``log_metric(name, value)`` and
    ``log_extra(column, value)``, and returns one reward. The rollouts are scored concurrently, each
    with a deadline of its own, so that one that hangs or raises spoils no other::

        @row_reward
        async def judged(completion, answer):
            return await ask_a_judge(completion[-1]["content"], answer)
    """
    function.scores_one_rollout = True  # type: ignore[attr-defined]
    return function


def scores_one_rollout(function: RewardFunction) -> bool:
    """Whether a function was marked by :func:`row_reward`."""
    return getattr(function, "scores_one_rollout", False)


def unique_names(functions: Sequence[RewardFunction], taken: Sequence[str] = ()) -> list[str]:
    """A name for each function; one that is taken gets a number."""
    names: list[str] = []
    for function in functions:
        base = getattr(function, "__name__", type(function).__name__)
        name, count = base, 1
        while name in names or name in taken:
            count += 1
            name = f"{base}_{count}"
        names.append(name)
    return names


def missing_arguments(function: RewardFunction, columns: Sequence[str]) -> list[str]:
    """Arguments that a function requires and nobody gives."""
    required = [c for c in getattr(function, "required_columns", ()) if c not in columns]
    lists = SINGULAR.values() if scores_one_rollout(function) else LISTS
    available = {*columns, *lists, *OF_TRAINING}
    return required + [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and parameter.name not in available
    ]


def needs_messages(function: RewardFunction) -> bool:
    """Whether a function reads messages, whatever the data are."""
    return getattr(function, "needs_messages", False)


def reward_inputs(
    episodes: Sequence[Episode], environments: Sequence[Any], *, as_text: bool
) -> dict[str, list[Any]]:
    """Everything that a function of many rollouts may get, one item per rollout."""
    # A rollout whose prompt is a string is shown as strings, if `as_text`.
    shown = [_shown(episode, as_text) for episode in episodes]
    values = (
        [prompt for prompt, _ in shown],
        [completion for _, completion in shown],
        [episode.prompt_ids for episode in episodes],
        [episode.completion_ids for episode in episodes],
        list(environments),
    )
    inputs: dict[str, list[Any]] = dict(zip(LISTS, values, strict=True))
    own = [episode.example or {} for episode in episodes]
    for column in dict.fromkeys(name for row in own for name in row):
        inputs.setdefault(column, [row.get(column) for row in own])
    return inputs


def _shown(episode: Episode, as_text: bool) -> tuple[Any, Any]:
    """Prompt and completion of a rollout: strings or messages."""
    if as_text and isinstance(episode.query, str):
        said = [_text(message) for message in episode.completion_messages]
        return episode.query, "\n".join(said)
    return episode.prompt_messages, episode.completion_messages


def _text(message: Message) -> str:
    thought, said = message.get("reasoning_content"), message_text(message)
    return f"<think>\n{thought}\n</think>\n\n{said}" if thought else said


class ScoringCall(NamedTuple):
    """One call of a reward function."""

    function: Call
    episodes: Sequence[Episode]
    """The rollouts that it scores."""
    log: RewardLog


def scoring_calls(
    function: RewardFunction,
    inputs: Mapping[str, list[Any]],
    episodes: Sequence[Episode],
    trainer_state: TrainerState,
) -> list[ScoringCall]:
    """Calls to be made: one for all rollouts, or one each for a function of one rollout."""
    if not scores_one_rollout(function):
        log = RewardLog(len(episodes))
        given = dict(inputs) | _of_training(trainer_state, log.log_metric, log.log_extra)
        call = functools.partial(function, **accepted_arguments(function, given))
        return [ScoringCall(call, episodes, log)]
    calls: list[ScoringCall] = []
    for i, episode in enumerate(episodes):
        log = RewardLog(1)
        own = {name: values[i] for name, values in inputs.items() if name not in SINGULAR}
        own |= {single: inputs[many][i] for many, single in SINGULAR.items()}
        own |= _of_training(trainer_state, log.log_metric, log.log_value)
        call = functools.partial(function, **accepted_arguments(function, own))
        calls.append(ScoringCall(call, [episode], log))
    return calls


def _of_training(*values: Any) -> dict[str, Any]:
    return dict(zip(OF_TRAINING, values, strict=True))


class FunctionRewards(NamedTuple):
    """What one function gave all rollouts."""

    rewards: list[RowReward]
    wrong_shape: str = ""
    """What is wrong with the shape of what it returned, for the first rollout for which it is."""


def read_outcomes(
    name: str,
    outcomes: Sequence[Outcome],
    episodes: Sequence[Episode],
    *,
    by_turn: bool,
    nan_applies: bool,
    one_each: bool,
) -> FunctionRewards:
    """Check what a function returned."""
    if not one_each:
        (outcome,) = outcomes
        outcomes = [outcome] * len(episodes)
        if outcome.error is None:
            items = _items(outcome.value)
            if items is None or len(items) != len(episodes):
                wrong = (
                    f"{name} must return one reward per completion: expected a list of "
                    f"{len(episodes)}, got {outcome.value!r:.80}."
                )
                return FunctionRewards([RowReward(error=wrong)] * len(episodes), wrong)
            outcomes = [_outcome(item) for item in items]
    rewards, wrong_shape = [], ""
    for episode, outcome in zip(episodes, outcomes, strict=True):
        if outcome.error is not None:
            rewards.append(RowReward(error=raised_text(outcome.error, name)))
            continue
        if by_turn:
            reward, wrong = _turn_reward(name, outcome.value, episode, nan_applies)
        else:
            reward = RowReward(*number_or_error(outcome.value, name, nan_applies))
            wrong = reward.error if "not a number" in reward.error else ""
        rewards.append(reward)
        wrong_shape = wrong_shape or wrong
    return FunctionRewards(rewards, wrong_shape)


def _items(value: Any) -> list[Any] | None:
    if isinstance(value, str | bytes | Mapping):
        return None
    try:
        return list(value)
    except TypeError:
        return None


def _outcome(item: Any) -> Outcome:
    """A function may give an exception in place of a reward: that rollout alone failed."""
    return Outcome(error=item) if isinstance(item, BaseException) else Outcome(item)


def _turn_reward(
    name: str, value: Any, episode: Episode, nan_applies: bool
) -> tuple[RowReward, str]:
    """One reward per turn becomes one per token, at the ends of the turns."""
    if value is None:
        return RowReward(), ""
    mask = episode.assistant_mask
    ends = turn_ends(mask)
    items = _items(value)
    if items is None or len(items) != len(ends):
        wrong = (
            f"{name} must return one reward per turn of each completion: expected a list of "
            f"{len(ends)}, got {value!r:.80}."
        )
        return RowReward(error=wrong), wrong
    by_token = torch.zeros(len(mask))
    for end, item in zip(ends.tolist(), items, strict=True):
        number, error = number_or_error(item, name, nan_applies)
        if error:
            return RowReward(error=error), error if "not a number" in error else ""
        by_token[end] = 0.0 if number is None else number
    return RowReward(by_token), ""


# Finished trajectories as episodes that can be scored, and their scores as entries of the rows.
#
# Shape legend: T tokens of a row.


class FinishedEpisode(NamedTuple):
    """An episode, and the rows that are its own, in order."""

    episode: Episode
    rows: list[TensorDictBase]


def finished_episodes(rows: Sequence[TensorDictBase], who: str) -> list[FinishedEpisode]:
    """The episodes that rows are of: one for each, or for all rows of an episode together."""
    by_id: dict[Any, list[TensorDictBase]] = {}
    for number, row in enumerate(rows):
        is_part = int(row.get(NUM_SEGMENTS, 1)) > 1
        by_id.setdefault(int(row[EPISODE_ID]) if is_part else f"row {number}", []).append(row)
    found = []
    for parts in by_id.values():
        parts.sort(key=lambda row: int(row.get(SEGMENT, 0)))
        wanted = int(parts[0].get(NUM_SEGMENTS, 1))
        if len(parts) != wanted:
            raise ValueError(
                f"{who}: episode {int(parts[0][EPISODE_ID])} has {wanted} rows, of which "
                f"{len(parts)} came in. Give all rows of an episode at once."
            )
        found.append(FinishedEpisode(_episode(parts, who), parts))
    return found


def _episode(rows: Sequence[TensorDictBase], who: str) -> Episode:
    episode = Episode()
    conversations = [read_conversations(row, FULL, who=who) for row in rows]
    *earlier, episode.conversation = conversations
    episode.segments = tuple(earlier)
    episode.example = read_objects(rows[0], ROW)[0]
    episode.stop_reason = read_objects(rows[0], STOP_REASON, "")[0]
    episode.num_turns = int(rows[0].get("num_turns", 1))
    if rows[0].get(GROUP_ID, None) is not None:
        episode.group_id = int(rows[0][GROUP_ID])
    columns = [name for name in PROMPT_COLUMNS if name in (episode.example or {})]
    episode.query = (episode.example or {})[columns[0]] if columns else None
    return episode


def check_prompts_are_known(episodes: Sequence[FinishedEpisode], who: str) -> None:
    """Raise where nobody can tell whether a prompt was a string."""
    for episode, _ in episodes:
        if episode.query is None:
            raise MissingEntryError(
                f"{who}: a row does not say whether its prompt was a string or messages: its data "
                f"have none of the columns {list(PROMPT_COLUMNS)}. Say what the functions read: "
                "completion_format='text' or 'messages'."
            )


def write_finished(found: FinishedEpisode, names: Sequence[str]) -> None:
    """Write what an episode was given into its rows, in the place of what is there."""
    episode, rows = found
    score, start = episode.score, 0
    own = {name: torch.tensor([[score.by_source.get(name, torch.nan)]]) for name in names}
    for row, part in zip(rows, episode.rows, strict=True):
        reward = torch.tensor([[score.total]])
        if score.by_token is not None:
            end = start + part.num_tokens(0)
            is_last = part is episode.rows[-1]
            total = torch.tensor(score.total if is_last else 0.0)
            by_token = score.by_token[start:end]
            reward, start = dense_reward(total, by_token, part.assistant_mask(0)), end
        row.set(REWARD, reward)
        row.set(SCORABLE, torch.tensor([score.is_scorable]))
        row.set(REWARDS, TensorDict({name: value.clone() for name, value in own.items()}))
        row.set_non_tensor(REWARD_ERRORS, score.error)
        for key in (LOGGED_METRICS, LOGGED_EXTRA):
            if key in episode.metrics:
                row.set_non_tensor(key, episode.metrics[key])


# Reward functions: plain functions of finished episodes.
#
# Shape legend: B rows, T tokens of a row.

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
    ``__call__``. A function marked with :func:`row_reward` scores one
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

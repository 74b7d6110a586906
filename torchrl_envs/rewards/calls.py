"""What a reward function is called with and logs, and whether what it gives has the right shape."""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final, NamedTuple, TypeVar

import torch

from torchrl_data.conversation.record import Message
from torchrl_envs.concurrency.calls import Call, Outcome, accepted_arguments
from torchrl_envs.entries.rewards import RowReward, number_or_error, raised_text, turn_ends
from torchrl_envs.episode.episode import Episode
from torchrl_envs.graders.answers import message_text

RewardFunction = Callable[..., Any]
F = TypeVar("F", bound=RewardFunction)
LISTS: Final[tuple[str, ...]] = (
    "prompts",
    "completions",
    "prompt_ids",
    "completion_ids",
    "environments",
)
"""What a function of many rollouts may name, beside the columns of the data."""
SINGULAR: Final = {
    "prompts": "prompt",
    "completions": "completion",
    "prompt_ids": "prompt_ids",
    "completion_ids": "completion_ids",
    "environments": "environment",
}
"""What a function of one rollout calls them."""
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

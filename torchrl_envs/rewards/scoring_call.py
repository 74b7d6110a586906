"""Call of a reward function: its arguments, its log, and the shape that its answer must have."""

import functools
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final, NamedTuple, TypeVar

from torchrl_data import page
from torchrl_data.messages import Message
from torchrl_envs.concurrency.calls import (
    accepted_arguments,
)
from torchrl_envs.concurrency.outcome import Call
from torchrl_envs.episode.episode import LOGGED_EXTRA, Episode
from torchrl_envs.graders.answers import as_opened, text_of_message


class BadRewardError(ValueError):
    """A reward function gave what can't be rewards, the first time that it was used."""


_log = logging.getLogger(__name__)
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
_OF_SPECS: Final = ("shape", "device", "dtype", "space")
"""Names that TorchRL's specs have taken."""
WANTED: Final = (
    "A reward is a number for each rollout, or None where the function does not apply to it; "
    f"row_reward marks a function of one rollout. See {page('docs/rewards.md')}."
)
OF_TRAINING: Final[tuple[str, ...]] = ("trainer_state", "log_metric", "log_extra")
"""What a function of either kind may name that is no list."""
LOGGED_METRICS: Final = "logged_metrics"
"""Numbers that reward functions logged, a dictionary per row."""


@dataclass
class TrainerState:
    """The progress of the training, which a reward function gets as ``trainer_state``."""

    global_step: int = 0
    """Updates of the policy's weights since the first batch; a collector counts them."""
    max_steps: int = 0
    """Of the whole training; 0 where nobody has set it."""


@dataclass(eq=False)
class RewardLog:
    """The log of one call of a reward function, about the rollouts that it scores."""

    episodes: Sequence[Episode]
    _metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _extra: dict[str, list[Any]] = field(default_factory=dict)

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
        if len(given) != len(self.episodes):
            raise ValueError(
                f"log_extra({column!r}) takes one value per rollout: expected "
                f"{len(self.episodes)}, got {len(given)}."
            )
        self._extra[str(column)] = given

    def log_value(self, column: str, value: Any) -> None:
        """:meth:`log_extra` of a function of one rollout."""
        self.log_extra(column, [value])

    def write(self) -> None:
        """Give the rollouts what was logged of them."""
        # A function that missed its deadline may still be logging.
        means = {name: fmean(values) for name, values in list(self._metrics.items())}
        extra = dict(self._extra)
        if not (means or extra):
            return
        for i, episode in enumerate(self.episodes):
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

    Example:
        >>> @row_reward
        ... def correct(completion, answer):
        ...     return float(answer in completion)
        >>> data = DataLoadingPrimer([{"prompt": "2 + 2?", "answer": "4"}])
        >>> env = ChatEnv(batch_size=(2,)).append_transform(data)
        >>> env = env.append_transform(RewardFunctions([correct]))
        >>> out = env.step(env.reset().set("text_response", ["It is 4.", "It is 5."]))["next"]
        >>> out["reward"].shape, out["reward"].flatten()
        (torch.Size([2, 1, 1]), tensor([1., 0.]))
    """
    function.scores_one_rollout = True  # type: ignore[attr-defined]
    return function


def scores_one_rollout(function: RewardFunction) -> bool:
    """Return whether a function was marked by :func:`row_reward`."""
    return getattr(function, "scores_one_rollout", False)


def unique_names(functions: Sequence[RewardFunction], taken: Sequence[str] = ()) -> list[str]:
    """A name for each function; one that is taken gets a number, as ``shape`` always is."""
    names: list[str] = []
    for function in functions:
        base = getattr(function, "__name__", type(function).__name__)
        name, count = base, 1
        while name in {*names, *taken, *_OF_SPECS}:
            count += 1
            name = f"{base}_{count}"
        names.append(name)
    return names


def given_names(function: RewardFunction) -> set[str]:
    """Return what a function may name, beside the columns of the data."""
    lists = SINGULAR.values() if scores_one_rollout(function) else LISTS
    return {*lists, *OF_TRAINING}


def needed_columns(function: RewardFunction) -> list[str]:
    """Columns of the data without which a function can't be called."""
    given = given_names(function)
    named = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and parameter.name not in given
    ]
    return list(dict.fromkeys([*getattr(function, "required_columns", ()), *named]))


def shadowed_columns(function: RewardFunction, columns: Collection[str]) -> tuple[set[str], bool]:
    """Columns of the data whose names a function gets something else under, and if it names them.

    Args:
        function: of whatever kind.
        columns: of the data, but for that of the prompts.
    """
    parameters = inspect.signature(function).parameters
    shadowed = given_names(function) & {*columns}
    if named := shadowed & {*parameters}:
        return named, True
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return shadowed if takes_any else set(), False


def reward_inputs(
    episodes: Sequence[Episode],
    environments: Sequence[Any],
    opened: str = "",
    *,
    as_text: bool,
    columns: Collection[str] = (),
) -> dict[str, list[Any]]:
    """Everything that a function of many rollouts may get, one item per rollout."""
    # A rollout whose prompt is a string is shown as strings, if `as_text`. What the prompts opened
    # of the policy's turns begins them. The columns are those of the data; None stands where a row
    # lacks one.
    inputs: dict[str, list[Any]] = {name: [] for name in SINGULAR}
    for episode in episodes:
        completion = as_opened(episode.completion_messages, opened)
        is_text = as_text and isinstance(episode.query, str)
        inputs["prompts"].append(episode.query if is_text else episode.prompt_messages)
        inputs["completions"].append("\n".join(map(_text, completion)) if is_text else completion)
        inputs["prompt_ids"].append(episode.prompt_ids)
        inputs["completion_ids"].append(episode.completion_ids)
    inputs["environments"] += environments
    own = [episode.example or {} for episode in episodes]
    for column in dict.fromkeys([*columns, *(name for row in own for name in row)]):
        inputs.setdefault(column, [row.get(column) for row in own])
    return inputs


def _text(message: Message) -> str:
    """Return what a message says, with what was thought before it as the model wrote it."""
    thought, said = message.get("reasoning_content"), text_of_message(message)
    return f"<think>\n{thought}\n</think>\n\n{said}" if thought else said


def by_group(episodes: Sequence[Episode], places: Sequence[int]) -> list[list[int]]:
    """The places of some episodes, those of each group together."""
    groups: dict[int, list[int]] = {}
    for place in places:
        groups.setdefault(episodes[place].group_id, []).append(place)
    return [*groups.values()]


class ScoringCall(NamedTuple):
    """A call of a function, which scores some of the episodes that are scored together."""

    places: Sequence[int]
    """Of these, among all."""
    call: Call
    log: RewardLog
    """What the function logs of them."""


def scoring_call(
    function: RewardFunction,
    inputs: Mapping[str, list[Any]],
    episodes: Sequence[Episode],
    places: Sequence[int],
    trainer_state: TrainerState,
) -> ScoringCall:
    """A call of a function of many rollouts for some, or of a function of one for one of them."""
    log = RewardLog([episodes[place] for place in places])
    if scores_one_rollout(function):
        (place,) = places
        given: dict[str, Any] = dict(episodes[place].example or {})
        given |= {single: inputs[many][place] for many, single in SINGULAR.items()}
        log_extra: Callable[..., None] = log.log_value
    else:
        given = {name: [values[place] for place in places] for name, values in inputs.items()}
        log_extra = log.log_extra
    given |= dict(zip(OF_TRAINING, (trainer_state, log.log_metric, log_extra), strict=True))
    call = functools.partial(function, **accepted_arguments(function, given))
    return ScoringCall(places, call, log)

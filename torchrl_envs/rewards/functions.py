"""Rewards by functions.

What they are called with, what they may answer, and what an error costs.
"""

import contextlib
import functools
import inspect
import logging
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar, get_args

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_data import keys, page
from torchrl_data.batched_object import read_objects
from torchrl_data.checks import POSITIVE, check_numbers, one_of
from torchrl_data.conversation_io import read_conversations
from torchrl_data.messages import Message
from torchrl_data.missing_entry import MissingEntryError
from torchrl_envs import entries
from torchrl_envs.concurrency import (
    Call,
    CallTimeoutError,
    ConcurrentCalls,
    Outcome,
    accepted_arguments,
    run_all,
)
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.datasets.rows import PROMPT_COLUMNS
from torchrl_envs.entries import RewardSource
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.transform import (
    EpisodeTransform,
    OpenedTurns,
    ToolSource,
    TrajectoryTransform,
)
from torchrl_envs.graders.answers import as_opened, message_text
from torchrl_envs.tools.environments import EnvironmentTools

if TYPE_CHECKING:
    from torchrl_envs.episode.transform import EpisodeEnvironment


# What a reward function is called with and logs, and whether what it gives has the right shape.


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
_WANTED: Final = (
    "A reward is a number for each rollout, or None where the function does not apply to it; "
    f"row_reward marks a function of one rollout. See {page('docs/rewards.md')}."
)
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


@dataclass(eq=False)
class RewardLog:
    """What one call of a reward function logs, of the rollouts that it scores."""

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
    """Whether a function was marked by :func:`row_reward`."""
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
    """What a function may name, beside the columns of the data."""
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
    """What a message says, with what was thought before it as the model wrote it."""
    thought, said = message.get("reasoning_content"), message_text(message)
    return f"<think>\n{thought}\n</think>\n\n{said}" if thought else said


def _by_group(episodes: Sequence[Episode], places: Sequence[int]) -> list[list[int]]:
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


# Finished trajectories as episodes that can be scored, and their scores as entries of the rows.
#
# Shape legend: T tokens of a row.


def finished_episodes(
    rows: Sequence[TensorDictBase], who: str
) -> list[tuple[Episode, list[TensorDictBase]]]:
    """The episodes that rows are of, one for all rows of each, and these rows in order."""
    by_id: dict[Any, list[TensorDictBase]] = {}
    for number, row in enumerate(rows):
        is_part = int(row.get(keys.NUM_SEGMENTS, 1)) > 1
        by_id.setdefault(int(row[keys.EPISODE_ID]) if is_part else f"row {number}", []).append(row)
    found = []
    for parts in by_id.values():
        parts.sort(key=lambda row: int(row.get(keys.SEGMENT, 0)))
        wanted = int(parts[0].get(keys.NUM_SEGMENTS, 1))
        if len(parts) != wanted:
            raise ValueError(
                f"{who}: episode {int(parts[0][keys.EPISODE_ID])} has {wanted} rows, of which "
                f"{len(parts)} came in. Give all rows of an episode at once."
            )
        first, episode = parts[0], Episode()
        conversations = [read_conversations(row, keys.FULL, who=who) for row in parts]
        *earlier, episode.conversation = conversations
        episode.segments = tuple(earlier)
        episode.example = read_objects(first, keys.ROW)[0]
        episode.stop_reason = read_objects(first, keys.STOP_REASON, "")[0]
        episode.num_turns = int(first.get("num_turns", 1))
        if first.get(keys.GROUP_ID, None) is not None:
            episode.group_id = int(first[keys.GROUP_ID])
        columns = [name for name in PROMPT_COLUMNS if name in (episode.example or {})]
        episode.query = (episode.example or {})[columns[0]] if columns else None
        found.append((episode, parts))
    return found


def write_finished(episode: Episode, rows: Sequence[TensorDictBase], names: Sequence[str]) -> None:
    """Write what an episode was given into its rows, in the place of what is there."""
    score, start = episode.score, 0
    own = {name: torch.tensor([[score.by_source.get(name, torch.nan)]]) for name in names}
    for row, part in zip(rows, episode.rows, strict=True):
        reward = torch.tensor([[score.reward]])
        if score.by_token is not None:
            end = start + part.num_tokens(0)
            total = torch.tensor(score.reward if part is episode.rows[-1] else 0.0)
            by_token = score.by_token[start:end]
            reward, start = entries.dense_reward(total, by_token, part.assistant_mask(0)), end
        row.set(keys.REWARD, reward)
        row.set(keys.SCORABLE, torch.tensor([score.is_scorable]))
        row.set(keys.REWARDS, TensorDict({name: value.clone() for name, value in own.items()}))
        row.set_non_tensor(entries.REWARD_ERRORS, score.error)
        for key in (LOGGED_METRICS, LOGGED_EXTRA):
            if key in episode.metrics:
                row.set_non_tensor(key, episode.metrics[key])


# Reward functions: plain functions of finished episodes.
#
# Shape legend: B rows, T tokens of a row.

Level = Literal["trajectory", "turn"]
CompletionFormat = Literal["auto", "text", "messages"]


class RewardFunctions(OpenedTurns, EpisodeTransform, RewardSource):
    """Scores finished episodes with functions of TRL's signature.

    A function gets lists, one item per episode that has just finished: ``prompts`` (what came
    before the policy's first turn) and ``completions`` (everything after it), ``prompt_ids`` and
    ``completion_ids`` (their tokens), ``environments`` (``None`` where there is none), and every
    column of the data. As with TRL prompts and completions are strings where the data's prompts
    are, and lists of messages where those are; with tools, which TRL's strings do not have, always
    messages. Where the chat template opens ``<think>`` in the prompt, the turns begin with it all
    the same. It returns as many rewards; ``None`` means that it does not apply, an exception in the
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
    time that the function is used. Later, with a warning, and for everything else that goes wrong,
    the rollouts concerned become unscorable, their reward NaN;
    :class:`~torchrl_envs.RewardErrorLimit` says how many may. A function that raises when it gets
    several groups is asked again for each group by itself, so that a row which it can't score costs
    its own group.

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

    Example:
        >>> from torchrl.envs.transforms import Compose
        >>> def correct(completions, answer, **columns):
        ...     pairs = zip(completions, answer, strict=True)
        ...     return [float(right in said) for said, right in pairs]
        >>> data = DataLoadingPrimer([{"prompt": "2 + 2?", "answer": "4"}])
        >>> parts = Compose(data, RewardFunctions([correct]), StepCounter(max_steps=1))
        >>> env = ChatEnv(batch_size=(2,)).append_transform(parts)
        >>> batch = env.reset().set("text_response", ["It is 4.", "It is 5."])
        >>> reward = env.step(batch)["next", "reward"]
        >>> reward.shape, reward.flatten()
        (torch.Size([2, 1, 1]), tensor([1., 0.]))
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
        if not listed:
            raise ValueError("RewardFunctions needs at least one function.")
        for function in listed:
            if not callable(function):
                raise TypeError(f"RewardFunctions: {function!r:.80} can't be called.")
        self._functions = dict(zip(unique_names(listed), listed, strict=True))
        self.weights: Sequence[float] = self._checked_change("weights", weights)
        self.timeout_s: float = self._checked_change("timeout_s", timeout_s)
        formats: Sequence[CompletionFormat] = get_args(CompletionFormat)
        self.completion_format = one_of("completion_format", completion_format, formats)
        self.trainer_state = TrainerState()
        """What functions get under this name; a collector keeps ``global_step`` up to date."""
        self._has_tools = False
        self._columns: Sequence[str] = ()
        self._route_column = ""
        self._own_calls: ConcurrentCalls | None = None
        self._id = uuid.uuid4().hex
        self.level = one_of("level", level, get_args(Level), who="RewardFunctions")
        self.nan_applies = nan_applies
        self._used: set[str] = set()
        self._warned: set[str] = set()
        self._watch = entries.UnscoredWatch()

    changeable = frozenset({"weights", "nan_applies", "timeout_s"})

    def _checked_change(self, name: str, value: Any) -> Any:
        if name == "timeout_s":
            check_numbers("RewardFunctions", POSITIVE, timeout_s=value)
        if name != "weights":
            return value
        count = len(self.functions)
        weights = [1.0] * count if value is None else list(value)
        if len(weights) != count:
            found = f"{count} functions but {len(weights)} weights"
            raise ValueError(f"RewardFunctions: {found}.")
        check_numbers("RewardFunctions", **{f"weights[{i}]": w for i, w in enumerate(weights)})
        return weights

    @property
    def functions(self) -> Mapping[str, RewardFunction]:
        """The functions by their unique names."""
        return self._functions

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
        self.note_environment(env)
        routed = [
            each.route_column for each in env.transforms_of(EnvironmentTools) if each.is_routed
        ]
        # A column that says which task a row is of, and no value of it.
        self._route_column = "environment" if self.only_for or routed else ""
        functions = list(self.functions.values())
        # Earlier functions, and everything that is no function, have their names first.
        parts = list(env.transforms_of(EpisodeTransform))
        before = parts[: next(i for i, part in enumerate(parts) if part is self)]
        taken = [
            name
            for part in parts
            if isinstance(part, RewardSource) and part is not self
            if part in before or not isinstance(part, RewardFunctions)
            for name in part.reward_names
        ]
        self._functions = dict(zip(unique_names(functions, taken), functions, strict=True))
        for loader in env.transforms_of(DataLoadingPrimer):
            self._columns = [*dict.fromkeys([*self._columns, *loader.columns])]
            for name, function in self.functions.items():
                self._check_columns(name, function, loader)

    def check_policy(self, policy: Any) -> None:
        """Note what the policy's prompts open of its turns."""
        self.note_encoder(getattr(policy, "encoder", None))

    def _check_columns(
        self, name: str, function: RewardFunction, loader: DataLoadingPrimer
    ) -> None:
        """A function finds in the data the columns that it names."""
        needed = needed_columns(function)
        if missing := [column for column in needed if column not in loader.columns]:
            of_one = set(missing) & {*SINGULAR.values()}
            mark = " Mark a function of one rollout with @row_reward." if of_one else ""
            raise ValueError(
                f"The reward function {name} requires {missing}, which is neither a column "
                f"of the data, {sorted(loader.columns)}, nor given to every function. "
                f"Rename it, or give it a default.{mark}"
            )
        do = " Or give the parameter a default."
        who = f"the reward function {name}"
        loader.require_columns(who, needed, do, of=self.takes_part_in_row)
        columns = {*loader.columns} - {loader.prompt_column, self._route_column}
        shadowed, is_named = shadowed_columns(function, columns)
        if is_named:
            raise ValueError(
                f"The data have the columns {sorted(shadowed)}, and {who} gets something else "
                "under these names: what every reward function is given. Rename the columns (in "
                "the file, or with map_row=)."
            )
        if shadowed:
            _log.warning(
                "The data have the columns %s, and %s gets something else under these names: what "
                "every reward function is given. Rename the columns to pass them. See %s.",
                *(sorted(shadowed), who, page("docs/rewards.md")),
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
            BadRewardError: a function that is used for the first time returned a wrong shape; the
                message says what it returned and what is expected.
        """
        found = [[source.instance(episode) for source in environments] for episode in episodes]
        own = [next((each for each in its if each is not None), None) for its in found]
        inputs = {
            as_text: reward_inputs(
                episodes, own, self.opened_text, as_text=as_text, columns=self._columns
            )
            for as_text in {self._reads_text(function) for function in self.functions.values()}
        }

        def call_of(name: str, places: Sequence[int]) -> ScoringCall:
            function = self.functions[name]
            its = inputs[self._reads_text(function)]
            return scoring_call(function, its, episodes, places, self.trainer_state)

        rewards = {name: self._lacking(name, episodes) for name in self.functions}
        made = [
            (name, call_of(name, places))
            for name, lacking in rewards.items()
            for places in self._parts(name, [i for i in range(len(episodes)) if i not in lacking])
        ]
        outcomes = self._run(made, calls)
        # A function of many rollouts that raised is asked again for each group by itself, so that a
        # row that it can't score costs its own group.
        again: list[tuple[str, ScoringCall]] = []
        for number, (name, made_call) in enumerate(made):
            groups = _by_group(episodes, made_call.places)
            error = outcomes[number].error
            if len(groups) > 1 and error and not isinstance(error, CallTimeoutError):
                again += [(name, call_of(name, places)) for places in groups]
        repeated = {name for name, _ in again}
        for name in repeated - self._warned:
            self._warned.add(name)
            _log.warning(
                "The reward function %s raised, and is asked again for each group by itself; what "
                "it raises then costs that group.",
                name,
            )
        scored = [pair for pair in zip(made, outcomes, strict=True) if pair[0][0] not in repeated]
        scored += zip(again, self._run(again, calls), strict=True)
        for (name, call), outcome in scored:
            its = self._read(name, outcome, [episodes[place] for place in call.places])
            rewards[name] |= dict(zip(call.places, its, strict=True))
            call.log.write()
        for (name, own_rewards), weight in zip(rewards.items(), self.weights, strict=True):
            for place, episode in enumerate(episodes):
                episode.score.add(name, own_rewards[place], weight=weight)

    def _parts(self, name: str, places: Sequence[int]) -> list[Sequence[int]]:
        """Which rollouts the calls of a function score: all at once, or each."""
        if scores_one_rollout(self.functions[name]):
            return [[place] for place in places]
        return [places] if places else []

    def _run(
        self, made: Sequence[tuple[str, ScoringCall]], calls: ConcurrentCalls
    ) -> list[Outcome]:
        results = calls.run([[each.call] for _, each in made], self.timeout_s) if made else []
        return [outcome for (outcome,) in results]

    def _lacking(self, name: str, episodes: Sequence[Episode]) -> dict[int, entries.RowReward]:
        """Rollouts whose row lacks a column that a function needs: it is not asked about them."""
        needed = needed_columns(self.functions[name])
        found = {}
        for place, episode in enumerate(episodes):
            if missing := [column for column in needed if column not in (episode.example or {})]:
                error = f"{name} needs the columns {missing}, which the row of the data lacks"
                found[place] = entries.RowReward(error=error)
        return found

    def _read(
        self, name: str, outcome: Outcome, episodes: Sequence[Episode]
    ) -> list[entries.RowReward]:
        """Check what a call returned; a wrong shape is raised the first time it is used."""
        outcomes = [outcome] * len(episodes)
        if not scores_one_rollout(self.functions[name]) and outcome.error is None:
            items = self._items(name, outcome.value, len(episodes), "one reward per completion")
            if isinstance(items, entries.RowReward):
                return [items] * len(episodes)
            # An exception in place of a reward: that rollout alone failed.
            outcomes = [
                Outcome(error=item) if isinstance(item, BaseException) else Outcome(item)
                for item in items
            ]
        rewards = []
        for episode, each in zip(episodes, outcomes, strict=True):
            if each.error is not None:
                reward = entries.RowReward(error=entries.raised_text(each.error, name))
            elif self.by_token:
                reward = self._by_turn(name, each.value, episode)
            else:
                reward = self._number(name, each.value)
            rewards.append(reward)
        self._used.add(name)
        return rewards

    def _by_turn(self, name: str, value: Any, episode: Episode) -> entries.RowReward:
        """One reward per turn becomes one per token, at the ends of the turns."""
        if value is None:
            return entries.RowReward()
        mask = episode.assistant_mask
        ends = entries.turn_ends(mask).tolist()
        items = self._items(name, value, len(ends), "one reward per turn of each completion")
        if isinstance(items, entries.RowReward):
            return items
        by_token = torch.zeros(len(mask))
        for end, item in zip(ends, items, strict=True):
            reward = self._number(name, item)
            if reward.error:
                return reward
            by_token[end] = reward.value or 0.0
        return entries.RowReward(by_token)

    def _number(self, name: str, value: Any) -> entries.RowReward:
        number, error = entries.number_or_error(value, name, self.nan_applies)
        if "not a number" in error:
            self._refuse(name, f"{error}.")
        return entries.RowReward(number, error)

    def _items(self, name: str, value: Any, count: int, what: str) -> list[Any] | entries.RowReward:
        """As many rewards as there have to be, or what is wrong with what a function gave."""
        items = None
        if not isinstance(value, str | bytes | Mapping):
            with contextlib.suppress(TypeError):
                items = list(value)
        if items is not None and len(items) == count:
            return items
        if items is None and count == 1 and entries.number_or_error(value, name)[0] is not None:
            return [value]  # of a batch of one, squeezed
        error = f"{name} must return {what}: expected a list of {count}, got {value!r:.80}."
        self._refuse(name, error)
        return entries.RowReward(error=error)

    def _refuse(self, name: str, error: str) -> None:
        """Raise that a function gave what can't be rewards; later, say so the first time."""
        if name not in self._used:
            raise BadRewardError(f"The reward function {error} {_WANTED}")
        if name not in self._warned:
            self._warned.add(name)
            _log.warning("The reward function %s These rollouts are not scored. %s", error, _WANTED)

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
        rows = entries.copied_rows(tensordict)
        if all(read_objects(row, entries.SCORED_BY)[0] == self._id for row in rows):
            return tensordict  # on the way into this replay buffer, say
        who = self._get_name()
        found = finished_episodes(rows, who)
        self._has_tools = rows[0].get(keys.NUM_TOOL_CALLS, None) is not None
        needs_text = any(map(self._reads_text, self.functions.values()))
        if needs_text and any(episode.query is None for episode, _ in found):
            raise MissingEntryError(
                f"{who}: a row does not say whether its prompt was a string or messages: its data "
                f"have none of the columns {list(PROMPT_COLUMNS)}. Say what the functions read: "
                "completion_format='text' or 'messages'."
            )
        if self._own_calls is None:
            self._own_calls = ConcurrentCalls()
        scored = [episode for episode, _ in found if episode.is_scorable]
        if scored:
            self.score(scored, self._own_calls)
            self._watch.record([episode.score for episode in scored])
        for episode, its in found:
            write_finished(episode, its, self.reward_names)
        for row in rows:
            row.set_non_tensor(entries.SCORED_BY, self._id)
        return entries.joined_rows(rows, tensordict.batch_size)

    _inv_call = TrajectoryTransform._inv_call

    def _reads_text(self, function: RewardFunction) -> bool:
        """Whether a function gets strings where prompts are strings."""
        if getattr(function, "needs_messages", False):  # whatever the data are
            return False
        if self.completion_format != "auto":
            return self.completion_format == "text"
        return self.level == "trajectory" and not self._has_tools

    def close(self) -> None:
        """Close the functions that can be, all of them; an error is raised at the end."""
        closes = [getattr(function, "close", None) for function in self.functions.values()]
        own = [] if self._own_calls is None else [self._own_calls.close]
        run_all([*own, *(close for close in closes if close is not None)])

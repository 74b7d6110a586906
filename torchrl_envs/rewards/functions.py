"""Reward functions: plain functions of finished episodes.

Shape legend: B rows, T tokens of a row.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from tensordict import TensorDictBase

from torchrl_data import keys, page
from torchrl_data.batched_object import read_objects
from torchrl_data.checks import POSITIVE, check_numbers, one_of
from torchrl_data.missing_entry import MissingEntryError
from torchrl_envs.concurrency.calls import (
    CallTimeoutError,
    ConcurrentCalls,
    run_all,
)
from torchrl_envs.concurrency.outcome import Outcome
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.datasets.row_checks import PROMPT_COLUMNS
from torchrl_envs.entries.rewards import (
    SCORED_BY,
    RewardSource,
    RowReward,
    UnscoredWatch,
    number_or_error,
    raised_text,
    turn_ends,
)
from torchrl_envs.entries.trajectories import copied_rows, joined_rows
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform, OpenedTurns, parts_before
from torchrl_envs.episode.tool_source import ToolSource
from torchrl_envs.episode.trajectory_transform import TrajectoryTransform
from torchrl_envs.tools.environments import EnvironmentTools

from .finished_episodes import finished_episodes, write_finished
from .scoring_call import (
    SINGULAR,
    WANTED,
    BadRewardError,
    RewardFunction,
    ScoringCall,
    TrainerState,
    by_group,
    needed_columns,
    reward_inputs,
    scores_one_rollout,
    scoring_call,
    shadowed_columns,
    unique_names,
)

if TYPE_CHECKING:
    from torchrl_envs.episode.episode_transform import EpisodeEnvironment

_log = logging.getLogger(__name__)

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
        self._watch = UnscoredWatch()

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
        before = parts_before(env, self)
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
            groups = by_group(episodes, made_call.places)
            error = outcomes[number].error
            is_given_up = isinstance(error, CallTimeoutError | asyncio.CancelledError)
            if len(groups) > 1 and error and not is_given_up:
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
        """Return which rollouts the calls of a function score: all at once, or each."""
        if scores_one_rollout(self.functions[name]):
            return [[place] for place in places]
        return [places] if places else []

    def _run(
        self, made: Sequence[tuple[str, ScoringCall]], calls: ConcurrentCalls
    ) -> list[Outcome]:
        results = calls.run([[each.call] for _, each in made], self.timeout_s) if made else []
        return [outcome for (outcome,) in results]

    def _lacking(self, name: str, episodes: Sequence[Episode]) -> dict[int, RowReward]:
        """Rollouts whose row lacks a column that a function needs: it is not asked about them."""
        needed = needed_columns(self.functions[name])
        found = {}
        for place, episode in enumerate(episodes):
            if missing := [column for column in needed if column not in (episode.example or {})]:
                error = f"{name} needs the columns {missing}, which the row of the data lacks"
                found[place] = RowReward(error=error)
        return found

    def _read(self, name: str, outcome: Outcome, episodes: Sequence[Episode]) -> list[RowReward]:
        """Check what a call returned; a wrong shape is raised the first time it is used."""
        outcomes = [outcome] * len(episodes)
        if not scores_one_rollout(self.functions[name]) and outcome.error is None:
            items = self._items(name, outcome.value, len(episodes), "one reward per completion")
            if isinstance(items, RowReward):
                return [items] * len(episodes)
            # An exception in place of a reward: that rollout alone failed.
            outcomes = [
                Outcome(error=item) if isinstance(item, BaseException) else Outcome(item)
                for item in items
            ]
        rewards = []
        for episode, each in zip(episodes, outcomes, strict=True):
            if each.error is not None:
                reward = RowReward(error=raised_text(each.error, name))
            elif self.by_token:
                reward = self._by_turn(name, each.value, episode)
            else:
                reward = self._number(name, each.value)
            rewards.append(reward)
        self._used.add(name)
        return rewards

    def _by_turn(self, name: str, value: Any, episode: Episode) -> RowReward:
        """A reward per turn becomes one per token, at the ends of the turns."""
        if value is None:
            return RowReward()
        mask = episode.assistant_mask
        ends = turn_ends(mask).tolist()
        items = self._items(name, value, len(ends), "one reward per turn of each completion")
        if isinstance(items, RowReward):
            return items
        by_token = torch.zeros(len(mask))
        for end, item in zip(ends, items, strict=True):
            reward = self._number(name, item)
            if reward.error:
                return reward
            by_token[end] = reward.value or 0.0
        return RowReward(by_token)

    def _number(self, name: str, value: Any) -> RowReward:
        number, error = number_or_error(value, name, self.nan_applies)
        if "not a number" in error:
            self._refuse(name, f"{error}.")
        return RowReward(number, error)

    def _items(self, name: str, value: Any, count: int, what: str) -> list[Any] | RowReward:
        """Check that there are as many rewards as there have to be, or say what is wrong."""
        items = None
        if not isinstance(value, str | bytes | Mapping):
            with contextlib.suppress(TypeError):
                items = list(value)
        if items is not None and len(items) == count:
            return items
        if items is None and count == 1 and number_or_error(value, name)[0] is not None:
            return [value]  # of a batch of one, squeezed
        error = f"{name} must return {what}: expected a list of {count}, got {value!r:.80}."
        self._refuse(name, error)
        return RowReward(error=error)

    def _refuse(self, name: str, error: str) -> None:
        """Raise that a function gave what can't be rewards; later, say so the first time."""
        if name not in self._used:
            raise BadRewardError(f"The reward function {error} {WANTED}")
        if name not in self._warned:
            self._warned.add(name)
            _log.warning("The reward function %s These rollouts are not scored. %s", error, WANTED)

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
            row.set_non_tensor(SCORED_BY, self._id)
        return joined_rows(rows, tensordict.batch_size)

    _inv_call = TrajectoryTransform._inv_call

    def _reads_text(self, function: RewardFunction) -> bool:
        """Return whether a function gets strings where prompts are strings."""
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

"""The events of episodes in their order, and the batch that they are read from and written into."""

import functools
import logging
import weakref
from collections.abc import Awaitable, Mapping, Sequence
from types import CoroutineType
from typing import Any, Final

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import Binary, Composite, NonTensor, Unbounded
from torchrl.envs import StepCounter, Transform
from torchrl.envs.transforms import Compose

from torchrl_data import batch_io, keys, page
from torchrl_data.batched_object import read_objects, write_objects
from torchrl_data.conversation import Conversations, continues, stream_number
from torchrl_data.stop_reason import FinishReason, StopReason, kind_of, stop_reason_of
from torchrl_data.tool_calls.parser import TurnParser, parse_tool_calls
from torchrl_envs import entries
from torchrl_envs.concurrency import ConcurrentCalls
from torchrl_envs.tool_results import environment_error

from .episode import (
    Episode,
    EventDriver,
    Resources,
    close_left_open,
    close_resources,
)
from .transform import (
    EpisodeStartError,
    EpisodeTransform,
    Event,
    ToolDispatcher,
    ToolSource,
    overrides,
)

# Episodes as entries of a batch, and back: read once, written once.
#
# Shape legend: B rows, in whatever batch shape; T tokens of the longest row.

EPISODE: Final = "episode"
"""The values of each row's :class:`Episode`: one opaque object for the whole batch."""
Flags = list[tuple[bool, bool, bool]]
"""Whether each row is done, terminated and truncated."""
_FLAGS: Final = (keys.DONE, keys.TERMINATED, keys.TRUNCATED)
_DATA: Final = (keys.GROUP_ID, keys.SEED, keys.ROW)


def read_episodes(batch: TensorDictBase) -> list[Episode]:
    """The episodes of a batch, to go on from; made of its entries where it holds none."""
    held = read_objects(batch, EPISODE)
    if set(map(type, held)) == {Episode}:
        return [each.fork() for each in held]
    episodes = [Episode(row) for row in range(len(held))]
    reasons = read_objects(batch, keys.STOP_REASON, "")
    examples = read_objects(batch, keys.ROW)
    for episode, reason, example in zip(episodes, reasons, examples, strict=True):
        episode.stop_reason, episode.example = reason, example
    for key in (keys.GROUP_ID, keys.SEED, keys.NUM_TOOL_CALLS, keys.NUM_TOOL_ERRORS):
        value = batch.get(key, None)
        if value is not None:
            for episode, number in zip(episodes, value.view(-1).tolist(), strict=True):
                setattr(episode, key, number)
    return episodes


def read_flags(batch: TensorDictBase) -> Flags:
    """The flags of each row; False where an entry is absent."""
    held, absent = [batch.get(key, None) for key in _FLAGS], [False] * batch.numel()
    columns = [absent if values is None else values.view(-1).tolist() for values in held]
    return list(zip(*columns, strict=True))


def flags_of(episodes: Sequence[Episode]) -> Flags:
    """The flags of episodes."""
    return [(e.is_terminated or e.is_truncated, e.is_terminated, e.is_truncated) for e in episodes]


def write_flags(batch: TensorDictBase, episodes: Sequence[Episode]) -> None:
    """Write which episodes are over, and how."""
    shape = (*batch.batch_size, 1)
    for key, values in zip(_FLAGS, zip(*flags_of(episodes), strict=True), strict=True):
        batch.set(key, torch.tensor(values).view(shape))


def _write_int(batch: TensorDictBase, key: str, values: Sequence[int], *shape: int) -> None:
    batch.set(key, torch.tensor(values, dtype=torch.int64).view(*batch.batch_size, *shape))


def last_row(episode: Episode, values: Tensor) -> Tensor:
    """Values of all tokens of an episode, ``[sum of T, ...]``, at those of its last row."""
    if not episode.segments:
        return values
    return values[len(values) - episode.conversation.num_tokens(0) :]


class EpisodeEntries(Transform):
    """Declares the entries of every step, and writes them.

    ``stop_reason``, ``max_new_tokens``, what data loading carries, the counts of tools, and the
    rewards. Before the end of an episode ``reward`` is 0, ``("rewards", source)`` is NaN and
    ``scorable`` is False. Of an episode that could not be scored ``reward`` is NaN, too. The
    environment keeps the attributes up to date.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reward_names: Sequence[str] = ()
        """Of all sources of rewards."""
        self.dense = False
        """Whether a transform can make the reward dense."""
        self.loads_data = False
        """Whether data is loaded."""
        self.has_tools = False
        """Whether there are tools."""
        self.has_sources = False
        """Whether somebody may give rewards."""
        self.exporting: Sequence[EpisodeTransform] = ()
        """Transforms that write entries of their own."""

    def write_values(
        self,
        batch: TensorDictBase,
        episodes: Sequence[Episode],
        given: TensorDictBase | None = None,
    ) -> None:
        """Write episodes and what is seen of them; of data what ``given`` has, if it has it."""
        write_objects(batch, EPISODE, episodes)
        write_objects(batch, keys.STOP_REASON, [e.stop_reason for e in episodes])
        limits = [keys.NO_LIMIT if e.max_new_tokens is None else e.max_new_tokens for e in episodes]
        _write_int(batch, keys.MAX_NEW_TOKENS, limits)
        if self.has_tools:
            _write_int(batch, keys.NUM_TOOL_CALLS, [e.num_tool_calls for e in episodes], 1)
            _write_int(batch, keys.NUM_TOOL_ERRORS, [e.num_tool_errors for e in episodes], 1)
        if not self.loads_data:
            return
        held = {} if given is None else {key: given.get(key, None) for key in _DATA}
        if held and all(value is not None for value in held.values()):
            for key, value in held.items():
                batch.set(key, value)
            return
        _write_int(batch, keys.GROUP_ID, [episode.group_id for episode in episodes])
        _write_int(batch, keys.SEED, [episode.seed for episode in episodes])
        write_objects(batch, keys.ROW, [episode.example for episode in episodes])

    def write_results(self, batch: TensorDictBase, ended: Sequence[Episode]) -> None:
        """Write what sources of rewards and other transforms gave episodes that have just ended."""
        scores = [episode.score for episode in ended]
        is_given = batch.get(keys.REWARD, None) is not None
        if is_given and (self.reward_names or any(score.by_source for score in scores)):
            raise ValueError(
                f"{_WHO}: {[*self.reward_names]} score the episodes, and so does a transform that "
                "writes 'reward' by itself, and would be lost. Make it RewardFunctions([...])."
            )
        if not is_given and (self.reward_names or (ended and self.has_sources)):
            dense = None
            if self.dense:
                batch.set(entries.TOKEN_ENTRIES, NonTensorData({}, batch_size=batch.batch_size))
            if any(score.by_token is not None for score in scores):
                for episode in ended:
                    total, by_token = torch.tensor(episode.score.reward), episode.score.by_token
                    reward = entries.dense_reward(total, by_token, episode.assistant_mask)
                    episode.token_entries[keys.REWARD] = reward
                dense = [last_row(e, e.token_entries[keys.REWARD]) for e in ended]
            rows = [episode.row for episode in ended]
            entries.write_scores(batch, rows, scores, dense, self.reward_names)
        # By token.
        for key in dict.fromkeys(key for episode in ended for key in episode.token_entries):
            if key != keys.REWARD:
                own = [episode for episode in ended if key in episode.token_entries]
                values = [last_row(episode, episode.token_entries[key]) for episode in own]
                row_key: Any = unravel_key(("next", key))
                entries.write_token_entry(batch, key, [e.row for e in own], values, row_key=row_key)
        for transform in self.exporting:
            transform.export(batch, ended)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:  # type: ignore[override]
        """Declares the entries of every observation."""
        shape = observation_spec.shape
        objects: dict[str, Any] = {EPISODE: Episode(), keys.STOP_REASON: ""}
        numbers = {keys.MAX_NEW_TOKENS: shape}
        if self.has_tools:
            counts = (keys.NUM_TOOL_CALLS, keys.NUM_TOOL_ERRORS)
            numbers |= dict.fromkeys(counts, torch.Size((*shape, 1)))
        if self.loads_data:
            numbers |= {keys.GROUP_ID: shape, keys.SEED: shape}
            objects[keys.ROW] = {}
        for key, example in objects.items():
            observation_spec[key] = NonTensor(shape=shape, example_data=example)
        for key, its in numbers.items():
            observation_spec[key] = Unbounded(shape=its, dtype=torch.int64)
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:  # type: ignore[override]
        """Declares the rewards of all sources; ``[*B, -1, 1]`` if it can be dense."""
        if not self.reward_names:
            return reward_spec
        shape = reward_spec.shape
        reward_spec[keys.REWARD] = Unbounded(shape=torch.Size((*shape, -1 if self.dense else 1, 1)))
        reward_spec[keys.SCORABLE] = Binary(n=1, shape=torch.Size((*shape, 1)), dtype=torch.bool)
        single = Unbounded(shape=torch.Size((*shape, 1, 1)))
        named = {name: single.clone() for name in self.reward_names}
        reward_spec[keys.REWARDS] = Composite(named, shape=shape)
        reward_spec[entries.REWARD_ERRORS] = NonTensor(shape=shape, example_data="")
        if self.dense:
            reward_spec[entries.TOKEN_ENTRIES] = NonTensor(shape=shape, example_data={})
        return reward_spec


def batch_of_ended(
    episodes: Sequence[Episode], reward_names: Sequence[str], *, has_tools: bool = False
) -> TensorDict:
    """Episodes that are over, with the entries that the last step of an environment has of them."""
    batch = TensorDict({}, batch_size=[len(episodes)])
    conversations = Conversations.cat([episode.conversation for episode in episodes])
    batch_io.write_conversations(batch, keys.PROMPT, conversations)
    write_flags(batch, episodes)
    its = EpisodeEntries()
    its.reward_names, its.has_sources, its.loads_data = reward_names, True, True
    its.has_tools = has_tools
    its.write_results(batch, episodes)
    its.write_values(batch, episodes)
    return batch


# The one loop through an episode: begin, turns, finish, close.
#
# :class:`EpisodeRunner` runs the events of many episodes at once; who drives it decides when.

_EVENTS: Final = {
    "draw": ("draw",),
    "begin": ("begin",),
    "before_turn": ("before_turn",),
    "over": ("over",),
    "finish": ("finish", "finish_batch"),
}
"""Each event with the methods that take part in it."""
_log = logging.getLogger(__name__)


class EpisodeRunner(EventDriver):
    """Runs events of episodes, of all transforms in order.

    ``begin -> (before_turn -> the policy's turn -> after_turn)* -> finish -> close``

    Args:
        calls: runs what events wait for.
        parse: finds the tool calls of a turn.
    """

    def __init__(self, calls: ConcurrentCalls, parse: TurnParser = parse_tool_calls) -> None:
        super().__init__(calls)
        self.dispatcher = ToolDispatcher(parse)
        """Answers turns that call tools; the first to see one."""
        self.max_turns: int | None = None
        """Most turns of each episode: the smallest ``max_steps`` of all ``StepCounter``."""
        self._parts: dict[str, list[EpisodeTransform]] = {event: [] for event in _EVENTS}
        self._answer_cuts: Sequence[EpisodeTransform] = ()
        self._open: dict[int, tuple[int, Resources]] = {}
        self.num_draws = 0
        """How often episodes were drawn: names their random numbers where nothing else does."""
        weakref.finalize(self, close_left_open, self._open)

    def set_transforms(self, transforms: Sequence[EpisodeTransform]) -> None:
        """Who takes part, in order.

        Raises:
            ValueError: two of them have a tool of the same name.
        """
        sources = [transform for transform in transforms if isinstance(transform, ToolSource)]
        owners: dict[str, str] = {}
        for source in sources:
            own = source.tool_names()
            for name in own.keys() & owners.keys():
                raise ValueError(
                    f"Two sources of tools have one named {name!r}: {owners[name]} and "
                    f"{own[name]}. A call could not tell them apart; rename one, or give "
                    "one source a prefix."
                )
            owners.update(own)
        self.dispatcher.sources = sources
        self._answer_cuts = [part for part in transforms if part.answers_cut_turns]
        for number, transform in enumerate(transforms):
            transform.key = f"{type(transform).__name__}.{number}"
        self._parts = {
            event: [part for part in transforms if any(overrides(part, name) for name in forms)]
            for event, forms in _EVENTS.items()
        }

    # Events -------------------------------------------------------------------------------------

    def draw(self, episodes: Sequence[Episode]) -> None:
        """Give new episodes their examples; one without data has a ``stop_reason`` afterwards."""
        self.hold(episodes)
        try:
            for transform in self._parts["draw"]:
                transform.draw(episodes)
        except Exception:  # no data are left, say: these never begin
            self.close(episodes)
            raise
        for episode in episodes:
            if episode.stream is None:
                episode.stream = stream_number("draw", self.num_draws, episode.row)
        self.num_draws += 1

    def hold(self, episodes: Sequence[Episode]) -> None:
        """Keep what new episodes will hold, until they are closed."""
        for episode in episodes:
            self._open[episode.id] = episode.row, episode.resources

    def begin(self, episodes: Sequence[Episode]) -> None:
        """Draw and start episodes; one that can't start gets a ``stop_reason``."""
        self.draw(episodes)
        self.run(self.start, [episode for episode in episodes if not episode.stop_reason])

    async def start(self, episode: Episode) -> None:
        """Start a drawn episode; one that can't start gets a ``stop_reason``."""
        if self.max_turns is not None:
            episode.limit_turns(self.max_turns)
        for transform in self._parts["begin"]:
            rest = self.run_safely(transform, "begin", episode)
            if rest is not None:
                await rest
            if kind_of(episode.stop_reason) == StopReason.ENVIRONMENT_ERROR:
                # What it holds of others stays until it is closed.
                own, reason = episode.resources, episode.stop_reason
                rest = close_resources(own, reason, self.calls.timeout_s, owner=transform)
                if rest is not None:
                    await rest
                return
        schemas = [
            tool.schema
            for source in self.dispatcher.sources
            if source.show_schemas and source.concerned([episode])
            for tool in source.tools_of(episode).values()
        ]
        episode.tools = schemas or episode.tools

    def took_turn(self, episode: Episode, finish_reason: str) -> bool:
        """Count a turn that the policy has taken.

        A turn that a limit of tokens cut ends its episode there, and so does one that the engine
        could not serve. Neither tools nor environments see it, except for transforms with
        ``answers_cut_turns``.

        Args:
            episode: whose conversation holds the turn.
            finish_reason: of the turn.

        Returns:
            Whether the turn is to be answered.
        """
        episode.finish_reason = finish_reason
        episode.num_turns += 1
        if kind_of(finish_reason) == FinishReason.ERROR:
            episode.truncate(finish_reason)
        elif episode.is_turn_cut and not any(p.concerned([episode]) for p in self._answer_cuts):
            episode.cut_turn()
        return not episode.is_done

    def before_turns(self, episodes: Sequence[Episode]) -> None:
        """Bound the next turns of episodes that go on; or one gets a ``stop_reason``."""
        running = [each for each in episodes if not (each.stop_reason or each.is_done)]
        for episode in running:
            episode.start_turn()
        for transform in self._parts["before_turn"]:
            self.run(functools.partial(self.run_safely, transform, "before_turn"), running)
            running = [each for each in running if not (each.stop_reason or each.is_done)]

    def run_safely(self, part: EpisodeTransform, event: str, episode: Episode) -> Event:
        """Run an event of an episode, of a transform or of what tools answer.

        What it raises ends this episode alone, truncated and unscorable, with ``stop_reason``
        ``"environment_error: <where>: <type>: <message>"``; nothing more takes part in it then.

        Returns:
            The rest of an event that is ``async``.
        """
        if episode.stop_reason and kind_of(episode.stop_reason) == StopReason.ENVIRONMENT_ERROR:
            return None
        try:
            if part.concerned([episode]):
                waiting = getattr(part, event)(episode)
                if isinstance(waiting, CoroutineType):
                    return _finish_safely(waiting, episode, part, event)
        except (Exception, SystemExit) as error:
            fail(episode, error, part, event)
        return None

    def over(self, episodes: Sequence[Episode]) -> None:
        """Tell that episodes are over, each as soon as it is; to be told again says no more."""
        for transform in self._parts["over"]:
            for episode in transform.concerned(episodes):
                transform.over(episode)

    def finish(self, episodes: Sequence[Episode]) -> None:
        """Score episodes that are over; those that failed, or never began, get no reward."""
        self.over(episodes)
        for episode in episodes:
            episode.drop_unanswered()
            episode.score = entries.Score()
            episode.metrics, episode.token_entries = {}, {}
        scored = [episode for episode in episodes if episode.is_scorable]
        for transform in self._parts["finish"]:
            concerned = transform.concerned(scored)
            if concerned and overrides(transform, "finish_batch"):
                transform.finish_batch(concerned)
            if overrides(transform, "finish"):
                self.run(transform.finish, concerned)
        for episode in episodes:
            if not episode.is_scorable:
                kind, _ = stop_reason_of(episode.stop_reason, StopReason.TRUNCATED)
                episode.score = entries.Score(error=episode.stop_reason if kind.is_failure else "")

    def close(self, episodes: Sequence[Episode]) -> None:
        """Give back what episodes hold, once; they are over, finished or given up."""
        opened = [episode for episode in episodes if episode.id in self._open]
        self._give_back({e.id: e.stop_reason if e.is_done else "" for e in opened})

    def close_rows(self, rows: Sequence[int] | None = None) -> None:
        """Give up the episodes that run in some rows of the environment's batch, or all."""
        wanted = None if rows is None else set(rows)
        opened = self._open.items()
        self._give_back({i: "" for i, (row, _) in opened if wanted is None or row in wanted})

    def _give_back(self, reasons: Mapping[int, str]) -> None:
        """Close episodes by their ids, each with the reason why it is over."""
        held = [(its[1], reasons[i]) for i in reasons if (its := self._open.pop(i, None))]
        self.run(lambda own: close_resources(own[0], own[1], self.calls.timeout_s), held)

    def resources_in(self, row: int) -> Resources:
        """What the episode holds that runs in a row of the batch; nothing if none does."""
        return next((own for place, own in self._open.values() if place == row), Resources())

    def resources_of(self, episode: Episode) -> Resources:
        """What an episode holds; nothing if it is closed."""
        return self._open.get(episode.id, (0, Resources()))[1]


async def _finish_safely(waiting: Awaitable[None], episode: Episode, *about: Any) -> None:
    """The rest of what :meth:`EpisodeRunner.run_safely` has begun."""
    try:
        await waiting
    except (Exception, SystemExit) as error:
        fail(episode, error, *about)


def fail(episode: Episode, error: BaseException, part: Any, event: str) -> None:
    """An episode is over, or does not begin, because a part of the environment raised."""
    where = "tools" if isinstance(part, ToolDispatcher) else type(part).__name__
    if isinstance(error, EpisodeStartError):
        where, error = error.where, error.__cause__ or error
    _log.warning("Row %d ends: %s failed in %s", episode.row, where, event, exc_info=error)
    episode.stop_reason = ""
    episode.truncate(environment_error(error, where))


# One step of an environment: its episodes are read once, their events run, and written once.
#
# Shape legend: B rows.

_WHO: Final = "EpisodeEnv.step"
_THEIRS: Final = ("torchrl.envs.llm", "torchrl.objectives.llm", "torchrl.data.llm")
_KNOWN: Final = ("torchrl.envs.transforms.", "torchrl_envs.")


class EpisodeStep:
    """The episodes of a step that is under way.

    Args:
        env: runs the events, and writes what the episodes have become.
        tensordict: what the step started from.
        next_batch: what the base environment made of it.
    """

    def __init__(self, env: Any, tensordict: TensorDictBase, next_batch: TensorDictBase) -> None:
        self.ended: list[Episode] = []
        """Episodes that this step ended."""
        self._runner = runner = env.runner
        self._entries: EpisodeEntries = env.entries
        self._given = tensordict
        self._episodes = read_episodes(tensordict)
        self._shown = batch_io.read_conversations(next_batch, keys.PROMPT, who=_WHO)
        self._flags = read_flags(next_batch)
        self._active: list[Episode] = []
        self._turns: list[Episode] = []
        """Those of them that have just taken a turn."""
        is_active = batch_io.active_rows(tensordict).tolist()
        held = self._flags if all(is_active) else read_flags(tensordict)
        reasons = read_objects(tensordict, keys.FINISH_REASON, "")
        for row, episode in enumerate(self._episodes):
            episode.row = row
            episode.share(self._shown, row)
            flags = self._flags if is_active[row] else held
            _, episode.is_terminated, episode.is_truncated = flags[row]
            if not is_active[row]:
                continue
            self._active.append(episode)
            episode.resources = runner.resources_of(episode)
            if not episode.stop_reason and runner.took_turn(episode, reasons[row]):
                self._turns.append(episode)
        if runner.dispatcher.sources:
            answer = functools.partial(runner.run_safely, runner.dispatcher, "after_turn")
            runner.run(answer, self._turns)
        self._write(next_batch, flags=any(episode.is_done for episode in self._active))

    def after_turn(self, transform: EpisodeTransform, next_batch: TensorDictBase) -> None:
        """Run one transform's ``after_turn`` on the episodes that have just taken a turn.

        Args:
            transform: which.
            next_batch: read before and written after, for the transforms of TorchRL's.
        """
        self._read_changes(next_batch)
        event = functools.partial(self._runner.run_safely, transform, "after_turn")
        self._runner.run(event, self._turns)
        self._write(next_batch)

    def count(self, counter: StepCounter, next_batch: TensorDictBase) -> TensorDictBase:
        """Let a ``StepCounter`` count, after all others have answered.

        Whether an episode that has no turn left ended by itself is decided at the end of the step,
        so the flags stay as they were.

        Args:
            counter: which.
            next_batch: what it counts in.
        """
        held = {key: next_batch.get(key) for key in _FLAGS}
        counted = counter._step(self._given, next_batch)
        for episode, (_, _, is_over) in zip(self._episodes, read_flags(counted), strict=True):
            if is_over and not episode.is_done:
                episode.limit_turns(episode.num_turns)
        return counted.update(held)

    def end(self, next_batch: TensorDictBase) -> TensorDictBase:
        """End episodes, score them, and give back what they hold.

        Args:
            next_batch: what all transforms but those of rewards made of it.
        """
        batch = batch_io.one_dimension(next_batch)
        self._read_changes(batch)
        for episode in self._turns:
            episode.end_turn()
        self._runner.before_turns(self._turns)
        self.ended += [episode for episode in self._active if episode.settle()]
        self._runner.finish(self.ended)
        self._write(batch)
        self._entries.write_results(batch, self.ended)
        self._entries.write_values(batch, self._episodes, given=batch_io.one_dimension(self._given))
        self._runner.close(self.ended)
        return in_shape(batch, next_batch.batch_size)

    # Between episodes and entries ---------------------------------------------------------------

    def _read_changes(self, batch: TensorDictBase) -> None:
        """What TorchRL's transforms did to the episodes since they were last written."""
        shown = batch_io.read_conversations(batch, keys.PROMPT, who=_WHO)
        if shown is not self._shown:
            self._shown = shown
            for row, episode in enumerate(self._episodes):
                # One that rewrites the past is a new row.
                if continues(shown.row(row), episode.conversation):
                    episode.share(shown, row)
                else:
                    episode.replace_conversation(shown.row(row))
        flags = read_flags(batch)
        if flags != self._flags:
            self._flags = flags
            for episode in self._active:
                is_done, episode.is_terminated, episode.is_truncated = flags[episode.row]
                episode.is_terminated |= is_done and not episode.is_truncated

    def _write(self, batch: TensorDictBase, *, flags: bool = True) -> None:
        """Write the conversations and the flags, if they have changed."""
        self._shown = written(batch, self._episodes, self._shown)
        now = flags_of(self._episodes) if flags else self._flags
        if now != self._flags:
            self._flags = now
            write_flags(batch, self._episodes)


def written(
    batch: TensorDictBase, episodes: Sequence[Episode], shown: Conversations
) -> Conversations:
    """Write the conversations of episodes, if one of them has changed.

    Args:
        batch: of B rows.
        episodes: B.
        shown: what the batch shows.

    Returns:
        What it shows now.
    """
    if all(episode.shares(shown) for episode in episodes):
        return shown
    shown = Conversations.cat([episode.conversation for episode in episodes])
    batch_io.write_conversations(batch, keys.PROMPT, shown)
    for row, episode in enumerate(episodes):
        episode.share(shown, row)
    return shown


class StepOrder(Compose):
    """The transforms of an environment; those that read the reward come once it is there."""

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What the base environment gets; TorchRL's own also takes entries one by one."""
        return self._inv_call(tensordict.clone(recurse=False))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        env: Any = self.container
        env._find_parts()
        others = [each for each in list[Any](self.transforms) if each is not env.entries]
        roles = env._roles = env._roles or [(role_of(each), each) for each in others]
        step = EpisodeStep(env, tensordict, next_tensordict)
        for role, transform in roles:
            if role == "answers":
                step.after_turn(transform, next_tensordict)
            elif role == "edits":
                run = functools.partial(transform._step, tensordict)
                next_tensordict = batch_io.edited(next_tensordict, run, who=_WHO)
            elif role == "writes":
                next_tensordict = transform._step(tensordict, next_tensordict)
        for role, transform in roles:
            if role == "counts":
                next_tensordict = step.count(transform, next_tensordict)
        next_tensordict = step.end(next_tensordict)
        env.record_ends(step.ended)
        for role, transform in roles:
            if role == "reads the reward":
                next_tensordict = transform._step(tensordict, next_tensordict)
                transform_past(transform, step.ended)
        return next_tensordict


def role_of(transform: Any) -> str:
    """What a transform does in a step; empty if nothing.

    It may edit messages if it is a user's, says that it reads them, or holds other ones.
    """
    if type(transform)._step is EpisodeTransform._step:
        return "answers" if overrides(transform, "after_turn") else ""
    if keys.REWARD in (transform.in_keys or ()):
        return "reads the reward"
    if isinstance(transform, StepCounter):
        return "counts" if transform.max_steps is not None else "writes"
    is_known = type(transform).__module__.startswith(_KNOWN) and not isinstance(transform, Compose)
    reads = any(keys.HISTORY in key for key in transform.in_keys or ())
    may_edit = (reads or not is_known) and not isinstance(transform, EpisodeTransform)
    return "edits" if may_edit else "writes"


def transform_past(transform: Transform, episodes: Sequence[Episode]) -> None:
    """Let a transform of the reward change it in the rows before a rewritten past, too."""
    for own in (episode.token_entries for episode in episodes if episode.segments):
        if keys.REWARD in own and type(transform)._step is Transform._step:
            whole = TensorDict({keys.REWARD: own[keys.REWARD][None].clone()}, batch_size=[1])
            own[keys.REWARD] = transform._call(whole)[keys.REWARD][0]


def flat_transforms(transform: Transform) -> list[Transform]:
    """A transform by itself, or those of a ``Compose`` that only runs them, and those in these."""
    if not isinstance(transform, Transform):
        found = f"{transform!r:.80}"
        hint = " Make one of the class: call it." if isinstance(transform, type) else ""
        raise TypeError(f"append_transform takes a transform of an environment, got {found}.{hint}")
    kind = type(transform)
    if kind.__module__.startswith(_THEIRS):
        raise TypeError(
            f"{kind.__module__}.{kind.__name__} works on the batches of TorchRL's LLM layer. Take "
            f"what this library has instead: {page('docs/torchrl-arguments.md')}."
        )
    if {kind._step, kind._reset} == {Compose._step, Compose._reset}:
        return [part for each in transform.transforms for part in flat_transforms(each)]  # type: ignore[arg-type]
    transform.reset_parent()
    return [transform]


def in_shape(batch: TensorDictBase, shape: torch.Size) -> TensorDictBase:
    """A batch of a shape; itself if it has that already."""
    return batch if batch.batch_size == shape else batch.reshape(shape)

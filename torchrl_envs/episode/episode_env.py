"""Environments of episodes: in batches as TorchRL steps them, or each at its own pace."""

import functools
import inspect
import logging
import reprlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor
from torchrl.data import Binary, Composite, NonTensor
from torchrl.envs import EnvBase, StepCounter, Transform, TransformedEnv
from torchrl.envs.transforms import Compose
from transformers import PreTrainedTokenizerBase

from torchrl_data import keys, page
from torchrl_data.batched_object import read_objects, write_objects
from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import check_counts, check_numbers, one_of
from torchrl_data.conversation import Conversations, Turn, stream_number, waiting_rows
from torchrl_data.conversation_io import (
    active_rows,
    one_dimension,
    read_conversations,
    stored_conversations,
    write_conversations,
)
from torchrl_data.foreign_conversations import (
    chats_of,
    edited,
    has_entry,
    prompt_of_tokens,
    read_fulls,
)
from torchrl_data.history import History
from torchrl_data.keys import GROUP_ID, HISTORY, PROMPT, QUERY, REWARD, ROW, SEED, TOOLS
from torchrl_data.messages import Message
from torchrl_data.missing_entry import MissingEntryError, entries_of
from torchrl_data.ragged.packed import first_entries, read_rows
from torchrl_data.stop_reason import StopReason, kind_of, stop_reason_of
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_data.templates.registry import family_of
from torchrl_data.tool_calls.parser import (
    TurnParser,
    format_of_template,
    parse_tool_calls,
    tool_call_parser,
)
from torchrl_envs.concurrency import ConcurrentCalls, run_all
from torchrl_envs.entries import REWARD_KEYS, RewardSource, UnscoredWatch, kinds_of

from . import runner
from .episode import Episode, Resources
from .transform import EpisodeTransform, overrides

# A chat environment with transforms: TorchRL's face of the loop through episodes.
#
# Shape legend: B rows.


class TooManyRewardErrors(RuntimeError):
    """More of the recent rollouts could not be scored than the limit allows."""


class RewardErrorLimit(ChecksAttributes, Transform):
    """Stops the run when the rewards of more than a fraction of the recent rollouts fail.

    Every :class:`~torchrl_envs.EpisodeEnv` has one with the defaults; append another
    to change them.

    Args:
        max_error_fraction: of the last ``window`` rollouts. A run stops as soon as the number of
            errors that this allows is exceeded, before ``window`` rollouts were seen too; 1 never
            stops.
        window: number of rollouts.

    Raises:
        ValueError: the fraction is not in [0, 1], or the window is not positive.
    """

    def __init__(self, max_error_fraction: float = 0.05, *, window: int = 200) -> None:
        super().__init__()
        check_counts("RewardErrorLimit", window=window)
        self.max_error_fraction: float = self._checked_change(
            "max_error_fraction", max_error_fraction
        )
        self._recent: deque[str] = deque(maxlen=window)

    changeable = frozenset({"max_error_fraction"})

    def _checked_change(self, name: str, value: Any) -> Any:
        check_numbers("RewardErrorLimit", "[0, 1]", **{name: value})
        return value

    def record(self, episodes: Sequence[Episode]) -> None:
        """Take note of rollouts that have just ended.

        Args:
            episodes: with their scores.

        Raises:
            TooManyRewardErrors: the limit is exceeded; the message counts the kinds of errors.
        """
        self._recent.extend(episode.score.error for episode in episodes)
        failed = [error for error in self._recent if error]
        window = self._recent.maxlen or 1
        if len(failed) <= self.max_error_fraction * window:
            return
        summary = "\n".join(f"  {each}" for each in kinds_of(failed))
        # Those of which the episode failed were never scored.
        num_ended = sum(
            stop_reason_of(error, StopReason.TRUNCATED)[0].is_failure for error in failed
        )
        what = "The rewards of " if num_ended == 0 else ""
        how = f"failed, {num_ended} of them before they could be scored" if num_ended else "failed"
        mend = "what ended the rollouts"
        if num_ended < len(failed):
            mend = "the reward (None, not NaN, says that it does not apply)"
        raise TooManyRewardErrors(
            f"{what}{len(failed)} of the last {len(self._recent)} rollouts {how}; "
            f"{self.max_error_fraction:.0%} of {window} are allowed:\n{summary}\nThe last one:\n"
            f"{failed[-1]}\nMend {mend}, or allow more with "
            "collector.max_error_fraction= of a recipe, or "
            f"RewardErrorLimit(max_error_fraction=...). See {page('docs/rewards.md')}."
        )

    def get_extra_state(self) -> list[str]:
        """The errors of the recent rollouts, part of ``state_dict()``."""
        return list(self._recent)

    def set_extra_state(self, state: list[str]) -> None:
        """Go back to a state; what ``load_state_dict()`` calls.

        Args:
            state: what :meth:`get_extra_state` gave.
        """
        self._recent = deque(state, maxlen=self._recent.maxlen)

    @staticmethod
    def deal_extra_states(states: Sequence[list[str]], count: int) -> list[list[str]]:
        """What copies of it remember, dealt out to another number of copies.

        Args:
            states: what :meth:`get_extra_state` gave, of each.
            count: how many there are now.

        Returns:
            A state for each of them; every error is in one.
        """
        errors = [error for state in states for error in state]
        return [errors[number::count] for number in range(count)]


T = TypeVar("T", bound=Transform)


class OwnSignature:
    """The arguments of a class's constructor, which TorchRL's metaclass hides from ``help``."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        """Of whichever class has it, or inherits it; an instance is called otherwise."""
        if instance is not None:
            raise AttributeError("__signature__")
        return inspect.Signature([*inspect.signature(owner.__init__).parameters.values()][1:])


class EpisodeEnv(TransformedEnv):
    """Runs the episodes of a :class:`~torchrl_envs.ChatEnv` and its transforms.

    A row is done when the policy's turn is left without an answer (no tool result, no message of
    anybody else), when a transform such as ``StepCounter`` truncates it, or when it could not be
    generated. Then it is scored, whatever the order in which the transforms were appended, and what
    it held is given back. ``stop_reason`` says why it ended. A row that could not begin gets no
    turn: its first step ends it, truncated and unscorable. Transforms that read ``reward``, such as
    TorchRL's ``RewardScaling`` and ``RewardSum``, run once the episodes are scored.

    Args:
        env: the base environment.
        transform: one transform, or a ``Compose`` of several.
    """

    __signature__ = OwnSignature()

    def __init__(self, env: EnvBase, transform: Transform) -> None:
        parts = runner.flat_transforms(transform)
        entries = runner.EpisodeEntries()
        super().__init__(env, runner.StepOrder(entries, *parts))  # type: ignore[arg-type]
        self.calls = ConcurrentCalls()
        """Runs the calls of tools, environments and rewards."""
        self._found: list[Any] = []
        self._watch = UnscoredWatch()
        self.error_limit = RewardErrorLimit()
        parse = getattr(env, "parse_turn", parse_tool_calls)
        self.runner = runner.EpisodeRunner(self.calls, parse)
        self.entries = entries
        self._find_parts()

    def __repr__(self) -> str:
        base, lines = self.base_env, []
        for part in self.transforms_of(Transform):
            if isinstance(part, StepCounter):
                lines.append(f"StepCounter(max_steps={part.max_steps})")
            elif not isinstance(part, _HARMLESS):
                lines.append(repr(part))
        inside = "".join(f"\n    {line}," for line in lines)
        return f"{type(self).__name__}(\n    {base!r},{inside}\n)"

    def append_transform(self, transform: Transform) -> Self:  # type: ignore[override]
        """Add a transform, or those of a ``Compose``.

        Raises:
            ValueError: it offers a tool whose name another source's has.
        """
        for part in runner.flat_transforms(transform):
            super().append_transform(part)
        self._find_parts()
        return self

    def _find_parts(self) -> None:
        """Ask the transforms what they do, and tell the parts of our own, where there are others.

        Called before each reset and step: transforms may come and go in TorchRL's ways too.

        Raises:
            ValueError: two of them have a tool of the same name.
        """
        if self._found == (found := [*self.transform]):  # type: ignore[misc]
            return
        self._found, self._checked, self._roles = found, False, ()
        transforms = list(self.episode_transforms())
        self.runner.set_transforms(transforms)
        counters = [c for c in self.transforms_of(StepCounter) if c.truncated_key == keys.TRUNCATED]
        limits = [counter.max_steps for counter in counters if counter.max_steps is not None]
        self.runner.max_turns = min(limits, default=None)
        self.entries.reward_names = self.reward_names
        self.entries.dense = any(part.by_token for part in transforms)
        self.entries.loads_data = any(overrides(part, "draw") for part in transforms)
        self.entries.has_tools = bool(self.runner.dispatcher.sources)
        self.entries.has_sources = any(isinstance(part, RewardSource) for part in transforms)
        self.entries.exporting = [part for part in transforms if overrides(part, "export")]
        self._limit = next(self.transforms_of(RewardErrorLimit), self.error_limit)
        self.empty_cache()

    def episode_transforms(self) -> Iterator[EpisodeTransform]:
        """The transforms that take part in episodes, in order."""
        return self.transforms_of(EpisodeTransform)

    @property
    def reward_names(self) -> list[str]:
        """The names of the rewards of all sources, in order."""
        sources = [part for part in self.episode_transforms() if isinstance(part, RewardSource)]
        names = [name for source in sources for name in source.reward_names]
        return list(dict.fromkeys(names))  # sources of different episodes may have the same

    @property
    def reward_entries(self) -> list[str]:
        """What transforms of others declare, as observed or beside the rewards: rows keep it."""
        ours = self.entries.transform_observation_spec(Composite(shape=self.batch_size))
        own = {*ours.keys(), *self.base_env.observation_spec.keys(), keys.POLICY_VERSION}
        declared = [*self.full_reward_spec.keys(), *self.full_observation_spec.keys()]
        return [str(name) for name in declared if name not in own | _OWN]

    def transforms_of(self, kind: type[T]) -> Iterator[T]:
        """The transforms of a class, in order, inside nested ``Compose`` too."""
        pending: list[Transform] = [self.transform]
        while pending:
            transform = pending.pop(0)
            if isinstance(transform, Compose):
                pending = [*transform.transforms, *pending]  # type: ignore[list-item]
            elif isinstance(transform, kind):
                yield transform

    def resources_in(self, row: int) -> Resources:
        """What the episode holds that runs in a row; nothing if none does."""
        return self.runner.resources_in(row)

    def check(self) -> None:
        """Check that the composition can work: data, tools and a reward fit together.

        Called before the first reset; call it earlier to fail earlier.

        Raises:
            ValueError: something is missing or does not fit; the message names it.
        """
        for transform in self.episode_transforms():
            transform.check(self)
        self._checked, self._roles = True, ()
        # Checking gives sources of rewards their final names.
        self.entries.reward_names = self.reward_names
        self.empty_cache()

    def read_calls_as(self, encoder: ConversationEncoder) -> None:
        """Read tool calls as a policy's chat template teaches, where nothing else says how.

        Args:
            encoder: of the policy.
        """
        base: Any = self.base_env
        if getattr(base, "takes_format_of_policy", False):
            family = family_of(encoder.tokenizer) or ""
            base.parse_turn = tool_call_parser(format_of_template(encoder.template, family=family))
            self.runner.dispatcher.parse = base.parse_turn

    # Reset --------------------------------------------------------------------------------------

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Begin an episode in each row: see ``EnvBase.reset`` of TorchRL.

        Args:
            tensordict: what the rows begin with, such as their ``query``.
            **kwargs: as TorchRL's.

        Raises:
            TypeError: it is no TensorDict.
        """
        _check_reset(tensordict)
        return super().reset(tensordict, **kwargs)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self._find_parts()
        if not self._checked:
            self.check()
        size = self.batch_size.numel()
        batch = one_dimension(
            TensorDict({}, batch_size=self.batch_size) if tensordict is None else tensordict.copy()
        )
        mask = batch.get("_reset", None)
        rows = list(range(size)) if mask is None else mask.view(-1).nonzero().squeeze(-1).tolist()
        self.close_episodes(rows)
        new = [Episode(row) for row in rows]
        episodes = new if len(new) == size else runner.read_episodes(batch)
        for episode in new:
            episodes[episode.row] = episode
        try:
            reset = one_dimension(self._begin(batch, new, **kwargs))
            shown = read_conversations(reset, PROMPT, who="EpisodeEnv.reset")
            begun = {episode.row for episode in new}
            for row, episode in enumerate(episodes):
                if row in begun:  # with a stream of random numbers of its own
                    episode.conversation = shown.row(row)
                else:
                    episode.share(shown, row)
            self.runner.before_turns(new)
            for episode in new:
                if episode.stop_reason:
                    episode.max_new_tokens = 0
            runner.written(reset, episodes, shown)
        except BaseException:
            self.close_episodes(rows)
            raise
        self.entries.write_values(reset, episodes)
        return runner.in_shape(reset, self.batch_size)

    def _begin(
        self, batch: TensorDictBase, new: Sequence[Episode], **kwargs: Any
    ) -> TensorDictBase:
        queries = read_objects(batch, QUERY)
        examples = read_objects(batch, ROW)
        for episode in new:
            episode.query, episode.example = queries[episode.row], examples[episode.row]
        for key in (GROUP_ID, SEED):
            value = batch.get(key, None)
            if value is not None:
                numbers = value.view(-1).tolist()
                for episode in new:
                    setattr(episode, key, int(numbers[episode.row]))
        self.runner.begin(new)
        for episode in new:
            queries[episode.row] = episode.query
        if any(query is not None for query in queries):
            write_objects(batch, QUERY, queries)
        if any(episode.tools for episode in new):
            tools = read_objects(batch, TOOLS)
            for episode in new:
                tools[episode.row] = episode.tools
            write_objects(batch, TOOLS, tools)
        batch = runner.in_shape(batch, self.batch_size)
        reset = self.base_env._reset(batch, **kwargs)
        self.base_env._complete_done(self.base_env.full_done_spec, reset)
        run = functools.partial(self.transform._reset, batch)
        if {"edits", "reads the reward"}.isdisjoint(map(runner.role_of, self._found)):
            return run(reset)
        return edited(reset, run, who="EpisodeEnv.reset")

    # Step ---------------------------------------------------------------------------------------

    def record_ends(self, episodes: Sequence[Episode]) -> None:
        """Stop the run if the rewards of too many episodes failed.

        Where none of the first episodes could be scored, a warning says so at once, and again
        after 2, 4, 8, ... such batches in a row.

        Args:
            episodes: that have just ended.

        Raises:
            TooManyRewardErrors: the limit is exceeded.
        """
        if self.entries.has_sources:
            ended = [each for each in episodes if kind_of(each.stop_reason) != StopReason.NO_DATA]
            self._watch.record([each.score for each in ended])
        if episodes:
            self._limit.record(episodes)

    # The end ------------------------------------------------------------------------------------

    def close_episodes(self, rows: Sequence[int] | None = None) -> None:
        """Give up the episodes that run in some rows, or all: what they hold is given back."""
        self.runner.close_rows(rows)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Give back what all rows hold, and close; an error on the way stops none of it."""
        self.is_closed = True
        run_all(
            [
                self.close_episodes,
                functools.partial(self.base_env.close, raise_if_closed=raise_if_closed),
                *[transform.close for transform in self.transforms_of(Transform)],
                self.calls.close,
            ]
        )


# The loop through one episode in an event loop, where none waits for another.
#
# Shape legend: N episodes of a group.

_OWN: Final = REWARD_KEYS | {"step_count"}
_HARMLESS: Final = (runner.EpisodeEntries, RewardErrorLimit, Compose, StepCounter)
_log = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """What a group was drawn with."""

    example: Mapping[str, Any] | None
    query: Any
    group_id: int


def prompt_of(episode: Episode) -> Prompt:
    """What an episode was drawn with, before it begins.

    Args:
        episode: drawn.
    """
    return Prompt(episode.example, episode.query, episode.group_id)


class TurnTaker(Protocol):
    """Takes the policy's turns; :class:`~torchrl_modules.AsyncPolicy` is one."""

    async def take_turn(
        self,
        conversation: Conversations,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
    ) -> tuple[Conversations, str]:
        """The conversation with a turn more, and why the turn ended."""
        ...


class AsyncEpisodeRunner:
    """Runs episodes of an environment one by one, through the same events as its steps do.

    ``draw`` and ``finish`` take the episodes of a group; everything between is each one's own.

    Args:
        env: its events, data, tools and limits.

    Raises:
        ValueError: a transform works on batches of steps, and there are none.
    """

    def __init__(self, env: "EpisodeEnv") -> None:
        env._find_parts()
        self._env = env
        self.calls = env.calls
        """Runs the calls of all episodes."""
        self._runner = env.runner
        self._turn_steps: list[Callable[[Episode], Any]] = []
        self._bounds: list[Callable[[Episode], Any]] = []
        self._late: list[Transform] = []
        run, dispatcher = self._runner.run_safely, self._runner.dispatcher
        first = [dispatcher] if dispatcher.sources else []
        for transform in [*first, *env.transforms_of(Transform)]:
            if isinstance(transform, EpisodeTransform):
                for event, its in (("before_turn", self._bounds), ("after_turn", self._turn_steps)):
                    if overrides(transform, event):
                        its.append(functools.partial(run, transform, event))
            elif REWARD in (transform.in_keys or ()):
                self._late.append(transform)
            elif not isinstance(transform, _HARMLESS):
                raise ValueError(
                    f"{type(transform).__name__} works on the steps of a batch, and here each "
                    "episode runs by itself. Write it as an EpisodeTransform, or collect in "
                    "batches (LLMCollector)."
                )

    def draw(self, num_episodes: int) -> list[Episode]:
        """New episodes with their examples; that there are no data for has a ``stop_reason``.

        Args:
            num_episodes: of one group.
        """
        episodes = [Episode(row) for row in range(num_episodes)]
        self._runner.draw(episodes)
        return episodes

    def draw_again(self, prompt: Prompt, seed: int, num_episodes: int) -> list[Episode]:
        """New episodes of a prompt that was drawn before.

        Args:
            prompt: what :func:`prompt_of` gave.
            seed: of the episodes.
            num_episodes: of one group.
        """
        episodes = [Episode(row) for row in range(num_episodes)]
        for episode in episodes:
            episode.example, episode.query, episode.group_id = prompt
            episode.seed, episode.stream = seed, stream_number(seed, episode.row)
        self._runner.hold(episodes)
        return episodes

    async def run(self, episode: Episode, policy: TurnTaker) -> None:
        """Take a drawn episode to its end; it is not scored yet, and holds what it holds.

        Args:
            episode: its ``stop_reason`` says afterwards why it is over.
            policy: takes its turns.

        Raises:
            EngineDied: the engine of the policy is gone.
        """
        drive, events = self._runner.drive, self._runner
        await drive(events.start, episode)
        try:
            base: Any = self._env.base_env
            episode.conversation = base.open(episode.query, episode.tools)
        except Exception as error:
            runner.fail(episode, error, self._env.base_env, "open")
        while not (episode.stop_reason or episode.is_done):
            episode.start_turn()
            for bound in self._bounds:
                if not (episode.stop_reason or episode.is_done):
                    await drive(bound, episode)
            if episode.stop_reason or episode.is_done:
                break
            episode.conversation, finish_reason = await policy.take_turn(
                episode.conversation, max_new_tokens=episode.max_new_tokens, session=episode.id
            )
            if events.took_turn(episode, finish_reason):
                for step in self._turn_steps:
                    await drive(step, episode)
                episode.end_turn()
        episode.settle()
        events.over([episode])

    def finish(self, episodes: Sequence[Episode]) -> TensorDictBase:
        """Score the episodes of a group, and give back what they hold; may take its time.

        Args:
            episodes: N, all of them over.

        Returns:
            ``[N]``, the entries of the step in which they ended.

        Raises:
            TooManyRewardErrors: the rewards of too many recent episodes failed.
        """
        try:
            for row, episode in enumerate(episodes):
                episode.row = row
            self._runner.finish(episodes)
            batch: TensorDictBase = TensorDict({}, batch_size=[len(episodes)])
            runner.write_flags(batch, episodes)
            self._env.entries.write_values(batch, episodes)
            self._env.entries.write_results(batch, episodes)
            for transform in self._late:
                # TorchRL's begin with the environment's batch, in which all rows are alike.
                start: TensorDictBase = TensorDict({}, batch_size=self._env.batch_size)
                start = transform._reset(start, start).reshape(-1)[[0] * len(episodes)]
                batch = transform._step(start, batch)
                runner.transform_past(transform, episodes)
        finally:
            self._runner.close(episodes)
        self._env.record_ends(episodes)
        return batch

    def give_up(self, episodes: Sequence[Episode]) -> None:
        """Give back what episodes hold that will not be finished; may take its time.

        Args:
            episodes: those that are closed already are left out.
        """
        self._runner.close(episodes)


def _check_reset(given: object) -> None:
    if given is not None and not isinstance(given, TensorDictBase):
        raise TypeError(
            f"reset takes a TensorDict, or nothing, got {type(given).__name__}: {given!r:.60}. "
            'A prompt of your own is its query: TensorDict({"query": ["..."]}, batch_size=[1]).'
        )


def _queries(batch: TensorDictBase) -> list[Any] | None:
    """What each row asks, in whatever form it is stored; ``None`` where there is nothing."""
    first = first_entries(batch)
    # The text of a query may be called text, as long as that is not the group of the text mode.
    held = [key for key in (keys.QUERY, keys.TEXT) if key in first.keys()]  # noqa: SIM118
    key = next((key for key in held if key == keys.QUERY or is_non_tensor(first.get(key))), None)
    if key is None:
        return None
    value = first.get(key)
    if isinstance(value, Tensor):
        rows = read_rows(batch, key)
        return None if rows is None else list(rows.split())
    if isinstance(value, History):
        return chats_of(batch.get(key), batch.numel(), who="ChatEnv.reset")
    return read_objects(batch, key)


def is_ids(query: Any) -> bool:
    """Whether a prompt is token ids: a tensor or a list of at least one."""
    if isinstance(query, Tensor):
        return query.ndim == 1 and not query.is_floating_point()
    return isinstance(query, Sequence) and set(map(type, query)) == {int}


def _with_message(prompt: Conversations, message: Message) -> Conversations:
    """One conversation with an assistant's message, which may go on in one that was begun."""
    if not waiting_rows(prompt)[0].goes_on:  # type: ignore[union-attr]
        return prompt.append_messages([[message]])
    *before, begun = prompt.messages(0)
    message = {**message, "content": begun["content"] + message["content"]}
    return Conversations.from_messages([[*before, message]], [prompt.tools(0)])


_EXAMPLE = [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]


class _PartSpec(NonTensor):
    """A part of conversations, in whatever form; the ids of a single row are a tensor."""

    def is_in(self, val: Any) -> bool:
        return isinstance(val, torch.Tensor) or super().is_in(val)


class ChatEnv(EnvBase):
    """A batch of conversations.

    ``reset`` opens each with the system prompt and the query; ``step`` makes the ``full``
    conversation the next ``prompt``. Transforms add data, tools, rewards and limits: with
    :meth:`append_transform` the result is an :class:`~torchrl_envs.EpisodeEnv`. By
    itself the environment never ends an episode, except for a row that could not be generated.

    ``reset`` reads ``query``, a string or a list of messages per row (in the mode ``"tokens"`` also
    token ids, which are the prompt as they are), ``step`` reads ``(input_mode, "full")`` and writes
    ``("next", input_mode, "prompt")``. In every mode the truth is one append-only record of tokens;
    text and token ids are what it looks like. A ``full`` that somebody else wrote is taken over to
    the token. Without a policy, ``text_response``, a string per row, is the assistant's turn.

    Args:
        input_mode: what prompts look like: ``"history"`` (messages), ``"text"`` (what the chat
            template renders) or ``"tokens"`` (its ids).
        batch_size: any shape, ``()`` too; B is the number of its elements.
        tokenizer: spells conversations out; needed for text and tokens. The policy must have the
            same.
        system_prompt: content of a first message of the system role.
        template_kwargs: passed to the chat template.
        system_role: name of the system's role.
        user_role: the role of a query that is a string.
        tool_call_format: how the model writes tool calls, see
            :func:`~torchrl_data.tool_calls.parser.tool_call_parser`; what the chat template
            teaches when not given: the tokenizer's, or without one that of the policy that a
            collector has.

    Raises:
        ValueError: there is no such mode, it needs a tokenizer, the batch has no row, or
            there is no such format.
        TypeError: the system prompt is no string.

    Examples:
        >>> env = ChatEnv(batch_size=(2,), system_prompt="Be brief.")
        >>> batch = env.reset(TensorDict({"query": ["Hello", "Bye"]}, batch_size=[2]))
        >>> [list(contents) for contents in batch["history"].prompt.content]
        [['Be brief.', 'Hello'], ['Be brief.', 'Bye']]
    """

    __signature__ = OwnSignature()

    def __init__(
        self,
        *,
        input_mode: str = HISTORY,
        batch_size: Sequence[int] | int = (1,),
        tokenizer: PreTrainedTokenizerBase | None = None,
        system_prompt: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        system_role: str = "system",
        user_role: str = "user",
        tool_call_format: str | TurnParser | None = None,
    ) -> None:
        size = torch.Size((batch_size,) if isinstance(batch_size, int) else tuple(batch_size))
        if size.numel() < 1 or min(size, default=1) < 1:
            raise ValueError(f"ChatEnv: batch_size must have at least one row, got {tuple(size)}.")
        one_of("input_mode", input_mode, keys.INPUT_MODES, who="ChatEnv")
        if not isinstance(system_prompt, str | None):
            raise TypeError(f"ChatEnv: system_prompt must be a string, got {system_prompt!r:.80}.")
        if tokenizer is None and input_mode != HISTORY:
            raise ValueError(
                f"ChatEnv: input_mode={input_mode!r} shows what the tokenizer's chat template "
                "makes of a conversation: give tokenizer=."
            )
        super().__init__(batch_size=size)
        self.input_mode = input_mode
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs
        self._encoder: ConversationEncoder | None = None
        self.system_prompt = system_prompt
        self.parse_turn: TurnParser = tool_call_parser(tool_call_format, tokenizer)
        self.takes_format_of_policy: bool = tool_call_format is None and tokenizer is None
        """Nothing says yet how the model writes tool calls; the policy's chat template does."""
        self._system_role, self._user_role = system_role, user_role
        example: Any = Conversations.from_messages([_EXAMPLE] * size.numel())
        self._speller = None if input_mode == HISTORY else self.encoder
        if self._speller is not None:
            ids = self._speller.encode_chats([_EXAMPLE])[0].ids
            row = self._speller.decode([ids])[0] if input_mode == keys.TEXT else ids
            example = [row] * size.numel()
        part = _PartSpec(shape=size, example_data=example)
        for spec, which in (("observation_spec", keys.PROMPT), ("full_action_spec", keys.FULL)):
            parts = Composite({which: part.clone()}, shape=size)
            setattr(self, spec, Composite({input_mode: parts}, shape=size))
        self.full_reward_spec = Composite(shape=size)
        flag = Binary(n=1, shape=torch.Size((*size, 1)), dtype=torch.bool)
        flags = {key: flag.clone() for key in (keys.DONE, keys.TERMINATED, keys.TRUNCATED)}
        self.full_done_spec = Composite(flags, shape=size)

    @property
    def encoder(self) -> ConversationEncoder:
        """Spells conversations out; made when it is first used.

        Raises:
            ValueError: the environment has no tokenizer.
        """
        if self._encoder is None:
            if self.tokenizer is None:
                raise ValueError("ChatEnv needs a tokenizer for this: give tokenizer=.")
            self._encoder = ConversationEncoder(
                self.tokenizer, chat_template_kwargs=self.template_kwargs
            )
        return self._encoder

    def __repr__(self) -> str:
        told = {"batch_size": tuple(self.batch_size), "input_mode": self.input_mode}
        if self.system_prompt is not None:
            told["system_prompt"] = reprlib.repr(self.system_prompt).strip("'\"")
        values = ", ".join(f"{name}={value!r}" for name, value in told.items())
        return f"{type(self).__name__}({values})"

    def append_transform(self, transform: Transform) -> EpisodeEnv:  # type: ignore[override]
        """Add a transform.

        Returns:
            An environment with the transform appended.
        """
        return EpisodeEnv(self, transform)

    def open(self, query: Any, tools: Any) -> Conversations:
        """The conversation that one query starts.

        Args:
            query: a string, messages or token ids, as ``reset`` reads it.
            tools: JSON schemas that the prompt shows, or ``None``.

        Raises:
            TypeError: the query is of the wrong type.
        """
        system = {"role": self._system_role, "content": self.system_prompt}
        if isinstance(query, str):
            messages = [{"role": self._user_role, "content": query}]
        elif isinstance(query, Sequence) and query and all(isinstance(m, dict) for m in query):
            messages = [dict(message) for message in query]
        elif self.input_mode == keys.TOKENS and is_ids(query):
            # Token ids are the prompt as they are, after the system prompt if there is one.
            ids = [int(index) for index in query]
            if self.system_prompt is not None:
                ids = [*self.encoder.encode_chats([[system]])[0].ids, *ids]
            return prompt_of_tokens([ids], self.encoder)
        else:
            also = ", or token ids" if self.input_mode == keys.TOKENS else ""
            raise TypeError(
                'ChatEnv.reset: a query is a string or a list of messages ({"role": ..., '
                f'"content": ...}}){also}, got {type(query).__name__}: {query!r:.80}.'
            )
        if self.system_prompt is not None and messages[0].get("role") != self._system_role:
            messages = [system, *messages]
        return Conversations.from_messages([messages], [tools], goes_on=True)

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Begin a conversation in each row: see ``EnvBase.reset`` of TorchRL.

        Args:
            tensordict: ``query``, a string or messages for each row, and perhaps ``tools``.
            **kwargs: as TorchRL's.

        Raises:
            MissingEntryError: there is no query.
            TypeError: it is no TensorDict.
        """
        _check_reset(tensordict)
        return super().reset(tensordict, **kwargs)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        del kwargs
        size = self.batch_size.numel()
        queries = None if tensordict is None else _queries(tensordict)
        if tensordict is None or queries is None:
            raise MissingEntryError(
                "ChatEnv.reset reads 'query', which the input lacks. Append a DataLoadingPrimer, "
                'or call env.reset(TensorDict({"query": ["..."]}, batch_size=env.batch_size)).'
            )
        mask = tensordict.get("_reset", None)
        rows = list(range(size)) if mask is None else mask.view(-1).nonzero().view(-1).tolist()
        tools = read_objects(tensordict, keys.TOOLS)
        prompt = Conversations.cat([self.open(queries[row], tools[row]) for row in rows])
        if len(rows) < size:
            # TorchRL hides the rows that go on from the reset, and puts them back itself.
            kept = Conversations.from_messages([[]] * size)
            if has_entry(tensordict, (self.input_mode, keys.PROMPT)):
                kept = read_conversations(tensordict, keys.PROMPT, who="ChatEnv.reset")
            index = list(range(size))
            for new, row in enumerate(rows):
                index[row] = size + new
            prompt = Conversations.cat([kept, prompt])[index]
        out = TensorDict(self.full_done_spec.zero(), batch_size=self.batch_size)
        self._write_prompt(out, prompt)
        return out

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        full = self._read_full(tensordict)
        active = active_rows(tensordict)
        if not bool(active.all()):
            # Rows that take no part in a step stay where they were.
            prompt = read_conversations(tensordict, keys.PROMPT, who="ChatEnv.step")
            own = torch.arange(len(full))
            full = Conversations.cat([full, prompt])[torch.where(active, own, own + len(full))]
        # A row that nobody answered could not be generated, or its messages not be encoded.
        unanswered: list[bool] = []
        for row in range(len(full)):
            at = full.position(row)
            role = full.last_message(row)["role"] if at.num_messages else ""
            unanswered.append(at.awaits_response or role != "assistant")
        failed = (torch.tensor(unanswered) & active).view(*self.batch_size, 1)
        flags = {
            keys.DONE: failed,
            keys.TERMINATED: torch.zeros_like(failed),
            keys.TRUNCATED: failed.clone(),
        }
        out = TensorDict(flags, batch_size=self.batch_size)
        self._write_prompt(out, full)
        return out

    def _read_full(self, batch: TensorDictBase) -> Conversations:
        stored = stored_conversations(batch, self.input_mode, keys.FULL)
        if stored is not None:
            return stored.conversations
        if has_entry(batch, (self.input_mode, keys.FULL)):
            return read_fulls(
                batch, self.input_mode, encoder=self._speller, who="ChatEnv.step"
            )
        if batch.get(keys.TEXT_RESPONSE, None) is None:
            raise MissingEntryError(
                f"ChatEnv.step reads {(self.input_mode, keys.FULL)}, which a policy writes, or "
                f"{keys.TEXT_RESPONSE!r}, a string per row. The batch holds {entries_of(batch)}."
            )
        return self._with_text(batch, read_objects(batch, keys.TEXT_RESPONSE))

    def _with_text(self, batch: TensorDictBase, texts: Sequence[str]) -> Conversations:
        """The prompts with what somebody said as the assistant."""
        prompt = read_conversations(batch, keys.PROMPT, who="ChatEnv.step")
        if self.tokenizer is not None:
            texts = [self.encoder.without_end(text) for text in texts]
        said = [{"role": "assistant", "content": text} for text in texts]
        if self.input_mode == HISTORY and not any(at.awaits_response for at in prompt.positions):
            # Nothing has shown its tokens yet: they are made when a policy asks.
            return Conversations.cat(
                [_with_message(prompt.row(row), message) for row, message in enumerate(said)]
            )
        ids = [self.encoder.encode_turn(text, close=True)[0] for text in texts]
        turns = [Turn(own, None, message) for own, message in zip(ids, said, strict=True)]
        return self.encoder.encode_waiting(prompt).append_turns(turns)

    def _write_prompt(self, batch: TensorDictBase, prompt: Conversations) -> None:
        write_conversations(
            batch, keys.PROMPT, prompt, mode=self.input_mode, encoder=self._speller
        )

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random here; data loading and the policy have their own seeds."""

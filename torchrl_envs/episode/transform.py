"""What takes part in an episode.

Transforms with events, of one episode or of whole trajectories, and the tools that they bring.
"""

import functools
import re
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.envs import Transform

from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import POSITIVE, check_counts, check_numbers
from torchrl_data.keys import ASSISTANT_MASK, FULL, LOG_PROBS_FULL, REWARD
from torchrl_data.messages import Message
from torchrl_data.missing_entry import MissingEntryError
from torchrl_data.ragged.packed import read_images
from torchrl_data.ragged.token_entries import TokenEntries
from torchrl_data.tool_calls.parser import TurnParser
from torchrl_data.tool_calls.records import MalformedCall, ToolCall
from torchrl_envs.concurrency import Call, ConcurrentCalls, EpisodeLostError, Outcome
from torchrl_envs.entries import RowReward, copied_rows, dense_reward, joined_rows
from torchrl_envs.tool_results import (
    MAX_RESULT_BYTES,
    as_text,
    environment_error,
    error_text,
    result_text,
)

from .episode import Episode, PendingCall, PendingCalls, Resources, ToolCallRecord

if TYPE_CHECKING:
    from torchrl_envs.tool_schemas import Tool

# What a transform can do in the course of an episode, beside transforming entries.
#
# Shape legend: B rows.

T = TypeVar("T", bound=Transform)
Event = Awaitable[None] | None
"""What an event returns: nothing, or a coroutine that awaits ``self.call(...)``."""


class EpisodeEnvironment(Protocol):
    """An environment that runs episodes."""

    base_env: Any
    """A :class:`~torchrl_envs.ChatEnv`, usually."""
    calls: ConcurrentCalls
    """Runs the calls of tools, environments and rewards."""

    @property
    def batch_size(self) -> torch.Size:
        """Of the episodes that run at once."""
        ...

    def transforms_of(self, kind: type[T]) -> Iterator[T]:
        """The transforms of a class, in order."""
        ...

    def resources_in(self, row: int) -> Resources:
        """What the episode holds that runs in a row; nothing if none does."""
        ...


class EpisodeTransform(ChecksAttributes, Transform):
    """A transform that an :class:`~torchrl_envs.EpisodeEnv` tells about its episodes.

    The events of an :class:`~torchrl_envs.Episode`, in this order, whatever the order in which
    transforms were appended:

    1. ``draw``: the episode gets its example, group and seed;
    2. ``begin``: it starts, and may add to the query; an episode in which that raises takes part
       in nothing more, and its first step ends it;
    3. ``before_turn``: the next turn is bounded, or is not to be;
    4. ``after_turn``: the policy has ended its turn, and the calls of all :class:`ToolSource` have
       run; it may answer, end the episode, or let it go on;
    5. ``finish``: an episode that is over is scored. Then what it held is given back.

    An event works on one episode. It may be ``async`` and ``await self.call(...)``: what many
    episodes wait for runs at once. What is cheaper for many at once overrides ``finish_batch``. An
    episode in which ``before_turn`` or ``after_turn`` raises ends there, truncated and unscorable,
    and the others go on; what ``finish`` raises, or ``draw``, ends the run.

    Example:
        >>> class Doubt(EpisodeTransform):
        ...     def after_turn(self, episode):
        ...         if episode.num_turns == 1:
        ...             episode.say({"role": "user", "content": "Are you sure?"})
        >>> data = DataLoadingPrimer([{"prompt": "2 + 2?"}])
        >>> env = ChatEnv(batch_size=(1,)).append_transform(data).append_transform(Doubt())
        >>> out = env.step(env.reset().set("text_response", ["4"]))["next"]
        >>> [message["content"] for message in out["history"].prompt.to_chats()[0]]
        ['2 + 2?', '4', 'Are you sure?']
    """

    key: str = ""
    """Its name, which an environment gives it: where it keeps what it remembers of an episode."""
    only_for: Callable[[Episode], bool] | None = None
    """Says in which episodes it takes part; ``None``: in all."""
    required_columns: Sequence[str] = ()
    """Columns that the data must have; their loader checks them."""
    answers_cut_turns: bool = False
    """Whether ``after_turn`` is to see a turn that a limit of tokens cut. Where no transform of an
    episode wants that, such a turn ends the episode."""
    keeps_prompt: bool = False
    """Whether ``begin`` and ``before_turn`` leave the data's prompt as it is, or add to it: one
    that is too long for the model stays so, and is left out when it is drawn."""
    longest_prompt: int | None = None
    """The most tokens of a prompt after which a turn may begin; rows of the data with a longer one
    are left out when they are drawn. ``None``: no bound but the model's."""

    def concerned(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        """Those of some episodes in which it takes part.

        Args:
            episodes: with their examples.
        """
        if self.only_for is None:
            return episodes
        return [episode for episode in episodes if self.only_for(episode)]

    def takes_part_in_row(self, row: Mapping[str, Any]) -> bool:
        """Whether it takes part in the episodes that start from a row of the data.

        Args:
            row: of the data.
        """
        if self.only_for is None:
            return True
        episode = Episode()
        episode.example = row
        return bool(self.only_for(episode))

    @property
    def by_token(self) -> bool:
        """Whether it can make ``reward`` dense, ``[B, T, 1]``, at the end of an episode."""
        return False

    def extra_repr(self) -> str:
        """What it does, in the ``repr`` of an environment: its rewards and tools, say."""
        rewards = list(getattr(self, "reward_names", ()))
        return f"rewards={rewards}" if rewards else ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    # Events -------------------------------------------------------------------------------------

    def check(self, env: EpisodeEnvironment) -> None:
        """Raise if the composition can't work; called before the first reset."""

    def check_policy(self, policy: Any) -> None:
        """Raise if what the policy says would be misread; called by a collector at construction."""

    def draw(self, episodes: Sequence[Episode]) -> None:
        """Give some episodes their ``example``, ``query``, ``group_id`` and ``seed``, in order."""

    def begin(self, episode: Episode) -> Event:
        """Start an episode; may change its ``query`` and ``tools``, and add to its resources.

        Raises:
            Exception: it can't begin: it ends by itself, with ``stop_reason``
                ``"environment_error: <where>: <type>: <message>"``.
        """

    def before_turn(self, episode: Episode) -> Event:
        """Bound the next turn of an episode (``max_new_tokens``), or truncate it."""

    def after_turn(self, episode: Episode) -> Event:
        """The policy has spoken: answer, end the episode, or let it go on."""

    def over(self, episode: Episode) -> None:
        """An episode is over; others of its group may run on before it is scored. Comes twice."""

    def finish(self, episode: Episode) -> Event:
        """Score an episode that is over."""

    def finish_batch(self, episodes: Sequence[Episode]) -> None:
        """The same for several episodes, where that is cheaper."""

    def export(self, batch: TensorDictBase, episodes: Sequence[Episode]) -> None:
        """Write further entries of a step, of the episodes that have just ended in it.

        Args:
            batch: ``[B]``; what is written is declared in ``transform_reward_spec``.
            episodes: their ``row`` is that of the batch; may be none.
        """

    # What it works with -------------------------------------------------------------------------

    def call(
        self, *functions: Call, timeout_s: float, lane: Hashable = None
    ) -> Awaitable[list[Outcome]]:
        """Run functions without arguments, sync or ``async``, one after the other.

        Args:
            *functions: sync ones run on the environment's threads, async ones on its loop.
            timeout_s: deadline of each, in seconds from when it starts; none starts after one that
                missed its own.
            lane: calls of this transform with equal lanes run one after the other, also those of
                several episodes; the episode's own when not given.

        Returns:
            An outcome for each.
        """
        own = lane if lane is not None else object()
        return PendingCalls([PendingCall(f, timeout_s, (id(self), own)) for f in functions])

    def call_all(self, *functions: Call, timeout_s: float) -> Awaitable[list[Outcome]]:
        """Run functions without arguments, sync or ``async``, all at once; see :meth:`call`.

        Returns:
            An outcome for each.
        """
        return PendingCalls([PendingCall(f, timeout_s, None) for f in functions])

    @property
    def calls(self) -> ConcurrentCalls:
        """Runs calls, sync and async, on the threads and the one loop of the environment."""
        return self._environment().calls

    @property
    def in_environment(self) -> bool:
        """Whether it belongs to an environment, and not to a replay buffer or nothing."""
        try:
            return self.container is not None
        except ValueError:  # TorchRL's, for a Compose that belongs to no environment.
            return False

    def env_transforms(self, kind: type[T]) -> list[T]:
        """The transforms of a class in the environment that this one belongs to."""
        return list(self._environment().transforms_of(kind))

    def _environment(self) -> EpisodeEnvironment:
        container: Any = self.container
        if container is None or not hasattr(container, "resources_in"):
            raise self._misplaced()
        return container

    def _step(self, *_: Any, **__: Any) -> Any:
        """Called by a plain ``TransformedEnv`` only, which would leave the episodes out: raises."""
        raise self._misplaced()

    _reset_env_preprocess = _step

    def _misplaced(self) -> RuntimeError:
        return RuntimeError(
            f"{type(self).__name__} works inside an EpisodeEnv only: use "
            "ChatEnv(...).append_transform(...) instead of TransformedEnv(...)."
        )


def overrides(transform: EpisodeTransform, event: str) -> bool:
    """Whether a transform takes part in an event.

    Args:
        transform: any.
        event: the name of the method.
    """
    return getattr(type(transform), event) is not getattr(EpisodeTransform, event)


class OpenedTurns:
    """Knows what prompts open of the assistant's turns: a part of a transform that reads them."""

    opened_text: str = ""
    """What every turn of the policy begins with, though the prompt has it: ``<think>``, say."""

    def note_encoder(self, encoder: Any) -> None:
        """Take over what the prompts of an environment, or of a policy, open.

        Args:
            encoder: a :class:`~torchrl_data.ConversationEncoder`, or ``None``.
        """
        if encoder is not None:
            self.opened_text = encoder.opened_text

    def note_environment(self, env: EpisodeEnvironment) -> None:
        """The same of an environment that spells its prompts out itself.

        Args:
            env: may have a tokenizer.
        """
        if getattr(env.base_env, "tokenizer", None) is not None:
            self.note_encoder(env.base_env.encoder)


class EpisodeStartError(Exception):
    """An episode can't begin.

    Args:
        where: what failed: an environment and what was called, a server.
    """

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


# Transforms of the tokens of finished trajectories, wherever trajectories pass.
#
# Shape legend: B rows, T tokens of a row (ragged).


@dataclass
class TokenRow:
    """One trajectory: its tokens, what is known of each, and what a transform adds."""

    ids: Tensor
    """int64 ``[T]``."""
    assistant_mask: Tensor
    """bool ``[T]``, True on sampled tokens."""
    find: Callable[[NestedKey], Tensor | None]
    """Looks an entry up, ``[T]`` or ``None``."""
    who: str
    """The transform, named in errors."""
    images: Sequence[str] = ()
    """Of its prompt, in base 64."""
    results: dict[NestedKey, Tensor] = field(default_factory=dict)
    """Entries to be written, ``[T]`` each."""
    penalty: Tensor | None = None
    """What the reward gets in addition, float32 ``[T]``."""

    def read(self, key: NestedKey) -> Tensor:
        """An entry aligned with the tokens, ``[T]``.

        Raises:
            MissingEntryError: nobody has written it.
        """
        value = self.results.get(key)
        value = self.find(key) if value is None else value
        if value is None:
            raise MissingEntryError(
                f"{self.who} reads {key!r}, which nobody has written. Run the transform that "
                "writes it first (RetrieveLogProb, say)."
            )
        return value


class TrajectoryTransform(EpisodeTransform):
    """Adds per-token entries to trajectories, and perhaps a penalty to their rewards.

    It can stand in three places, and does the same work once in each:

    - in an environment: at the end of an episode, on that trajectory;
    - as the ``postproc`` of a collector, or called by hand: on a batch of trajectories;
    - in a replay buffer: when trajectories come in (before ``MCAdvantage``, if that stands before
      it in a ``Compose``, because inverse transforms run last to first), or, for rows that lack the
      entries, when they are sampled.

    Entries go under ``"next"``, as TorchRL's losses read them. The input is not changed.
    """

    results: tuple[NestedKey, ...] = ()
    """The entries that :meth:`score` adds."""
    penalty_name = "penalty"
    """What the penalty is called among the rewards."""
    dense = True
    """Whether the penalty stays with its tokens, or is summed over the trajectory."""

    @property
    def by_token(self) -> bool:
        """Whether a penalty stays with its tokens."""
        return self.dense

    def score(self, rows: Sequence[TokenRow]) -> None:
        """Add results, and perhaps a penalty, to each row."""
        raise NotImplementedError

    # In an environment --------------------------------------------------------------------------

    def finish_batch(self, episodes: Sequence[Episode]) -> None:
        """Work on the trajectories that have just ended, every row of each."""
        found: list[list[TokenRow]] = []
        for episode in episodes:
            found.append([])
            end = 0
            for row in episode.rows:
                start, end = end, end + row.num_tokens(0)
                known = {key: values[start:end] for key, values in episode.token_entries.items()}
                find = {**known, LOG_PROBS_FULL: row.log_probs(0)}.get
                ids, mask = row.token_ids(0), row.assistant_mask(0)
                found[-1].append(TokenRow(ids, mask, find, self._get_name(), row.images(0)))
        self.score([row for rows in found for row in rows])
        for episode, rows in zip(episodes, found, strict=True):
            for key in self.results:
                episode.token_entries[key] = torch.cat([row.results[key].detach() for row in rows])
            penalties = [row.penalty.detach() for row in rows if row.penalty is not None]
            if penalties:
                total = torch.cat(penalties)
                reward = RowReward(total if self.dense else float(total.sum()))
                episode.score.add(self.penalty_name, reward, scores=False)

    # On a batch of trajectories -----------------------------------------------------------------

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Work on trajectories that lack the results; give the others back as they are.

        Args:
            tensordict: rows with ``("tokens", "full")``, ``("masks", "all_assistant_mask")`` and
                what the transform reads, ragged or padded (with an attention mask).

        Returns:
            A batch of the same size with the results.
        """
        rows = copied_rows(tensordict)
        if self.results and all(rows[0].get(_next(key), None) is not None for key in self.results):
            return tensordict
        who = self._get_name()
        entries = TokenEntries(tensordict, FULL, who=who)
        masks = entries.aligned(ASSISTANT_MASK)  # type: ignore[arg-type]
        if masks is None:
            raise MissingEntryError(
                f"{who} reads {ASSISTANT_MASK}, which the batch lacks: it says which tokens the "
                "policy sampled."
            )
        keeps: Sequence[Tensor | None] = entries.keep or [None] * len(rows)
        found = [
            TokenRow(
                torch.tensor(ids),
                mask.bool(),
                functools.partial(_find, row, keep),
                who,
                images=[image for its in read_images(row) or () for image in its],
            )
            for ids, mask, row, keep in zip(entries.ids(), masks, rows, keeps, strict=True)
        ]
        self.score(found)
        for row, tokens, keep in zip(rows, found, keeps, strict=True):
            for key in self.results:
                row.set(_next(key), _padded(tokens.results[key], keep))
            if tokens.penalty is not None:
                self._add_penalty(row, tokens.penalty.detach(), tokens.assistant_mask, keep)
        return joined_rows(rows, tensordict.batch_size)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        # An environment passes what a step starts from: there is nothing to do yet.
        if tensordict is None or self.in_environment:
            return tensordict
        return self.forward(tensordict)

    def _add_penalty(
        self, row: TensorDictBase, penalty: Tensor, mask: Tensor, keep: Tensor | None
    ) -> None:
        key = REWARD if row.get(REWARD, None) is not None else ("next", REWARD)
        reward = row.get(key, None)
        if reward is None:
            raise MissingEntryError(
                f"{self._get_name()} adds to {REWARD!r}, which the batch lacks. Use "
                "add_to_reward=False to keep the entry only."
            )
        if not self.dense and reward.numel() == 1:
            row.set(key, reward + penalty.sum())
            return
        if not self.dense:
            penalty = dense_reward(penalty.sum(), None, mask).squeeze(-1)
        if keep is not None and reward.numel() == len(keep):
            reward = reward[keep]
        row.set(key, _padded(dense_reward(reward, penalty, mask), keep))


def _next(key: NestedKey) -> NestedKey:
    return unravel_key(("next", key))  # type: ignore[return-value]


def _find(row: TensorDictBase, keep: Tensor | None, key: NestedKey) -> Tensor | None:
    value = row.get(_next(key), None)
    value = row.get(key, None) if value is None else value
    return value if keep is None or value is None else value[keep]


def _padded(values: Tensor, keep: Tensor | None) -> Tensor:
    """Values back among the padding, 0 there."""
    if keep is None:
        return values
    out = values.new_zeros(len(keep), *values.shape[1:])
    return out.index_put((keep.nonzero().squeeze(-1),), values)


_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Answer(NamedTuple):
    """What the environment says to something in the policy's turn.

    Example:
        >>> class Dice(ToolSource):
        ...     def read_turn(self, episode, text):
        ...         if "<roll>" in text:
        ...             return [Answer({"role": "user", "content": "You rolled a 4."})]
        ...         return [Answer(None, stop_reason="done")]
        >>> data = DataLoadingPrimer([{"prompt": "Roll."}])
        >>> env = ChatEnv(batch_size=(2,)).append_transform(data).append_transform(Dice())
        >>> out = env.step(env.reset().set("text_response", ["<roll>", "No."]))["next"]
        >>> out["history"].prompt.to_chats()[0][-1], out["stop_reason"]
        ({'role': 'user', 'content': 'You rolled a 4.'}, ['', 'environment_done: done'])
    """

    message: Message | None
    """Appended to the conversation, of whatever role the source chooses; ``None`` says nothing. A
    turn that nobody answers with a message ends its episode."""
    is_error: bool = False
    """Counted in ``num_tool_errors``."""
    stop_reason: str = ""
    """If not empty, the episode ends here, for this reason: a :class:`~torchrl_data.StopReason`, or
    words of your own, which become its detail (``environment_done: solved``)."""
    is_truncation: bool = False
    """Whether that end is not the episode's own: it is truncated, not terminated."""
    position: int = 0
    """Where in the turn's text its cause is, in characters: answers are in this order."""
    tool: str = ""
    """Whose answer it is, for the record; the dispatcher fills it in where it is empty."""


class Job(NamedTuple):
    """Something to run because of the policy's turn, and how its outcome is put."""

    call: Call
    """Takes no arguments; sync, or ``async`` (a coroutine function or a partial of one)."""
    phrase: Callable[[Outcome], Answer]
    """Turns the outcome into an answer. An error of the call, or a missed deadline, is in
    ``outcome.error``; must not raise. The answer's place is the job's."""
    timeout_s: float
    """Deadline of the call, seconds from when it starts."""
    lane: Hashable = None
    """Jobs of one source with equal lanes run in the order in which they were written, and none
    starts after one that missed its deadline; those of different lanes, and those without one,
    run at the same time. A source whose state belongs to the episode uses its ``id``."""
    position: int = 0
    """Where in the turn's text it was asked for, in characters: answers are in this order."""
    tool: str = ""
    """What is run, for the record; the dispatcher fills it in where it is empty."""


class ToolSource(EpisodeTransform):
    """Base class of everything that runs because of what the policy wrote.

    All sources of an environment share one dispatcher, which sees a turn once. There are two ways
    to take part, and a source may do both:

    *Tools that are called in the model's own format* (JSON in ``<tool_call>`` and the like).
    Override :meth:`tool_names`, :meth:`tools_of` and :meth:`bind`. The dispatcher parses the turn,
    finds the source that owns the name, checks the arguments against the schema, and asks the owner
    for a :class:`Job`. A call that is malformed, or of a tool that nobody has, is answered once by
    the dispatcher. No two sources may have tools of the same name.

    *What is in the text itself* (code blocks, a request syntax, an action for a remote
    environment). Override :meth:`read_turn`: given the text of the policy's turn, which jobs, and
    how is each outcome put (role, content, whether the episode ends).

    The dispatcher runs the jobs of all episodes and sources at once, each with its deadline, and
    appends the answers of an episode in the order of ``position``. Only the policy's turn is read,
    never an answer. Jobs run on the threads and the event loop of ``self.calls``, which all parts
    of the environment share: what an async ``reset`` opened there, an async tool can use. The jobs
    of a turn run before the other transforms see the step, even if the turn is the last one.

    Lifecycle: make what an episode needs in ``begin`` (``await self.call(...)`` for what blocks)
    and add it to ``episode.resources`` with what gives it back: that happens once, when the episode
    has been scored, given up or the environment is closed. What belongs to all episodes is given
    back in ``close``.

    Args:
        timeout_s: deadline of one call, in seconds.
        max_result_bytes: longer results are cut, with a mark; bytes of UTF-8.
        show_schemas: whether the chat template shows the tools to the model.

    Raises:
        ValueError: a number is not positive.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 30.0,
        max_result_bytes: int = MAX_RESULT_BYTES,
        show_schemas: bool = True,
    ) -> None:
        super().__init__()
        check_numbers(type(self).__name__, POSITIVE, timeout_s=timeout_s)
        check_counts(type(self).__name__, max_result_bytes=max_result_bytes)
        self.timeout_s = timeout_s
        self.max_result_bytes = max_result_bytes
        self.show_schemas = show_schemas
        self._offered: Mapping[str, Tool] = {}
        """What every episode may call, by name."""

    # Tools that are called in the model's format --------------------------------------------------

    def tool_names(self) -> Mapping[str, str]:
        """Every tool that any episode may have, and who owns it, as an error would name it."""
        return dict.fromkeys(self._offered, type(self).__name__)

    def tools_of(self, episode: Episode) -> Mapping[str, "Tool"]:
        """An episode's tools, by name; called for every turn, so it must be cheap."""
        del episode
        return self._offered

    def bind(self, episode: Episode, call: ToolCall) -> Job:
        """A call of one of the episode's tools, ready to run; its arguments fit the schema."""
        raise NotImplementedError(f"{type(self).__name__} offers tools but has no bind().")

    def extra_repr(self) -> str:
        """Its tools, and its rewards if it has any."""
        tools = [f"tools={list(self.tool_names())}"] if self.tool_names() else []
        return ", ".join([*tools, *filter(None, [super().extra_repr()])])

    def job(self, call: ToolCall, function: Callable[..., Any], *, lane: Hashable = None) -> Job:
        """A job with this source's deadline and cap, answered with a ``tool`` message.

        What the function returns is made text where it runs, under the deadline. An
        :class:`~torchrl_envs.concurrency.EpisodeLostError` ends the row.

        Args:
            call: what the model asked for.
            function: takes no arguments.
            lane: see :class:`Job`.
        """

        def phrase(outcome: Outcome) -> Answer:
            error = outcome.error
            if error is None:
                return Answer(tool_message(call, outcome.value))
            is_lost = isinstance(error, EpisodeLostError)
            reason = environment_error(error) if is_lost else ""
            return Answer(tool_message(call, result_text(outcome)), True, reason, is_lost)

        return Job(as_text(function, self.max_result_bytes), phrase, self.timeout_s, lane)

    # What is in the text --------------------------------------------------------------------------

    def read_turn(self, episode: Episode, text: str) -> Sequence[Job | Answer]:
        """What a turn asks for by its text.

        Must be total: any text gives jobs and answers (an :class:`Answer` needs nothing to run,
        for instance a complaint about a malformed request), never an exception.

        Args:
            episode: whose turn it is.
            text: what the policy wrote, without the stop token.
        """
        del episode, text
        return ()


def tool_message(call: ToolCall | None, content: str) -> Message:
    """A message of the ``tool`` role.

    Args:
        call: what it answers; ``None`` for a call that could not be read.
        content: its text.
    """
    message: Message = {"role": "tool", "content": content}
    if call is not None:
        # Both are the model's words, and templates write them into the scaffold.
        if _WORD.fullmatch(call.name):
            message["name"] = call.name
        if call.id is not None and _WORD.fullmatch(call.id):
            message["tool_call_id"] = call.id
    return message


class ToolDispatcher(EpisodeTransform):
    """Answers the turns of episodes with what all sources of tools say.

    Args:
        parse: finds the calls of a turn, in the model's format.
    """

    changeable = frozenset({"parse"})

    def __init__(self, parse: TurnParser) -> None:
        super().__init__()
        self.parse = parse
        self.sources: Sequence[ToolSource] = ()
        """All sources of the environment, in order; the runner keeps it up to date."""

    def after_turn(self, episode: Episode) -> Event:
        """Answer a turn: run what it asks for, say what comes of it in order, and count it.

        Args:
            episode: that has just taken one; nothing happens where the policy did not speak last.
        """
        if (message := episode.last_message)["role"] != "assistant":
            return None
        text: str = message["content"]
        items: list[Job | Answer] = []
        tools: dict[int, Mapping[str, Tool]] = {}
        for number, source in enumerate(self.sources):
            if source.concerned([episode]):
                tools[number] = source.tools_of(episode)
        if any(tools.values()):
            _, calls, places = self.parse(text)
            for call, at in zip(calls, places or [0] * len(calls), strict=True):
                items.append(self._bind(tools, episode, call, at))
        for number in tools:
            source = self.sources[number]
            for item in source.read_turn(episode, text):
                # Lanes belong to their source.
                if isinstance(item, Job) and item.lane is not None:
                    item = item._replace(lane=(number, item.lane))
                items.append(item._replace(tool=item.tool or type(source).__name__))
        items.sort(key=lambda item: item.position)
        return self._answer(episode, items) if items else None

    async def _answer(self, episode: Episode, items: Sequence[Job | Answer]) -> None:
        """Run what a turn asks for, of all sources, and put it in the order of the text."""
        pending = [PendingCall(i.call, i.timeout_s, i.lane) for i in items if isinstance(i, Job)]
        outcomes = iter(await PendingCalls(pending) if pending else ())
        messages: list[Message] = []
        end: Answer | None = None  # the first that ends the episode says why
        for item in items:
            outcome = next(outcomes) if isinstance(item, Job) else Outcome()
            answer = item.phrase(outcome) if isinstance(item, Job) else item
            episode.num_tool_calls += 1
            episode.num_tool_errors += answer.is_error
            record = ToolCallRecord(item.tool, episode.num_turns, outcome.seconds, answer.is_error)
            episode.tool_calls = (*episode.tool_calls, record)
            if answer.message is not None:
                messages.append(answer.message)
            if answer.stop_reason and end is None:
                end = answer
        if messages:
            episode.say(*messages)
        if end is not None:
            (episode.truncate if end.is_truncation else episode.terminate)(end.stop_reason)

    def _bind(
        self,
        tools: Mapping[int, Mapping[str, "Tool"]],
        episode: Episode,
        call: ToolCall | MalformedCall,
        position: int,
    ) -> Job | Answer:
        """A call that is ready to run, or what is wrong with it; ``tools`` of each source."""
        if isinstance(call, MalformedCall):
            return _refusal(None, f"malformed tool call: {call.error}", position)
        for number, own in tools.items():
            tool = own.get(call.name)
            if tool is not None:
                if call.is_text:
                    call = call._replace(arguments=tool.typed(call.arguments), is_text=False)
                error = tool.argument_error(call.arguments)
                if error is not None:
                    return _refusal(call, f"{call.name}: {error}", position)
                job = self.sources[number].bind(episode, call)
                lane = None if job.lane is None else (number, job.lane)
                return Job(job.call, job.phrase, job.timeout_s, lane, position, call.name)
        names = [name for own in tools.values() for name in own]
        return _refusal(call, f"unknown tool {call.name!r:.80}; the tools are {names}", position)


def _refusal(call: ToolCall | None, error: str, position: int) -> Answer:
    tool = "" if call is None else call.name
    message = tool_message(call, error_text(error))
    return Answer(message, is_error=True, position=position, tool=tool)

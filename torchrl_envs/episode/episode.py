"""An episode, from its draw to its reward: its conversation, rewards and resources.

Shape legend: T tokens of a row of an episode.
"""

import itertools
from collections.abc import (
    Mapping,
    Sequence,
)
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_data.conversation import Conversations, stream_number
from torchrl_data.messages import Message
from torchrl_data.stop_reason import FinishReason, StopReason, stop_reason_of
from torchrl_envs.entries.rewards import Score

from .resources import Resources
from .row_origin import COMPACTION, RowOrigin, shared_beginning

LOGGED_EXTRA: Final = "logged_extra"
"""Values of a rollout that are recorded beside it, a dictionary per row: what reward functions log,
and notes of its environment."""
_CUT: Final = (FinishReason.LENGTH, FinishReason.CONTEXT_LENGTH)
_NOTHING: Final = Conversations.from_messages([[]])
_NO_MEMORY: Final[Mapping[str, Any]] = {}
_MAIN: Final = (RowOrigin(),)
_OF_ONE: Final = (
    *("id", "row", "stream", "resources", "example", "group_id", "seed", "query"),
    *("_snapshot", "_index"),
)
"""Attributes that an episode does not take over from another one."""
_ids = itertools.count()


class BranchOrigin(NamedTuple):
    """Where an episode left another one of its group, whose beginning is its own, too."""

    episode: int = -1
    """The ``id`` of the other one; -1 for an episode that began with its prompt."""
    num_tokens: int = 0
    """How many tokens of the other one come before its own first turn, the prompt included."""
    num_messages: int = 0
    """And how many messages."""
    num_turns: int = 0
    """And how many turns of the policy."""


class ToolCallRecord(NamedTuple):
    """Something that the policy asked of a tool."""

    tool: str
    """As the policy called it; of what is no call, the kind of what answered. Empty where nothing
    can be made of it."""
    turn: int
    """Of the policy, from 1."""
    seconds: float | None
    """``None`` where nothing was run."""
    is_error: bool


def all_share(episodes: Sequence["Episode"], conversations: Conversations) -> bool:
    """Return whether the conversation of every episode is one of these still."""
    return all(each._snapshot is conversations for each in episodes)


def share_all(episodes: Sequence["Episode"], conversations: Conversations) -> None:
    """Let the conversations of episodes be those of a batch, in their order."""
    for row, episode in enumerate(episodes):
        episode._snapshot, episode._index = conversations, row


class Episode:
    """A rollout. Everything that happens to it is here.

    Transforms work on it in their events, see :class:`~torchrl_envs.EpisodeTransform`. Its values
    travel with the batch as one object per row; what it holds (``resources``) stays in the
    environment.

    Args:
        row: which row of the environment's batch it runs in.
    """

    def __init__(self, row: int = 0) -> None:
        self.id: int = next(_ids)
        """Of this episode alone, in this process."""
        self.row: int = row
        """Which row of the environment's batch it runs in; where there is none, of its group."""
        self.example: Mapping[str, Any] | None = None
        """The data set's row that it started from."""
        self.group_id: int = -1
        """Equal for the episodes of one draw."""
        self.seed: int = 0
        """Equal for the episodes of one draw."""
        self.stream: int | None = None
        """Names the random numbers that its turns are drawn with, its own alone, see
        :func:`~torchrl_data.stream_number`. Whoever draws it may give it one."""
        self.query: Any = None
        """What opens the conversation: a string, messages or token ids; for ``begin``."""
        self.tools: Sequence[dict[str, Any]] | None = None
        """JSON schemas that the prompt shows."""
        # Its conversation is one of a snapshot, usually that of a whole batch.
        self._snapshot, self._index = _NOTHING, 0
        # What a turn of `max_new_tokens` would end the episode for, and the limit behind it.
        self._turn_bound: tuple[str, int] | None = None
        self.segments: tuple[Conversations, ...] = ()
        """What was said before the past was rewritten, see :meth:`rewrite`; one of a row each."""
        self.origins: tuple[RowOrigin, ...] = _MAIN
        """Where each of its :attr:`rows` comes from, in their order."""
        self.branch: BranchOrigin | None = None
        """Where it left another episode of its group; ``None`` where none branches."""
        self.max_new_tokens: int | None = None
        """Most tokens of the next turn; ``None`` leaves it to the policy."""
        self.max_turns: int | None = None
        """Most turns of the policy; ``None`` for no bound."""
        self.finish_reason: str = ""
        """Why the newest turn ended, see :class:`~torchrl_data.FinishReason`."""
        self.stop_reason: str = ""
        """Why the episode is over, see :class:`~torchrl_data.StopReason`; empty while it runs."""
        self.stop_limit: int = -1
        """The limit that cut it, in tokens or turns; -1 where none did."""
        self.is_terminated: bool = False
        """It has come to its own end."""
        self.is_truncated: bool = False
        """It was cut."""
        self.num_turns: int = 0
        """Turns that the policy has taken."""
        self.num_tool_calls: int = 0
        self.num_tool_errors: int = 0
        self.tool_calls: tuple[ToolCallRecord, ...] = ()
        """What was asked of tools, in order; replace it, don't write into it."""
        self.score: Score = Score()
        """What it was given at its end."""
        self.agent_rewards: Mapping[str, float] | None = None
        """What each agent was given at its end; ``None`` where its agents have one reward."""
        self.notes: Mapping[str, Any] = _NO_MEMORY
        """What its environment says for its record, see :meth:`note`."""
        self.metrics: dict[str, Any] = {}
        """What transforms measured at its end, by their ``key``."""
        self.token_entries: dict[Any, Tensor] = {}
        """Values by token, ``[T, ...]`` over all tokens of all its rows, by entry."""
        self.memory: Mapping[str, Any] = _NO_MEMORY
        """What transforms remember of it, by their ``key``; replace it, don't write into it."""
        self.resources: Resources = Resources()
        """What it holds; given back when it is over."""

    def fork(self) -> "Episode":
        """The same episode, to go on from here: what happens to one is not seen by the other."""
        fork = object.__new__(Episode)
        fork.__dict__ = self.__dict__.copy()
        return fork

    def take_over(self, other: "Episode", conversation: Conversations) -> None:
        """Go on from where another episode of the draw stood, with a stream of its own.

        Args:
            other: a fork of it, of then; what it held is not taken over.
            conversation: its conversation of then, with the header of a turn open.
        """
        own = {name: self.__dict__[name] for name in _OF_ONE}
        self.__dict__.update(other.__dict__ | own)
        if self.stream is not None:
            conversation = conversation.with_streams([self.stream])
        self._snapshot, self._index = conversation, 0
        self.branch = BranchOrigin(
            other.id,
            conversation.num_tokens(0),
            len(conversation.messages(0)),
            other.num_turns,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Values of the episode; its resources do not travel, nor do conversations of others."""
        own = {"_snapshot": self.conversation, "_index": 0, "resources": Resources()}
        return {**self.__dict__, **own}

    def __repr__(self) -> str:
        state = self.stop_reason or "running"
        return f"Episode(id={self.id}, group_id={self.group_id}, {state})"

    # What was said ------------------------------------------------------------------------------

    @property
    def conversation(self) -> Conversations:
        """A conversation: an append-only record and how far it has got."""
        return self._snapshot.row(self._index)

    @conversation.setter
    def conversation(self, conversation: Conversations) -> None:
        if conversation.stream(0) is None and self.stream is not None:
            conversation = conversation.with_streams([self._next_stream(self.stream)])
        self._snapshot, self._index = conversation, 0

    def _next_stream(self, stream: int) -> int:
        """That of a record that begins now; another one than those before it had."""
        before = self._snapshot.stream(self._index) if self._snapshot is not _NOTHING else None
        if before is None:
            return stream
        return stream_number(before, self._snapshot.num_tokens(self._index))

    def share(self, conversations: Conversations, index: int) -> None:
        """Let its conversation be one of several, which takes no object for each row."""
        self._snapshot, self._index = conversations, index

    def shares(self, conversations: Conversations) -> bool:
        """Return whether its conversation is one of these still, see :meth:`share`."""
        return self._snapshot is conversations

    @property
    def messages(self) -> list[Message]:
        """The conversation as it stands."""
        return self._snapshot.messages(self._index)

    @property
    def last_message(self) -> Message:
        """The newest message."""
        return self._snapshot.last_message(self._index)

    @property
    def first_response(self) -> int:
        """Messages before the policy's first turn."""
        return self._snapshot.first_response(self._index)

    @property
    def prompt_messages(self) -> list[Message]:
        """Messages before the policy's first turn."""
        first = self.rows[0]
        return first.messages(0)[: first.first_response(0)]

    @property
    def completion_messages(self) -> list[Message]:
        """Everything from the policy's first turn on, of all rows, each message once."""
        if not self.segments:
            return self.messages[self.first_response :]
        return [
            message
            for row in self.rows
            if row.was_sampled(0)
            for message in row.messages(0)[row.first_response(0) :]
        ]

    @property
    def prompt_ids(self) -> list[int]:
        """The tokens before the first one that the policy sampled."""
        first = self.rows[0]
        return first.ids(0)[: first.num_tokens_before_policy(0)]

    @property
    def completion_ids(self) -> list[int]:
        """The tokens from the first one on that the policy sampled, of all rows."""
        return [
            token for row in self.rows for token in row.ids(0)[row.num_tokens_before_policy(0) :]
        ]

    @property
    def awaits_answer(self) -> bool:
        """Whether the policy spoke last."""
        return self._snapshot.last_message(self._index).get("role") == "assistant"

    @property
    def rows(self) -> list[Conversations]:
        """The rows that are trained: each sampled token is in exactly one of them.

        One for each segment, and one for the conversation as it stands.
        """
        return [*self.segments, self.conversation]

    @property
    def own_rows(self) -> list[Conversations]:
        """Its :attr:`rows`, with what another episode sampled as context, see :attr:`branch`."""
        rows, left = self.rows, self.branch
        if left is not None and left.num_tokens:
            rows[0] = rows[0].begun_elsewhere(left.num_tokens, left.num_messages)
        return rows

    @property
    def assistant_mask(self) -> Tensor:
        """True on the tokens that the policy sampled, of all rows one after the other, ``[T]``."""
        if not self.segments:
            return self._snapshot.assistant_mask(self._index)
        return torch.cat([row.assistant_mask(0) for row in self.rows])

    @property
    def sampled_versions(self) -> np.ndarray:
        """Policy version of each token that the policy sampled in it, of all rows, int64."""
        versions = np.concatenate([row.policy_versions(0).numpy() for row in self.own_rows])
        return versions[versions >= 0]

    def note(self, column: str, value: Any) -> None:
        """Write down something about the episode, for its record."""
        self.notes = {**self.notes, column: value}

    def say(self, *messages: Message) -> None:
        """Add messages of anybody but the policy to the conversation.

        Args:
            messages: they get their tokens before the next turn.
        """
        self.conversation = self.conversation.append_messages([messages])

    def rewrite(self, messages: Sequence[Message]) -> None:
        """Go on from another past: a summary, a history without reasoning or old results.

        What the policy has sampled so far stays as it is, in a row of its own that shares group,
        reward and advantage with the rest (:attr:`segments`). Nothing in ``messages`` is trained
        again, whoever said it.

        Args:
            messages: the whole conversation from now on; they get their tokens before the next
                turn.
        """
        tools = self._snapshot.tools(self._index)
        self.replace_conversation(Conversations.from_messages([list(messages)], [tools]))

    def replace_conversation(self, conversation: Conversations) -> None:
        """Go on with another record; the old one is a segment if the policy sampled any of it.

        Args:
            conversation: one; none of its tokens is trained again.
        """
        if self._snapshot.was_sampled(self._index):
            here = self.origins[-1]
            origin = self.next_origin(COMPACTION, here, self.conversation.num_tokens(0), here.agent)
            self.origins = (*self.origins, origin)
            self.segments = (*self.segments, self.conversation)
        self.conversation = conversation

    def next_origin(
        self, kind: str, parent: RowOrigin, parent_tokens: int | None, agent: str
    ) -> RowOrigin:
        """The origin of a row that begins now.

        Args:
            kind: how it begins, one of ``ROW_KINDS``.
            parent: the row that it leaves.
            parent_tokens: see :class:`RowOrigin`.
            agent: its author.
        """
        number = 1 + max(origin.number for origin in self.origins)
        return RowOrigin(number, parent.number, parent_tokens, kind, agent)

    def go_to_row(self, origin: RowOrigin, conversation: Conversations) -> None:
        """Leave this row, in which the policy has taken a turn, for another one.

        Args:
            origin: of a row that was left before, or of one that begins now.
            conversation: how it goes on from here.
        """
        left = zip([*self.segments, self.conversation], self.origins, strict=True)
        rows = [(row, its) for row, its in left if its != origin]
        self.segments = tuple(row for row, _ in rows)
        self.origins = (*(its for _, its in rows), origin)
        self.conversation = conversation

    def row_places(self) -> list[tuple[int, int]]:
        """Each row's parent, as its place in :attr:`rows`, and how many tokens of it come before.

        -1 and 0 for a row without a parent.
        """
        places = {origin.number: place for place, origin in enumerate(self.origins)}
        found = []
        for row, origin in zip(self.rows, self.origins, strict=True):
            parent, num_tokens = places.get(origin.parent, -1), origin.parent_tokens
            if parent >= 0 and num_tokens is None:
                num_tokens = shared_beginning(row, self.rows[parent])
            found.append((parent, num_tokens if parent >= 0 and num_tokens is not None else 0))
        return found

    def start_turn(self) -> bool:
        """Forget the bounds of the turn before, if another one is to be taken.

        Returns:
            Whether it is: the episode goes on.
        """
        if self.is_over:
            return False
        self.max_new_tokens, self._turn_bound = None, None
        return True

    def limit_turn(self, max_new_tokens: int, reason: str = "", limit: int = -1) -> None:
        """Bound the next turn; the tightest bound counts.

        Args:
            max_new_tokens: most tokens of it.
            reason: why the episode is over if the turn is cut there; ``response_length`` when not
                given.
            limit: the limit behind it, in tokens: that of a whole row, say.
        """
        held = self.max_new_tokens
        if held is None or max_new_tokens < held:
            self.max_new_tokens = max_new_tokens
            self._turn_bound = (reason, limit) if reason else None

    def limit_turns(self, max_turns: int) -> None:
        """Bound the number of turns; the tightest bound counts.

        Args:
            max_turns: most turns of the policy.
        """
        held = self.max_turns
        self.max_turns = max_turns if held is None else min(held, max_turns)

    def drop_unanswered(self) -> None:
        """Leave a row out that began anew, and which the policy took no turn in."""
        if self.segments and not self._snapshot.was_sampled(self._index):
            *before, self.conversation = self.segments
            self.segments, self.origins = tuple(before), self.origins[:-1]

    # How it ends --------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether it is over."""
        return self.is_terminated or self.is_truncated

    @property
    def is_over(self) -> bool:
        """Whether it is done, or has a reason to be: the policy takes no further turn."""
        return bool(self.stop_reason) or self.is_terminated or self.is_truncated

    @property
    def is_scorable(self) -> bool:
        """Whether what it got says anything about the policy: it began, and did not fail."""
        if not self.stop_reason:
            return self.num_turns > 0
        reason, _ = stop_reason_of(self.stop_reason, StopReason.TRUNCATED)
        return self.num_turns > 0 and reason.is_scorable

    @property
    def is_last_turn(self) -> bool:
        """Whether the policy has taken the last turn that :attr:`max_turns` allows."""
        return self.max_turns is not None and self.num_turns >= self.max_turns

    @property
    def is_turn_cut(self) -> bool:
        """Whether a limit of tokens cut the newest turn."""
        return self.finish_reason in _CUT

    def terminate(self, reason: str = "") -> None:
        """End the episode by itself; one that is truncated already stays so.

        Args:
            reason: why, in words of your own (``environment_done: <reason>``) or a
                :class:`~torchrl_data.StopReason`; the first one stays.
        """
        if not self.is_truncated:
            self.is_terminated = True
            self._end_for(reason, StopReason.ENVIRONMENT_DONE)

    def truncate(self, reason: str = "") -> None:
        """Cut the episode here; an end that it came to by itself does not count.

        Args:
            reason: why, in words of your own (``truncated: <reason>``) or a
                :class:`~torchrl_data.StopReason`; the first one that truncates stays.

        Raises:
            ValueError: the reason is one of an episode that came to its own end.
        """
        kind, _ = stop_reason_of(reason, StopReason.TRUNCATED)
        if not kind.is_truncated:
            raise ValueError(
                f"Episode.truncate: {kind!s} is an end of the episode's own. Call terminate(), or "
                "give a reason in words of your own."
            )
        if self.is_terminated:
            self.is_terminated, self.stop_reason = False, ""
        self.is_truncated = True
        self._end_for(reason, StopReason.TRUNCATED)

    def _end_for(self, reason: str, default: StopReason) -> None:
        if reason and not self.stop_reason:
            _, self.stop_reason = stop_reason_of(reason, default)

    def cut_turn(self) -> None:
        """End it because a limit of tokens cut the newest turn, and say which limit."""
        conversation = self.conversation
        total = conversation.num_tokens(0)
        num_tokens = total - conversation.position(0).response_start
        self.stop_reason, self.stop_limit = StopReason.RESPONSE_LENGTH.value, num_tokens
        if self.finish_reason == FinishReason.CONTEXT_LENGTH:
            self.stop_reason, self.stop_limit = StopReason.CONTEXT_LENGTH.value, total
        elif self._turn_bound is not None and num_tokens >= (self.max_new_tokens or 0):
            self.stop_reason, self.stop_limit = self._turn_bound
        self.is_terminated, self.is_truncated = False, True

    def resume(self) -> None:
        """Let the episode go on: it is not over after all."""
        self.is_terminated = self.is_truncated = False
        self.stop_reason, self.stop_limit = "", -1

    def end_turn(self) -> None:
        """End it where nobody spoke after the policy, or no turn is left to take."""
        if self.is_over:
            return
        if self.awaits_answer:
            self.terminate(StopReason.ANSWERED)
        elif self.is_last_turn:
            assert self.max_turns is not None
            self.truncate(StopReason.MAX_STEPS)
            self.stop_limit = self.max_turns

    def settle(self) -> bool:
        """Say why it is over, and what follows from that: terminated or truncated.

        Returns:
            Whether it is over.
        """
        if not self.is_over:
            return False
        default = StopReason.TRUNCATED
        if self.is_terminated:
            default = StopReason.ANSWERED if self.awaits_answer else StopReason.ENVIRONMENT_DONE
        reason, text = stop_reason_of(self.stop_reason, default)
        # A turn that was cut did not end the episode, whatever was said to it.
        if self.is_turn_cut and (not self.stop_reason or not reason.is_truncated):
            self.cut_turn()
            return True
        self.stop_reason = text
        self.is_truncated = reason.is_truncated
        self.is_terminated = not reason.is_truncated
        return True

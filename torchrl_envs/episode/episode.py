"""One rollout, from its draw to its reward.

Shape legend: T tokens of a row of an episode.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_data.conversation.conversations import Conversations
from torchrl_data.conversation.record import Message
from torchrl_data.stop_reasons import (
    ANSWERED,
    CUT_REASONS,
    ERROR,
    MAX_STEPS,
    RESPONSE_LENGTH,
    UNSCORABLE_REASONS,
    kind_of,
)
from torchrl_envs.entries.rewards import Score

from .resources import Resources

_NOTHING: Final = Conversations.from_messages([[]])
_NO_MEMORY: Final[Mapping[str, Any]] = {}
_ids = itertools.count()


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


class Episode:
    """One rollout. Everything that happens to it is here.

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
        self.query: Any = None
        """What opens the conversation: a string, messages or token ids; for ``begin``."""
        self.tools: Sequence[dict[str, Any]] | None = None
        """JSON schemas that the prompt shows."""
        # Its conversation is one of a snapshot, usually that of a whole batch.
        self._snapshot, self._index = _NOTHING, 0
        self.segments: tuple[Conversations, ...] = ()
        """What was said before the past was rewritten, see :meth:`rewrite`; one of a row each."""
        self.max_new_tokens: int | None = None
        """Most tokens of the next turn; ``None`` leaves it to the policy."""
        self.finish_reason: str = ""
        """Why the newest turn ended: ``"stop"``, ``"length"`` or ``"error: ..."``."""
        self.stop_reason: str = ""
        """Why the episode is over, see ``torchrl_data.stop_reasons``; empty while it runs."""
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

    def __getstate__(self) -> dict[str, Any]:
        """Its values; what it holds does not travel, nor do the conversations of others."""
        own = {"_snapshot": self.conversation, "_index": 0, "resources": Resources()}
        return {**self.__dict__, **own}

    def __repr__(self) -> str:
        state = self.stop_reason or "running"
        return f"Episode(id={self.id}, group_id={self.group_id}, {state})"

    # What was said ------------------------------------------------------------------------------

    @property
    def conversation(self) -> Conversations:
        """One conversation: an append-only record and how far it has got."""
        return self._snapshot if len(self._snapshot) == 1 else self._snapshot.row(self._index)

    @conversation.setter
    def conversation(self, conversation: Conversations) -> None:
        self._snapshot, self._index = conversation, 0

    def share(self, conversations: Conversations, index: int) -> None:
        """Its conversation is one of several, which takes no object for each row."""
        self._snapshot, self._index = conversations, index

    def shares(self, conversations: Conversations) -> bool:
        """Whether its conversation is one of these still, see :meth:`share`."""
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
        """What came before the policy's first turn."""
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
    def assistant_mask(self) -> Tensor:
        """True on the tokens that the policy sampled, of all rows one after the other, ``[T]``."""
        if not self.segments:
            return self._snapshot.assistant_mask(self._index)
        return torch.cat([row.assistant_mask(0) for row in self.rows])

    @property
    def sampled_versions(self) -> np.ndarray:
        """Policy version of each token that the policy sampled, of all rows, int64."""
        versions = np.concatenate([row.policy_versions(0).numpy() for row in self.rows])
        return versions[versions >= 0]

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
            self.segments = (*self.segments, self.conversation)
        self.conversation = conversation

    def limit_turn(self, max_new_tokens: int) -> None:
        """Bound the next turn; the tightest bound counts.

        Args:
            max_new_tokens: most tokens of it.
        """
        held = self.max_new_tokens
        self.max_new_tokens = max_new_tokens if held is None else min(held, max_new_tokens)

    def drop_unanswered(self) -> None:
        """Leave a row out that began anew, and which the policy took no turn in."""
        if self.segments and not self._snapshot.was_sampled(self._index):
            *before, self.conversation = self.segments
            self.segments = tuple(before)

    # How it ends --------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether it is over."""
        return self.is_terminated or self.is_truncated

    @property
    def is_scorable(self) -> bool:
        """Whether what it got says anything about the policy: it began, and did not fail."""
        return self.num_turns > 0 and kind_of(self.stop_reason) not in UNSCORABLE_REASONS

    def terminate(self, reason: str = "") -> None:
        """It has come to its own end.

        Args:
            reason: why; the first one stays.
        """
        self.is_terminated = True
        self.stop_reason = self.stop_reason or reason

    def truncate(self, reason: str = "") -> None:
        """It is cut here; what it came to by itself does not count.

        Args:
            reason: why; the first one stays.
        """
        self.is_truncated, self.is_terminated = True, False
        self.stop_reason = self.stop_reason or reason

    def resume(self) -> None:
        """It is not over after all."""
        self.is_terminated = self.is_truncated = False
        self.stop_reason = ""

    def end_unanswered(self) -> None:
        """It has come to its end if nobody spoke after the policy: nothing would go on from."""
        if not (self.is_done or self.stop_reason) and self.awaits_answer:
            self.terminate()

    def settle(self) -> bool:
        """Cut it if there is a reason to, and say why it is over if nobody has.

        Returns:
            Whether it is over.
        """
        if self.stop_reason and not self.is_done:
            self.truncate()
        if not self.is_done:
            return False
        if not self.stop_reason:
            self.stop_reason = self._default_reason()
        # A turn cut at its budget did not end by itself.
        if self.stop_reason in CUT_REASONS:
            self.truncate()
        return True

    def _default_reason(self) -> str:
        if kind_of(self.finish_reason) == ERROR:
            return self.finish_reason
        if self.is_truncated:
            return MAX_STEPS
        return RESPONSE_LENGTH if self.finish_reason == "length" else ANSWERED

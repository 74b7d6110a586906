"""The record of one conversation: every token with who wrote it, and the messages that they spell.

Only ever appended to. Shape legend: T tokens.
"""

from array import array
from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .messages import Message


class Source(IntEnum):
    """Who wrote a token."""

    TEMPLATE = 0
    """The chat template: control tokens and headers."""
    CONTENT = 1
    """A message that somebody else than the policy wrote: system, user or tool."""
    MODEL = 2
    """The policy sampled it."""


class EncodedMessages(NamedTuple):
    """Tokens of some messages, as they continue a conversation."""

    ids: list[int]
    sources: list[Source]


class Turn(NamedTuple):
    """What somebody said as the assistant: usually what an engine sampled."""

    ids: Sequence[int]
    """The tokens, stop token included."""
    log_probs: Sequence[float] | None
    """One per token, in nats, of the distribution that it was drawn from; ``None`` where the policy
    did not sample the turn."""
    message: Message
    """What the tokens spell."""
    versions: int | Sequence[int] = -1
    """The policy version that sampled them, or one per token when the weights changed meanwhile."""
    extra: Mapping[str, Sequence[float]] = MappingProxyType({})
    """Further values of the tokens by name, such as their entropy; one per token each."""

    def check(self, row: int) -> None:
        """Check that everything is aligned with the tokens.

        Args:
            row: whose turn it is, named in the error.

        Raises:
            ValueError: there are not as many log-probs, versions or further values, as ids.
        """
        aligned = {"log-probs": self.log_probs, **self.extra}
        if not isinstance(self.versions, int):
            aligned["policy versions"] = self.versions
        for name, values in aligned.items():
            if values is not None and len(values) != len(self.ids):
                raise ValueError(
                    f"Row {row} has {len(self.ids)} sampled tokens but {len(values)} {name}."
                )


class ConversationRecord:
    """One row: tokens and messages, only ever appended to."""

    __slots__ = (
        "extra",
        "first_response",
        "ids",
        "log_probs",
        "messages",
        "sources",
        "tools",
        "versions",
    )

    def __init__(self, tools: Sequence[dict[str, Any]] | None = None) -> None:
        self.ids = array("q")
        self.sources = bytearray()
        self.log_probs = array("f")
        self.versions = array("q")
        # Further values of sampled tokens by name; what lies past the end of a column is 0.
        self.extra: dict[str, array] = {}
        self.messages: list[Message] = []
        self.tools = tuple(tools) if tools else None
        self.first_response: int | None = None

    def extend_tokens(
        self,
        ids: Sequence[int],
        sources: Sequence[int],
        log_probs: Sequence[float] | None = None,
        version: int | Sequence[int] = -1,
        extra: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Append tokens; ``log_probs`` and ``extra`` are given for sampled tokens only."""
        for name, values in (extra or {}).items():
            column = self.extra.setdefault(name, array("f"))
            column.extend([0.0] * (len(self.ids) - len(column)))
            column.extend(values)
        self.ids.extend(ids)
        self.sources.extend(sources)
        self.log_probs.extend(log_probs if log_probs is not None else [0.0] * len(ids))
        self.versions.extend([version] * len(ids) if isinstance(version, int) else version)

    def append_turn(self, turn: Turn) -> "Position":
        """Append a turn of the assistant; how far the record has got."""
        start, count = len(self.ids), len(turn.ids)
        source = Source.CONTENT if turn.log_probs is None else Source.MODEL
        self.extend_tokens(turn.ids, [source] * count, turn.log_probs, turn.versions, turn.extra)
        if self.first_response is None:
            self.first_response = len(self.messages)
        self.messages.append(turn.message)
        num_messages = len(self.messages)
        return Position(len(self.ids), num_messages, num_messages, response_start=start)

    def copy_prefix(self, num_tokens: int, num_messages: int) -> "ConversationRecord":
        """A record of its own that starts like this one."""
        copy = ConversationRecord(self.tools)
        copy.ids = self.ids[:num_tokens]
        copy.sources = self.sources[:num_tokens]
        copy.log_probs = self.log_probs[:num_tokens]
        copy.versions = self.versions[:num_tokens]
        copy.extra = {name: column[:num_tokens] for name, column in self.extra.items()}
        copy.messages = self.messages[:num_messages]
        if self.first_response is not None and self.first_response < num_messages:
            copy.first_response = self.first_response
        return copy


class Waiting(NamedTuple):
    """What of a conversation has no tokens yet."""

    messages: list[Message]
    num_encoded: int
    """Messages before them."""
    last_id: int | None
    """The newest token; ``None`` before the first one."""
    tools: tuple[dict[str, Any], ...] | None
    """JSON schemas of the tools that the conversation was started with."""


class Position(NamedTuple):
    """How far a row had got when the snapshot was taken."""

    num_tokens: int = 0
    num_messages: int = 0
    num_encoded: int = 0
    """Messages that have their tokens; the others wait for the next encoding."""
    awaits_response: bool = False
    """The generation header is open: the next token is the policy's."""
    response_start: int = 0
    """Where the last response starts, in tokens."""


def extra_values(record: ConversationRecord, num_tokens: int) -> dict[str, Tensor]:
    """Further values of the first tokens by name, float32 ``[T]``; 0 where none is known."""
    values = {}
    for name, column in record.extra.items():
        values[name] = torch.zeros(num_tokens)
        known = np.array(column[:num_tokens], np.float32)
        values[name][: len(known)] = torch.from_numpy(known)
    return values

"""The record of one conversation: every token with who wrote it, and the messages that they spell.

Only ever appended to. Shape legend: T tokens.
"""

from array import array
from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

Message = dict[str, Any]
"""``role`` and ``content``, and where they apply ``tool_calls``, ``tool_call_id``, ``name``,
``reasoning_content``."""

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles that a message may have."""
PLACEHOLDER_ROLE: Final = "<none>"
"""Role of a message that only fills a gap in a batch; it is never rendered."""
_KNOWN_ROLES = frozenset((*ROLES, PLACEHOLDER_ROLE))


def check_messages(
    messages: Sequence[Message], *, first: int = 0, row: int | tuple[int, ...] | None = None
) -> None:
    """Check roles and contents, before anything is rendered.

    Args:
        messages: the messages to check.
        first: the number of the first of them, for the error.
        row: the row that they belong to, for the error.

    Raises:
        ValueError: a role is unknown, or a message has neither content nor tool calls.
        TypeError: a message, its role or its content has the wrong type.
    """
    for number, message in enumerate(messages, first):
        # The common case first, as this runs for every message of every step.
        if (
            type(message) is dict
            and message.get("role") in _KNOWN_ROLES
            and type(message.get("content")) is str
        ):
            continue
        where = f"Message {number}" if row is None else f"Message {number} of row {row}"
        _check_message(message, where)


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, Mapping):
        raise TypeError(
            f"{where} is a {type(message).__name__} ({message!r:.80}), not a dict with 'role' and "
            "'content'."
        )
    role = message.get("role")
    if not isinstance(role, str):
        raise TypeError(f"{where} has the role {role!r}; a role is a string, one of {list(ROLES)}.")
    if role not in _KNOWN_ROLES:
        raise ValueError(
            f"{where} has the unknown role {role!r}; the roles are {list(ROLES)}. Rename it, or "
            "put the name of the speaker in 'name'."
        )
    _check_content(message.get("content"), message, where)


def _check_content(content: Any, message: Mapping[str, Any], where: str) -> None:
    if content is None:
        if not message.get("tool_calls") and not message.get("reasoning_content"):
            raise ValueError(
                f"{where} ({message['role']}) has no content and no tool calls. Give it a string, "
                "which may be empty."
            )
    elif isinstance(content, Sequence) and not isinstance(content, str | bytes):
        for part in content:
            if not isinstance(part, Mapping) or "type" not in part:
                raise TypeError(
                    f"{where} ({message['role']}) has a content part {part!r:.80}; a part is a "
                    "dict with a 'type', such as {'type': 'text', 'text': ...}."
                )
    elif not isinstance(content, str):
        raise TypeError(
            f"{where} ({message['role']}) has content of type {type(content).__name__} "
            f"({content!r:.80}); content is a string or a list of parts. Convert it with str() or "
            "json.dumps()."
        )


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

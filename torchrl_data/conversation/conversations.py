"""Conversations as append-only token records: the state that environment and policy share.

Tokens are the truth: a row keeps every token with who wrote it, its log-probability and the policy
version that sampled it, beside the messages that it spells. Nothing is ever re-tokenised. A
:class:`Conversations` object is a snapshot of a whole batch (how far each row had got): appending
gives a new snapshot of the same records in time proportional to what is new, and appending to an
old snapshot copies the row first, so that every snapshot stays what it was.

Shape legend: B rows, T tokens of a row (ragged), M messages of a row (ragged).
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Self

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
        # Further figures of sampled tokens by name; what lies past the end of a column is 0.
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


class Conversations:
    """Snapshot of a batch of conversations.

    Args:
        records: B records.
        positions: how far each has got; the end of the record when not given.
    """

    __slots__ = ("_positions", "_records")

    def __init__(
        self, records: Sequence[ConversationRecord], positions: Sequence[Position] | None = None
    ) -> None:
        self._records = list(records)
        self._positions = (
            [Position(len(r.ids), len(r.messages)) for r in records]
            if positions is None
            else list(positions)
        )

    @classmethod
    def from_messages(
        cls,
        rows: Iterable[Sequence[Message]],
        tools: Iterable[Sequence[dict[str, Any]] | None] | None = None,
    ) -> Self:
        """Start conversations; nothing is encoded yet.

        Args:
            rows: the messages of each row.
            tools: JSON schemas of the tools of each row.
        """
        rows = list(rows)
        tools = [None] * len(rows) if tools is None else list(tools)
        records = []
        for messages, schemas in zip(rows, tools, strict=True):
            record = ConversationRecord(schemas)
            record.messages.extend(messages)
            records.append(record)
        return cls(records)

    @classmethod
    def from_tokens(
        cls,
        rows: Iterable[Sequence[int]],
        messages: Iterable[Sequence[Message]],
        *,
        awaits_response: bool = False,
    ) -> Self:
        """Start conversations from tokens that somebody hands in; they are kept as they are.

        Args:
            rows: token ids of each row; none of them is the policy's.
            messages: what each row says, for people, tools and rewards.
            awaits_response: the next token is the policy's.
        """
        records, positions = [], []
        for ids, said in zip(rows, messages, strict=True):
            record = ConversationRecord()
            record.extend_tokens(ids, [Source.CONTENT] * len(ids))
            record.messages.extend(said)
            n, m = len(record.ids), len(record.messages)
            records.append(record)
            positions.append(Position(n, m, m, awaits_response, n if awaits_response else 0))
        return cls(records, positions)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator["Conversations"]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> Self:
        """Rows of the snapshot, as a snapshot (an integer gives one of a single row)."""
        rows = _row_indices(index, len(self))
        return type(self)([self._records[i] for i in rows], [self._positions[i] for i in rows])

    def __repr__(self) -> str:
        return (
            f"Conversations({len(self)} rows, "
            f"tokens={[p.num_tokens for p in self._positions]}, "
            f"messages={[p.num_messages for p in self._positions]})"
        )

    def __eq__(self, other: object) -> bool:
        """Equal when messages, tokens and provenance are."""
        if not isinstance(other, Conversations):
            return NotImplemented
        return len(self) == len(other) and all(
            self._row_state(i) == other._row_state(i) for i in range(len(self))
        )

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self) -> Self:
        """The same object: nothing changes a snapshot."""
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """The same object: nothing changes a snapshot."""
        return self

    def _row_state(self, row: int) -> tuple[object, ...]:
        record, position = self._records[row], self._positions[row]
        n = position.num_tokens
        return (
            position,
            record.messages[: position.num_messages],
            record.ids[:n],
            record.sources[:n],
            record.log_probs[:n],
            record.versions[:n],
            record.tools,
        )

    @staticmethod
    def cat(parts: Sequence["Conversations"]) -> "Conversations":
        """One batch of the rows of several."""
        return Conversations(
            [record for part in parts for record in part._records],
            [position for part in parts for position in part._positions],
        )

    def split(self) -> list[Self]:
        """A snapshot of each row by itself."""
        new, kind = object.__new__, type(self)
        rows = []
        for record, position in zip(self._records, self._positions, strict=True):
            row = new(kind)
            row._records, row._positions = [record], [position]
            rows.append(row)
        return rows

    def is_split_into(self, rows: "Sequence[Conversations]") -> bool:
        """Whether these are exactly the rows of this snapshot, in order.

        Args:
            rows: snapshots of one row each.
        """
        return len(rows) == len(self) and all(
            row._records[0] is record and row._positions[0] is position
            for row, record, position in zip(rows, self._records, self._positions, strict=True)
        )

    # What is in a row ---------------------------------------------------------------------------

    @property
    def positions(self) -> tuple[Position, ...]:
        """How far each row has got."""
        return tuple(self._positions)

    def position(self, row: int) -> Position:
        """How far a row has got."""
        return self._positions[row]

    def tools(self, row: int) -> tuple[dict[str, Any], ...] | None:
        """JSON schemas of the tools that a row was started with."""
        return self._records[row].tools

    def messages(self, row: int) -> list[Message]:
        """The messages of a row."""
        return self._records[row].messages[: self._positions[row].num_messages]

    def waiting_messages(self, row: int) -> list[Message]:
        """The messages of a row that have no tokens yet."""
        position = self._positions[row]
        return self._records[row].messages[position.num_encoded : position.num_messages]

    def last_message(self, row: int) -> Message:
        """The newest message of a row."""
        return self._records[row].messages[self._positions[row].num_messages - 1]

    def first_response(self, row: int) -> int:
        """Messages before the policy's first turn.

        A conversation that was not sampled here is taken to have its first turn where the first
        message of the role ``assistant`` is.
        """
        first = self._records[row].first_response
        messages = self.messages(row)
        if first is not None:
            return min(first, len(messages))
        roles = [message["role"] for message in messages]
        return roles.index("assistant") if "assistant" in roles else len(roles)

    def num_tokens(self, row: int) -> int:
        """Tokens of a row."""
        return self._positions[row].num_tokens

    def was_sampled(self, row: int) -> bool:
        """Whether the policy sampled any token of a row."""
        return self._records[row].sources.find(bytes([Source.MODEL]), 0, self.num_tokens(row)) >= 0

    def continues(self, row: int, earlier: "Conversations", other: int) -> bool:
        """Whether a row goes on from another one: all tokens of that one stand at its beginning.

        Args:
            row: of this snapshot.
            earlier: a snapshot.
            other: a row of that one.
        """
        old, new = earlier._records[other], self._records[row]
        n = earlier._positions[other].num_tokens
        if self._positions[row].num_tokens < n:
            return False
        return new is old or (new.ids[:n] == old.ids[:n] and new.sources[:n] == old.sources[:n])

    def num_tokens_before_policy(self, row: int) -> int:
        """Tokens of a row before the first one that the policy sampled; all, if it has none."""
        first = self._records[row].sources.find(bytes([Source.MODEL]), 0, self.num_tokens(row))
        return self.num_tokens(row) if first < 0 else first

    def ids(self, row: int) -> list[int]:
        """Token ids of a row."""
        return self._records[row].ids[: self._positions[row].num_tokens].tolist()

    def last_id(self, row: int) -> int:
        """The newest token of a row."""
        return self._records[row].ids[self._positions[row].num_tokens - 1]

    def token_ids(self, row: int) -> Tensor:
        """Token ids of a row, int64 ``[T]``."""
        return self._copy(self._records[row].ids, row, np.int64)

    def log_probs(self, row: int) -> Tensor:
        """Log-probs of a row, float32 ``[T]``; 0 where the policy did not sample."""
        return self._copy(self._records[row].log_probs, row, np.float32)

    def extra(self, row: int) -> dict[str, Tensor]:
        """Further figures of the sampled tokens by name, float32 ``[T]``; 0 elsewhere."""
        n = self._positions[row].num_tokens
        columns = {}
        for name, column in self._records[row].extra.items():
            columns[name] = torch.zeros(n)
            known = np.array(column[:n], np.float32)
            columns[name][: len(known)] = torch.from_numpy(known)
        return columns

    def policy_versions(self, row: int) -> Tensor:
        """Policy version of each token, int64 ``[T]``; -1 where the policy did not sample."""
        return self._copy(self._records[row].versions, row, np.int64)

    def sources(self, row: int) -> Tensor:
        """Who wrote each token, uint8 ``[T]`` of :class:`Source`."""
        return self._copy(self._records[row].sources, row, np.uint8)

    def assistant_mask(self, row: int) -> Tensor:
        """True on sampled tokens, stop token included; bool ``[T]``."""
        return self.sources(row) == Source.MODEL

    def _copy(self, buffer: array | bytearray, row: int, dtype: Any) -> Tensor:
        # The slice is a copy, so the record can go on growing.
        return torch.from_numpy(np.frombuffer(buffer[: self._positions[row].num_tokens], dtype))

    # How it grows -------------------------------------------------------------------------------

    def append_messages(self, rows: Sequence[Sequence[Message]]) -> Self:
        """A snapshot with messages added to each row; they are encoded when someone asks.

        Args:
            rows: new messages per row; may be empty.
        """
        records, positions = list(self._records), list(self._positions)
        for i, messages in enumerate(rows):
            if messages:
                records[i] = record = self._writable(i)
                record.messages.extend(messages)
                positions[i] = positions[i]._replace(num_messages=len(record.messages))
        return type(self)(records, positions)

    def replace_waiting(self, rows: Sequence[Sequence[Message] | None]) -> Self:
        """A snapshot with other messages in place of those that have no tokens yet.

        Args:
            rows: the messages per row; ``None`` leaves the row.
        """
        records, positions = list(self._records), list(self._positions)
        for i, messages in enumerate(rows):
            if messages is not None:
                position = positions[i]
                record = records[i].copy_prefix(position.num_tokens, position.num_encoded)
                record.messages.extend(messages)
                records[i] = record
                positions[i] = position._replace(num_messages=len(record.messages))
        return type(self)(records, positions)

    def append_encoded(self, encoded: Sequence[EncodedMessages | None]) -> Self:
        """A snapshot in which all messages of some rows are encoded and the header is open.

        Args:
            encoded: the tokens of a row's waiting messages and of the generation header, or
                ``None`` to leave the row.
        """
        records, positions = list(self._records), list(self._positions)
        for i, new in enumerate(encoded):
            if new is not None:
                records[i] = record = self._writable(i)
                record.extend_tokens(new.ids, new.sources)
                positions[i] = positions[i]._replace(
                    num_tokens=len(record.ids),
                    num_encoded=positions[i].num_messages,
                    awaits_response=True,
                    response_start=len(record.ids),
                )
        return type(self)(records, positions)

    def append_responses(
        self,
        rows: Sequence[tuple[Sequence[int], Sequence[float], Message] | None],
        *,
        policy_version: int | Sequence[int | Sequence[int]] = -1,
        extra: Mapping[str, Sequence[Sequence[float]]] | None = None,
        sampled: bool = True,
    ) -> Self:
        """A snapshot with a turn of the assistant added.

        Args:
            rows: the turn's ids, their log-probs and the message that they spell, per row; ``None``
                leaves the row as it is.
            policy_version: the version that sampled them; or one per row; or, for a row, one per
                token, when the weights changed while it was sampled.
            extra: further figures of the sampled tokens, such as their entropy: by name, one list
                per row. Every row has the column from then on.
            sampled: the policy sampled the turn; ``False`` where somebody else said it.

        Raises:
            RuntimeError: a row does not await a response.
            ValueError: there are not as many log-probs, versions or further figures, as ids.
        """
        source = Source.MODEL if sampled else Source.CONTENT
        records, positions = list(self._records), list(self._positions)
        for i, response in enumerate(rows):
            if response is None:
                for name in extra or ():
                    records[i].extra.setdefault(name, array("f"))
                continue
            ids, log_probs, message = response
            if not positions[i].awaits_response:
                raise RuntimeError(f"Row {i} does not await a response: encode its messages first.")
            figures = {name: column[i] for name, column in (extra or {}).items()}
            version = policy_version if isinstance(policy_version, int) else policy_version[i]
            per_token = {"log-probs": log_probs, **figures}
            if not isinstance(version, int):
                per_token["policy versions"] = version
            for name, values in per_token.items():
                if len(values) != len(ids):
                    raise ValueError(
                        f"Row {i} has {len(ids)} sampled tokens but {len(values)} {name}."
                    )
            records[i] = record = self._writable(i)
            start = len(record.ids)
            record.extend_tokens(ids, [source] * len(ids), log_probs, version, figures)
            if record.first_response is None:
                record.first_response = len(record.messages)
            record.messages.append(message)
            positions[i] = Position(
                num_tokens=len(record.ids),
                num_messages=len(record.messages),
                num_encoded=len(record.messages),
                response_start=start,
            )
        return type(self)(records, positions)

    def _writable(self, row: int) -> ConversationRecord:
        """The record, or a copy of its beginning if it has grown past this snapshot."""
        record, position = self._records[row], self._positions[row]
        if len(record.ids) == position.num_tokens and len(record.messages) == position.num_messages:
            return record
        return record.copy_prefix(position.num_tokens, position.num_messages)


def _row_indices(index: int | slice | Sequence[int] | Tensor, size: int) -> list[int]:
    if isinstance(index, int):
        if not -size <= index < size:
            raise IndexError(f"Row {index} of {size} conversations.")
        return [index % size]
    if isinstance(index, slice):
        return list(range(size))[index]
    if isinstance(index, Tensor):
        if index.dtype == torch.bool:
            index = index.reshape(-1).nonzero().squeeze(-1)
        index = index.reshape(-1).tolist()
    return [range(size)[i] for i in index]

"""Conversations as append-only token records: the state that environment and policy share.

Tokens are the truth: a row keeps every token with who wrote it, its log-probability and the
policy version that sampled it, beside the messages that it spells. Nothing is ever re-tokenised.
A :class:`Conversations` object is a snapshot of a whole batch (how far each row had got):
appending gives a new snapshot of the same records in time proportional to what is new, and
appending to an old snapshot copies the row first, so that every snapshot stays what it was.

Shape legend: B rows, T tokens of a row (ragged), M messages of a row (ragged).
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from .images import images_of, with_plain_images
from .messages import Message, begun_turn
from .routed_experts import unknown_expert


class Source(IntEnum):
    """The writer of a token."""

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
    """A turn of the assistant: usually what an engine sampled.

    Args:
        ids: the tokens, stop token included.
        log_probs: one per token, in nats, of the distribution that it was drawn from; ``None``
            where the policy did not sample the turn.
        message: what the tokens spell.
        versions: the policy version that sampled them, or one per token when the weights changed
            meanwhile.
        extra: further values of the tokens by name, such as their entropy; one per token each.
        sampling_masks: the set that each token was drawn from, one per token, see
            :class:`~torchrl_data.SamplingMasks`; none where they were not recorded.
        routed_experts: the experts of a mixture to which each token was sent that was read for the
            turn, those of its prompt first, uint8 or int16 ``[R, L, S]``; ``None`` where they were
            not recorded.

    Example:
        >>> from torchrl_data import ConversationEncoder, Conversations
        >>> encoder = ConversationEncoder(tokenizer)
        >>> prompt = Conversations.from_messages([[{"role": "user", "content": "hello"}]])
        >>> ids = tokenizer.encode("world<|im_end|>")
        >>> message = {"role": "assistant", "content": "world"}
        >>> turn = Turn(ids, [-0.5] * len(ids), message, versions=3)
        >>> full = encoder.encode_waiting(prompt).append_turns([turn])
        >>> full.log_probs(0)[full.assistant_mask(0)].shape == (len(ids),)
        True
        >>> full.last_message(0)
        {'role': 'assistant', 'content': 'world'}
    """

    ids: Sequence[int]
    log_probs: Sequence[float] | None
    message: Message
    versions: int | Sequence[int] = -1
    extra: Mapping[str, Sequence[float]] = MappingProxyType({})
    sampling_masks: Sequence[bytes] = ()
    routed_experts: Tensor | None = None

    def check(self, row: int) -> None:
        """Check that everything is aligned with the tokens.

        Args:
            row: whose turn it is, named in the error.

        Raises:
            ValueError: there are not as many log-probs, versions or further values, as ids.
        """
        versions = None if isinstance(self.versions, int) else self.versions
        aligned = {"log-probs": self.log_probs, **self.extra, "policy versions": versions}
        aligned["sampling masks"] = self.sampling_masks or None
        for name, values in aligned.items():
            if values is not None and len(values) != len(self.ids):
                raise ValueError(
                    f"Row {row} has {len(self.ids)} sampled tokens but {len(values)} {name}."
                )


def stream_number(*parts: int | str) -> int:
    """A number that names a stream of random numbers, made of others; the same in every process.

    Args:
        *parts: what tells the stream from others, such as a seed and the number of a rollout.

    Returns:
        62 bits.

    Example:
        >>> stream_number(7, 0) == stream_number(7, 0), stream_number(7, 0) == stream_number(7, 1)
        (True, False)
    """
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 2


class ConversationRecord:
    """A row: tokens and messages, only ever appended to."""

    __slots__ = (
        *("ids", "sources", "log_probs", "versions", "extra"),
        *("messages", "tools", "first_response", "stream", "begun_at", "sampling_masks"),
        "routed_experts",
    )

    def __init__(self, tools: Sequence[dict[str, Any]] | None = None) -> None:
        self.ids = array("q")
        self.sources = bytearray()
        self.log_probs = array("f")
        self.versions = array("q")
        # Further values of sampled tokens by name; what lies past the end of a column is 0.
        self.extra: dict[str, array] = {}
        # The sets that tokens were drawn from; as in a column, what lies past the end has none.
        self.sampling_masks: list[bytes] = []
        # The experts of the tokens, as they were when each was first read, [R, L, S].
        self.routed_experts: Tensor | None = None
        self.messages: list[Message] = []
        self.tools = tuple(tools) if tools else None
        self.first_response: int | None = None
        # Names the random numbers that its turns are drawn with, where sampling has a seed.
        self.stream: int | None = None
        self.begun_at: int | None = None  # the message in which the policy's first turn goes on

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
        if turn.sampling_masks:
            self.sampling_masks.extend([b""] * (start - len(self.sampling_masks)))
            self.sampling_masks.extend(turn.sampling_masks)
        if turn.routed_experts is not None:
            known = self.routed_experts
            new = turn.routed_experts[0 if known is None else len(known) :]
            self.routed_experts = new if known is None else torch.cat([known, new])
        if self.first_response is None:
            self.first_response = len(self.messages)
        self.messages.append(turn.message)
        num_messages = len(self.messages)
        return Position(len(self.ids), num_messages, num_messages, response_start=start)

    def copy_prefix(self, num_tokens: int, num_messages: int) -> "ConversationRecord":
        """A record of its own that starts like this one."""
        copy = ConversationRecord(self.tools)
        copy.stream = self.stream
        copy.ids = self.ids[:num_tokens]
        copy.sources = self.sources[:num_tokens]
        copy.log_probs = self.log_probs[:num_tokens]
        copy.versions = self.versions[:num_tokens]
        copy.extra = {name: column[:num_tokens] for name, column in self.extra.items()}
        copy.sampling_masks = self.sampling_masks[:num_tokens]
        if self.routed_experts is not None:
            copy.routed_experts = self.routed_experts[:num_tokens]
        copy.messages = self.messages[:num_messages]
        if self.first_response is not None and self.first_response < num_messages:
            copy.first_response = self.first_response
        copy.begun_at = self.begun_at
        return copy

    @property
    def begun(self) -> str:
        """The text of the last message, if the policy's first turn goes on in it."""
        is_last = self.begun_at == len(self.messages) - 1 and self.first_response is None
        return begun_turn(self.messages) if is_last else ""


class Waiting(NamedTuple):
    """The part of a conversation that has no tokens yet."""

    messages: list[Message]
    num_encoded: int
    """Messages before them."""
    last_id: int | None
    """The newest token; ``None`` before the first one."""
    tools: tuple[dict[str, Any], ...] | None
    """JSON schemas of the tools that the conversation was started with."""
    goes_on: bool = False
    """The policy's turn goes on in the last of them."""


class Position(NamedTuple):
    """The end of a row when the snapshot was taken."""

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

    Example:
        >>> conversations = Conversations.from_messages([[{"role": "user", "content": "hello"}]])
        >>> longer = conversations.append_messages([[{"role": "assistant", "content": "hi"}]])
        >>> longer.messages(0)
        [{'role': 'user', 'content': 'hello'}, {'role': 'assistant', 'content': 'hi'}]
        >>> len(conversations.messages(0))  # a snapshot never changes
        1
    """

    __slots__ = ("_positions", "_records")

    def __init__(
        self, records: Sequence[ConversationRecord], positions: Sequence[Position] | None = None
    ) -> None:
        self._records = list(records)
        if positions is None:
            positions = [Position(len(r.ids), len(r.messages)) for r in records]
        self._positions = list(positions)

    @classmethod
    def from_messages(
        cls,
        rows: Iterable[Sequence[Message]],
        tools: Iterable[Sequence[dict[str, Any]] | None] | None = None,
        *,
        goes_on: bool = False,
    ) -> Self:
        """Start conversations; nothing is encoded yet.

        Args:
            rows: the messages of each row.
            tools: JSON schemas of the tools of each row.
            goes_on: where a row ends with a text of the assistant, the policy's first turn goes on
                in that message; otherwise it is a message of its own.
        """
        rows = list(rows)
        tools = [None] * len(rows) if tools is None else list(tools)
        records = []
        for messages, schemas in zip(rows, tools, strict=True):
            record = ConversationRecord(schemas)
            record.messages.extend(map(with_plain_images, messages))
            if goes_on and begun_turn(messages):
                record.begun_at = len(messages) - 1
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
        for ids, row_messages in zip(rows, messages, strict=True):
            record = ConversationRecord()
            record.extend_tokens(ids, [Source.CONTENT] * len(ids))
            record.messages.extend(row_messages)
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
        size = len(self)
        if isinstance(index, int):
            if not -size <= index < size:
                raise IndexError(f"Row {index} of {size} conversations.")
            rows: Sequence[int] = [index % size]
        elif isinstance(index, slice):
            rows = range(size)[index]
        else:
            if isinstance(index, Tensor):
                flat = index.reshape(-1)
                index = (flat.nonzero()[:, 0] if flat.dtype == torch.bool else flat).tolist()
            rows = [range(size)[i] for i in index]
        return type(self)([self._records[i] for i in rows], [self._positions[i] for i in rows])

    def __repr__(self) -> str:
        tokens, messages, *_ = zip(*self._positions, strict=True) if len(self) else ((), ())
        return f"Conversations({len(self)} rows, tokens={[*tokens]}, messages={[*messages]})"

    def __eq__(self, other: object) -> bool:
        """Equal when messages, tokens and provenance are."""
        if not isinstance(other, Conversations):
            return NotImplemented
        rows = zip(self._records, self._positions, other._records, strict=False)
        return self._positions == other._positions and all(
            one.messages[: at.num_messages] == two.messages[: at.num_messages]
            and one.tools == two.tools
            and all(
                getattr(one, column)[: at.num_tokens] == getattr(two, column)[: at.num_tokens]
                for column in ("ids", "sources", "log_probs", "versions")
            )
            for one, at, two in rows
        )

    __hash__ = None  # type: ignore[assignment]

    def __copy__(self, memo: object = None) -> Self:
        """The same object: nothing changes a snapshot."""
        return self

    __deepcopy__ = __copy__

    @staticmethod
    def cat(parts: Sequence["Conversations"]) -> "Conversations":
        """A batch of the rows of several."""
        return Conversations(
            [record for part in parts for record in part._records],
            [position for part in parts for position in part._positions],
        )

    def row(self, index: int) -> Self:
        """A snapshot of one row by itself.

        Args:
            index: which.
        """
        if index == 0 and len(self._records) == 1:
            return self
        row = object.__new__(type(self))
        row._records, row._positions = [self._records[index]], [self._positions[index]]
        return row

    def split(self) -> list[Self]:
        """A snapshot of each row by itself."""
        return [self.row(index) for index in range(len(self))]

    def stream(self, row: int) -> int | None:
        """The stream of random numbers of a row; ``None`` where nobody has named one."""
        return self._records[row].stream

    def with_streams(self, streams: Sequence[int]) -> Self:
        """A snapshot in which each row has a stream of random numbers of its own.

        Where the sampling parameters have a seed, a turn is drawn with numbers that follow from the
        seed, the stream and the number of tokens before the turn.

        Args:
            streams: one per row, see :func:`stream_number`.
        """
        records = []
        for record, at, stream in zip(self._records, self._positions, streams, strict=True):
            own = record.copy_prefix(at.num_tokens, at.num_messages)
            own.stream = stream
            records.append(own)
        return type(self)(records, self._positions)

    # What is in a row ---------------------------------------------------------------------------

    @property
    def positions(self) -> tuple[Position, ...]:
        """The position of each row."""
        return tuple(self._positions)

    def position(self, row: int) -> Position:
        """Return how far a row has got."""
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

    def images(self, row: int) -> list[str]:
        """The images of a row that have their tokens, in order, in base 64."""
        return images_of(self._records[row].messages[: self._positions[row].num_encoded])

    def last_message(self, row: int) -> Message:
        """The newest message of a row."""
        return self._records[row].messages[self._positions[row].num_messages - 1]

    def lack_turns(self) -> list[bool]:
        """Return whether each row lacks a turn: it awaits one, or does not end with one.

        Example:
            >>> asked = [{"role": "user", "content": "2 + 2?"}]
            >>> answered = [*asked, {"role": "assistant", "content": "4"}]
            >>> Conversations.from_messages([asked, answered, []]).lack_turns()
            [True, False, True]
        """
        rows = zip(self._records, self._positions, strict=True)
        return [
            at.awaits_response
            or not at.num_messages
            or record.messages[at.num_messages - 1]["role"] != "assistant"
            for record, at in rows
        ]

    def first_response(self, row: int) -> int:
        """Messages before the policy's first turn.

        A conversation that was not sampled here is taken to have its first turn where the first
        message of the role ``assistant`` is.
        """
        first, end = self._records[row].first_response, self._positions[row].num_messages
        if first is not None:
            return min(first, end)
        roles = [message["role"] for message in self.messages(row)]
        return roles.index("assistant") if "assistant" in roles else end

    def num_tokens(self, row: int) -> int:
        """Tokens of a row."""
        return self._positions[row].num_tokens

    def was_sampled(self, row: int) -> bool:
        """Return whether the policy sampled any token of a row."""
        return self.num_tokens_before_policy(row) < self.num_tokens(row)

    def goes_on_in_prompt(self, row: int) -> bool:
        """Whether the policy's first turn goes on in a message of the row's prompt."""
        return self._records[row].begun_at is not None

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
        """Further values of the sampled tokens by name, float32 ``[T]``; 0 elsewhere."""
        num_tokens, values = self._positions[row].num_tokens, {}
        for name, column in self._records[row].extra.items():
            values[name] = torch.zeros(num_tokens)
            known = np.array(column[:num_tokens], np.float32)
            values[name][: len(known)] = torch.from_numpy(known)
        return values

    def sampling_masks(self, row: int) -> list[bytes]:
        """The set that each token of a row was drawn from; none at all where none was recorded."""
        num_tokens, known = self._positions[row].num_tokens, self._records[row].sampling_masks
        return [*known[:num_tokens], *[b""] * (num_tokens - len(known))] if known else []

    def routed_experts(self, row: int) -> Tensor | None:
        """The experts of each token of a row, ``[T, L, S]``; ``None`` where nothing was recorded.

        They are uint8, 255 where a token was not read, or of many experts int16, negative there.
        """
        known, num_tokens = self._records[row].routed_experts, self._positions[row].num_tokens
        if known is None:
            return None
        unknown = unknown_expert(known.dtype)
        experts = known.new_full((num_tokens, *known.shape[1:]), unknown)
        experts[: len(known)] = known[:num_tokens]
        return experts

    def policy_versions(self, row: int) -> Tensor:
        """Policy version of each token, int64 ``[T]``; -1 where the policy did not sample."""
        return self._copy(self._records[row].versions, row, np.int64)

    def sources(self, row: int) -> Tensor:
        """Return who wrote each token, uint8 ``[T]`` of :class:`Source`."""
        return self._copy(self._records[row].sources, row, np.uint8)

    def assistant_mask(self, row: int) -> Tensor:
        """True on sampled tokens, stop token included; bool ``[T]``."""
        return self.sources(row) == Source.MODEL

    def _copy(self, buffer: array | bytearray, row: int, dtype: Any) -> Tensor:
        # The slice is a copy, so the record can go on growing.
        return torch.from_numpy(np.frombuffer(buffer[: self._positions[row].num_tokens], dtype))

    # How it grows -------------------------------------------------------------------------------

    def as_context(self) -> Self:
        """A snapshot of the same tokens, of which the policy sampled none.

        For a row that begins as another one does: what was sampled there is read here, and trained
        there alone. The stream of random numbers is to be named anew.
        """
        records = []
        for record, at in zip(self._records, self._positions, strict=True):
            own = ConversationRecord(record.tools)
            sources = _not_sampled(record.sources[: at.num_tokens])
            own.extend_tokens(record.ids[: at.num_tokens], sources)
            own.messages = record.messages[: at.num_messages]
            records.append(own)
        return type(self)(records, self._positions)

    def begun_elsewhere(self, num_tokens: int, num_messages: int) -> Self:
        """A snapshot of one row whose first tokens were sampled in another row, and are read here.

        Args:
            num_tokens: which of them have no log-probs, versions or other values of the policy.
            num_messages: that they spell.
        """
        (record,), (at,) = self._records, self._positions
        own = record.copy_prefix(at.num_tokens, at.num_messages)
        own.sources[:num_tokens] = _not_sampled(own.sources[:num_tokens])
        own.log_probs[:num_tokens] = array("f", [0.0]) * num_tokens
        own.versions[:num_tokens] = array("q", [-1]) * num_tokens
        for column in own.extra.values():
            known = min(num_tokens, len(column))
            column[:known] = array("f", [0.0]) * known
        known = min(num_tokens, len(own.sampling_masks))
        own.sampling_masks[:known] = [b""] * known
        own.first_response = num_messages if num_messages < at.num_messages else None
        return type(self)([own], [at])

    def before_response(self) -> Self:
        """A snapshot of how each row stood when its last response began, which awaits another.

        Raises:
            RuntimeError: a row does not end with a response that was sampled here.
        """
        positions = []
        for row, (record, at) in enumerate(zip(self._records, self._positions, strict=True)):
            start = at.response_start
            if at.awaits_response or not 0 < start < at.num_tokens or at.num_encoded < 1:
                raise RuntimeError(f"Row {row} does not end with a response that was sampled here.")
            if record.first_response == at.num_encoded - 1 and record.begun_at is not None:
                raise RuntimeError(f"Row {row} has its first response in a message of its prompt.")
            num_messages = at.num_encoded - 1
            positions.append(Position(start, num_messages, num_messages, True, start))
        return type(self)(self._records, positions)

    def append_messages(self, rows: Sequence[Sequence[Message]]) -> Self:
        """A snapshot with messages added to each row; they are encoded when someone asks.

        Args:
            rows: new messages per row; may be empty.
        """
        records, positions = list(self._records), list(self._positions)
        for i, messages in enumerate(rows):
            if messages:
                records[i] = record = self._writable(i)
                record.messages.extend(map(with_plain_images, messages))
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
                at = positions[i]
                records[i] = record = records[i].copy_prefix(at.num_tokens, at.num_encoded)
                record.messages.extend(map(with_plain_images, messages))
                positions[i] = at._replace(num_messages=len(record.messages))
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

    def append_turns(self, turns: Sequence[Turn | None]) -> Self:
        """A snapshot with a turn of the assistant added.

        Args:
            turns: one per row; ``None`` leaves the row as it is. Every row has all columns of
                further values from then on. Where a row's last message is a text of the assistant,
                the turn goes on in it: it is one message.

        Raises:
            RuntimeError: a row does not await a response.
            ValueError: a turn has not as many log-probs, versions or further values, as ids.
        """
        records, positions = list(self._records), list(self._positions)
        columns = {name for turn in turns if turn is not None for name in turn.extra}
        has_masks = any(turn is not None and turn.sampling_masks for turn in turns)
        for i, turn in enumerate(turns):
            if turn is None:
                for name in columns:
                    records[i].extra.setdefault(name, array("f"))
                if has_masks and not records[i].sampling_masks:
                    records[i].sampling_masks = [b""] * len(records[i].ids)
                continue
            if not positions[i].awaits_response:
                raise RuntimeError(f"Row {i} does not await a response: encode its messages first.")
            turn.check(i)
            records[i] = record = self._writable(i)
            if begun := record.begun:  # the turn goes on in that message
                records[i] = record = record.copy_prefix(len(record.ids), len(record.messages) - 1)
                content = f"{begun}{turn.message['content']}"
                turn = turn._replace(message={**turn.message, "content": content})
            positions[i] = record.append_turn(turn)
        return type(self)(records, positions)

    def _writable(self, row: int) -> ConversationRecord:
        """The record, or a copy of its beginning if it has grown past this snapshot."""
        record, position = self._records[row], self._positions[row]
        if len(record.ids) == position.num_tokens and len(record.messages) == position.num_messages:
            return record
        return record.copy_prefix(position.num_tokens, position.num_messages)


def _not_sampled(sources: bytearray) -> bytearray:
    """The writers of tokens that are read in a row, what was sampled elsewhere included."""
    content = bytes([Source.CONTENT])
    return sources.replace(bytes([Source.MODEL]), content)


def waiting_rows(conversations: Conversations) -> list[Waiting | None]:
    """Return what has no tokens yet in each row; ``None`` where the next token is the policy's."""
    found: list[Waiting | None] = []
    for record, at in zip(conversations._records, conversations._positions, strict=True):
        messages = record.messages[at.num_encoded : at.num_messages]
        last_id = record.ids[at.num_tokens - 1] if at.num_tokens else None
        goes_on = at.num_encoded == 0 and record.begun_at == at.num_messages - 1
        waiting = Waiting(messages, at.num_encoded, last_id, record.tools, goes_on)
        found.append(None if at.awaits_response else waiting)
    return found


def ids_and_images(conversations: Conversations) -> tuple[list[list[int]], list[list[str]]]:
    """Token ids of all rows, and their images: what an engine reads."""
    rows = list(zip(conversations._records, conversations._positions, strict=True))
    ids = [record.ids[: at.num_tokens].tolist() for record, at in rows]
    return ids, [images_of(record.messages[: at.num_encoded]) for record, at in rows]


def continues(later: Conversations, earlier: Conversations) -> bool:
    """Return whether all tokens of one conversation, and its images, begin another one."""
    old, new = earlier._records[0], later._records[0]
    n = earlier._positions[0].num_tokens
    if later._positions[0].num_tokens < n:
        return False
    if new is old:
        return True
    if new.ids[:n] != old.ids[:n] or new.sources[:n] != old.sources[:n]:
        return False
    images = earlier.images(0)
    return later.images(0)[: len(images)] == images

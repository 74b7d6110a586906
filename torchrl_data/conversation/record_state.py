"""Conversations as plain values and tensors, for whoever stores them.

Shape legend: T tokens of a row (ragged).
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .conversations import Conversations
from .record import ConversationRecord, Position


def conversation_states(conversations: Conversations) -> list[dict[str, Any]]:
    """One dictionary a row of all that a snapshot knows; its tensors ``[T]`` are copies."""
    return [_state(conversations, row) for row in range(len(conversations))]


def _state(conversations: Conversations, row: int) -> dict[str, Any]:
    record, position = conversations._records[row], conversations.position(row)
    first = record.first_response
    return {
        "position": position._asdict(),
        "messages": conversations.messages(row),
        "tools": record.tools,
        # As in a copy of the record's beginning: it may have grown past the snapshot.
        "first_response": None if first is None or first >= position.num_messages else first,
        "ids": conversations.token_ids(row),
        "sources": conversations.sources(row),
        "log_probs": conversations.log_probs(row),
        "versions": conversations.policy_versions(row),
        "extra": conversations.extra(row),
    }


def conversations_from_states(states: Sequence[Mapping[str, Any]]) -> Conversations:
    """A snapshot of records of its own, the inverse of :func:`conversation_states`.

    Raises:
        ValueError: a row's columns or messages do not fit its position.
    """
    rows = [_record(number, state) for number, state in enumerate(states)]
    return Conversations([record for record, _ in rows], [position for _, position in rows])


def _record(row: int, state: Mapping[str, Any]) -> tuple[ConversationRecord, Position]:
    record = ConversationRecord(state["tools"])
    record.ids = _column("q", state["ids"])
    record.sources = bytearray(state["sources"].cpu().numpy().tobytes())
    record.log_probs = _column("f", state["log_probs"])
    record.versions = _column("q", state["versions"])
    record.extra = {name: _column("f", values) for name, values in state["extra"].items()}
    record.messages = list(state["messages"])
    record.first_response = state["first_response"]
    position = Position(**state["position"])
    columns = [record.ids, record.sources, record.log_probs, record.versions]
    if any(len(column) != position.num_tokens for column in (*columns, *record.extra.values())):
        raise ValueError(
            f"Conversation {row} has {position.num_tokens} tokens but columns of "
            f"{[len(column) for column in columns]}."
        )
    if len(record.messages) != position.num_messages:
        raise ValueError(
            f"Conversation {row} has {position.num_messages} messages, and "
            f"{len(record.messages)} are stored."
        )
    return record, position


def _column(code: str, values: Tensor) -> array:
    column = array(code)
    column.frombytes(values.cpu().numpy().tobytes())
    return column

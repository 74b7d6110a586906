"""Conversations as plain values and tensors, for files.

Shape legend: T tokens of a row (ragged).
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .conversation import ConversationRecord, Conversations, Position
from .sampling_masks import SamplingMasks


def conversation_states(conversations: Conversations) -> list[dict[str, Any]]:
    """A dictionary a row of all that a snapshot knows; its tensors ``[T]`` are copies."""
    states = []
    for row, position in enumerate(conversations.positions):
        record = conversations._records[row]
        first = record.first_response
        # As in a copy of the record's beginning: it may have grown past the snapshot.
        is_past = first is not None and first >= position.num_messages
        states.append(
            {
                "position": position._asdict(),
                "messages": conversations.messages(row),
                "tools": record.tools,
                "first_response": None if is_past else first,
                "begun_at": record.begun_at,
                "ids": conversations.token_ids(row),
                "sources": conversations.sources(row),
                "log_probs": conversations.log_probs(row),
                "versions": conversations.policy_versions(row),
                "extra": conversations.extra(row),
                **_masks_state(conversations.sampling_masks(row)),
                **_experts_state(conversations.routed_experts(row)),
            }
        )
    return states


def _masks_state(sets: list[bytes]) -> dict[str, Any]:
    """The sampling masks of a row, of one that has any."""
    return {"sampling_masks": SamplingMasks.of(sets)._asdict()} if sets else {}


def _experts_state(experts: Tensor | None) -> dict[str, Any]:
    """The experts of a row, of one that has any."""
    return {} if experts is None else {"routed_experts": experts}


def conversations_from_states(states: Sequence[Mapping[str, Any]]) -> Conversations:
    """A snapshot of records of its own, the inverse of :func:`conversation_states`.

    Raises:
        ValueError: a row's columns or messages do not fit its position.
    """
    records, positions = [], []
    for row, state in enumerate(states):
        record, position = ConversationRecord(state["tools"]), Position(**state["position"])
        record.extra = {name: array("f") for name in state["extra"]}
        columns = [
            (record.ids, state["ids"]),
            (record.log_probs, state["log_probs"]),
            (record.versions, state["versions"]),
            *((column, state["extra"][name]) for name, column in record.extra.items()),
        ]
        for column, values in columns:
            column.frombytes(values.cpu().numpy().tobytes())
        record.sources.extend(state["sources"].cpu().numpy().tobytes())
        lengths = [len(record.sources), *(len(column) for column, _ in columns)]
        if any(length != position.num_tokens for length in lengths):
            raise ValueError(
                f"Conversation {row} has {position.num_tokens} tokens but columns of {lengths}."
            )
        record.messages, record.first_response = list(state["messages"]), state["first_response"]
        record.begun_at = state.get("begun_at")
        record.routed_experts = state.get("routed_experts")
        if masks := state.get("sampling_masks"):
            record.sampling_masks = SamplingMasks(masks["data"], masks["lengths"]).sets()
            if len(record.sampling_masks) != position.num_tokens:
                raise ValueError(
                    f"Conversation {row} has {position.num_tokens} tokens but "
                    f"{len(record.sampling_masks)} sampling masks."
                )
        if len(record.messages) != position.num_messages:
            raise ValueError(
                f"Conversation {row} has {position.num_messages} messages, and "
                f"{len(record.messages)} are stored."
            )
        records.append(record)
        positions.append(position)
    return Conversations(records, positions)

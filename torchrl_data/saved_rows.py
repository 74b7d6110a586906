"""A row of a buffer as plain values: what a file holds of it without pickle.

Nested dictionaries and lists of strings, numbers, booleans, ``None`` and tensors, so the tensors
can go into safetensors and all else into JSON.

Shape legend: T tokens of a row.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
)
from torch import Tensor

from .batched_object import BatchedObject, snapshot_of, view_of
from .conversation import Conversations
from .conversation_state import conversation_states, conversations_from_states
from .conversation_view import ConversationView
from .history import History
from .keys import (
    HISTORY,
)
from .layout import ChatHistory, LogProbs, Masks, Text, Tokens
from .ragged.packed import entries_of

_GROUPS: Final[dict[str, Any]] = {
    kind.__name__: kind for kind in (ChatHistory, LogProbs, Masks, Text, Tokens)
}
_ROWS: Final = "rows"


def row_state(row: TensorDictBase) -> dict[str, Any]:
    """A row as plain values, for a checkpoint.

    Args:
        row: of any batch size; tensors, Python values and rows within it, groups such as
            :class:`Tokens` and :class:`ChatHistory` with their conversations.

    Returns:
        Dictionaries with strings as keys, and lists, of plain values and tensors; the tensors are
        copies, of their dtype and on their device. :func:`row_from_state` makes the row again;
        tuples come back as lists.

    Raises:
        TypeError: an entry holds something that is no plain value; the message names it.
    """
    return _state(row, ())


def row_from_state(state: Mapping[str, Any]) -> TensorDict:
    """The row of which :func:`row_state` made plain values.

    Args:
        state: what it gave.

    Returns:
        The row; conversations have records of their own.
    """
    row = TensorDict({}, batch_size=state["batch_size"])
    for key, entry in state["entries"].items():
        if isinstance(entry, Tensor):
            row.set(key, entry)
            continue
        ((kind, content),) = entry.items()
        if kind == "value":
            row.set_non_tensor(key, content)
        elif kind == "list":
            row.set(key, content)
        elif kind == "messages":
            row.set(key, History.from_chats(content))
        elif kind == "conversations":
            conversations, view = conversations_from_states(content), ConversationView(key)
            row.set(key, BatchedObject.of(conversations, row.batch_size, view=view))
        else:
            entries = row_from_state(content)
            row.set(key, entries if kind == _ROWS else _GROUPS[kind]._from_tensordict(entries, {}))
    return row


def _state(row: TensorDictBase, path: tuple[str, ...]) -> dict[str, Any]:
    entries = {str(key): _entry(value, (*path, str(key))) for key, value in row.items()}
    return {"batch_size": list(row.batch_size), "entries": entries}


def _entry(value: Any, path: tuple[str, ...]) -> Any:
    if isinstance(value, Tensor):
        return _plain(value, path)
    if isinstance(value, BatchedObject):
        conversations, view = snapshot_of(value, Conversations), view_of(value)
        as_messages = isinstance(view, ConversationView) and view.mode == HISTORY
        if conversations is not None and as_messages:
            return {"conversations": _plain(conversation_states(conversations), path)}
        if conversations is None and view is None:
            return {"value": _plain(value.shown(), path)}
        raise _not_plain(value, path)
    if isinstance(value, NonTensorStack):
        return {"list": _plain(value.tolist(), path)}
    if isinstance(value, NonTensorData):
        return {"value": _plain(value.data, path)}
    if isinstance(value, History):
        return {"messages": _plain(value.to_chats(), path)}
    name = type(value).__name__
    if name in _GROUPS:
        return {name: _state(entries_of(value), path)}
    if isinstance(value, TensorDictBase) and not is_tensorclass(value):
        return {_ROWS: _state(value, path)}
    raise _not_plain(value, path)


def _plain(value: Any, path: tuple[str, ...]) -> Any:
    """A value with the types that JSON has, and tensors."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):  # members of enumerations too
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Tensor):
        # By itself, in order: a view would take what it looks at into the file.
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise _not_plain(value, path)
        return {str(key): _plain(item, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, str(i))) for i, item in enumerate(value)]
    raise _not_plain(value, path)


def _not_plain(value: Any, path: tuple[str, ...]) -> TypeError:
    return TypeError(
        f"row_state: the entry {path} holds a {type(value).__name__} ({value!r:.80}), which has no "
        "plain form. A row that is saved holds tensors, strings, numbers, lists, dictionaries "
        "with strings as keys, and conversations: convert it, or leave it out (map_row= of the "
        "data, exclude() of the row)."
    )

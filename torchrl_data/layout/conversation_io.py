"""Where the loop keeps its conversations in a TensorDict: one opaque object for the whole batch.

A `BatchedObject` carries the :class:`Conversations`. The group that
holds the leaves is a :class:`ChatHistory`, which builds a ``History`` when somebody asks for one.
"""

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

from torchrl_data.conversation.batched_object import BatchedObject, view_of
from torchrl_data.conversation.conversations import Conversations
from torchrl_data.conversation.views import ConversationView
from torchrl_data.errors import MissingEntryError
from torchrl_data.keys import DONE, HISTORY, INPUT_MODES, STEP_MASK, TEXT
from torchrl_data.ragged.reading import entries_of, first_entries

from .containers import ChatHistory, Text, Tokens
from .export import HistoryView, conversations_of

if TYPE_CHECKING:
    from torchrl_data.templates.encoder import ConversationEncoder


def one_dimension(batch: TensorDictBase) -> TensorDictBase:
    """The batch itself if it is ``[B]``, and otherwise its rows in one dimension."""
    return batch if batch.ndim == 1 else batch.reshape(batch.numel())


def active_rows(batch: TensorDictBase) -> Tensor:
    """The rows that take part in a step, bool ``[B]``."""
    # Those of the step mask, or all when there is none, but for those that are done already.
    mask = batch.get(STEP_MASK, None)
    rows = torch.ones(batch.numel(), dtype=torch.bool) if mask is None else mask.view(-1)
    done = batch.get(DONE, None)
    return rows if done is None else rows & ~done.view(-1)


def write_conversations(
    batch: TensorDictBase,
    which: str,
    conversations: Conversations,
    *,
    mode: str | None = None,
    encoder: "ConversationEncoder | None" = None,
) -> None:
    """Put a snapshot at ``(mode, which)``.

    Args:
        batch: a TensorDict of as many rows as the snapshot has.
        which: ``"prompt"``, ``"response"`` or ``"full"``.
        conversations: the snapshot.
        mode: ``"history"``, ``"text"`` or ``"tokens"``; when not given, that of the conversations
            of this name which the batch holds already, or else ``"history"``.
        encoder: spells them out in the modes ``"text"`` and ``"tokens"``.

    Raises:
        ValueError: the number of rows differs, or an encoder is needed and not given.
    """
    if batch.numel() != len(conversations):
        raise ValueError(
            f"A batch of {batch.numel()} rows can't hold {len(conversations)} conversations."
        )
    view: ConversationView | HistoryView = HistoryView(which)
    if mode is None:
        stored = _newest_leaf(batch, which)
        shown_as = None if stored is None else view_of(stored)
        if isinstance(shown_as, ConversationView):
            view, mode = shown_as, shown_as.mode
        else:
            mode = HISTORY
    elif mode != HISTORY:
        if encoder is None:
            raise ValueError(f"Conversations are spelled out as {mode} by an encoder: give it.")
        view = ConversationView(mode, which, encoder)
    leaf = BatchedObject.of(conversations, batch.batch_size, view=view)
    group = _group(batch, mode)
    if group is None:
        batch.set(mode, _new_group(mode, {which: leaf}, batch.batch_size))
    else:
        group.set(which, leaf)


def read_conversations(batch: TensorDictBase, which: str, *, who: str) -> Conversations:
    """The snapshot of a name, in whatever mode, with exactly the rows of the batch.

    Args:
        batch: what holds it at ``("history", which)``, ``("text", which)`` or
            ``("tokens", which)``.
        which: ``"prompt"``, ``"response"`` or ``"full"``.
        who: the component that reads, named in the error.

    Raises:
        MissingEntryError: there is none.
    """
    conversations = conversations_of(_newest_leaf(batch, which))
    if conversations is None:
        group = _group(batch, HISTORY)
        leaf = None if group is None else group.get(which, None)
        found = sorted(map(str, batch.keys(include_nested=True, leaves_only=True)))
        raise MissingEntryError(
            f"{who} reads {(HISTORY, which)}, where the batch holds {type(leaf).__name__} instead "
            f"of Conversations. The batch holds {found}. Reset the environment (prompt) or run "
            "the policy (full) first."
        )
    return conversations


def _group(batch: TensorDictBase, mode: str) -> Any:
    """The group of a mode; a value of the same name (a column ``text``, say) is none."""
    group = batch.get(mode, None)
    return None if group is None or is_non_tensor(group) else entries_of(group)


def _newest_leaf(batch: TensorDictBase, which: str) -> Any:
    """The leaf of a name that holds conversations."""
    # A policy writes `history` in every mode, so that of another mode is the newer one.
    leaves = (conversation_leaf(batch, mode, which) for mode in reversed(INPUT_MODES))
    return next((leaf for leaf in leaves if leaf is not None), None)


def conversation_leaf(batch: TensorDictBase, mode: str, which: str) -> Any:
    """The leaf at ``(mode, which)`` if it holds conversations, and otherwise ``None``."""
    group = _group(batch, mode)
    if group is None:
        return None
    first = first_entries(group)
    leaf = first.get(which, None)
    if leaf is None or conversations_of(leaf) is None:
        return None
    return leaf if first is group else group.get(which)


def _new_group(mode: str, parts: dict[str, Any], batch_size: torch.Size) -> Any:
    if mode == HISTORY:
        return ChatHistory.of(parts, batch_size)
    group: Any = Text if mode == TEXT else Tokens
    entries = TensorDict._new_unsafe(parts, batch_size=batch_size)
    return group._from_tensordict(entries, {})

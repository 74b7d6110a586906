"""Conversations in a TensorDict: one opaque object for the whole batch, or the tokens row by row.

In the loop a `BatchedObject` carries the :class:`Conversations`. The group that holds the leaves
is a :class:`ChatHistory`, which builds a ``History`` when somebody asks for one. A loss and a
buffer have one TensorDict per row. Shape legend: B rows, T tokens of a row.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
)
from torch import Tensor

from .batched_object import BatchedObject, snapshot_of, view_of
from .conversation import Conversations, Source
from .conversation_view import ConversationView
from .images import images_of
from .keys import (
    DONE,
    FULL,
    HISTORY,
    IMAGES,
    INPUT_MODES,
    ROUTED_EXPERTS,
    SAMPLING_MASK,
    STEP_MASK,
    TEXT,
)
from .layout import TOKEN_GROUPS, ChatHistory, Text, Tokens
from .missing_entry import missing_entry
from .ragged.packed import first_entries
from .sampling_masks import mask_entries

if TYPE_CHECKING:
    from .templates.encoder import ConversationEncoder


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
    if len(conversations) != batch.numel():
        raise ValueError(
            f"A batch of {batch.numel()} rows can't hold {len(conversations)} conversations."
        )
    codec: Any = encoder
    if mode is None:
        stored = _newest(batch, which)
        view = None if stored is None else view_of(stored.leaf)
        is_spelled = isinstance(view, ConversationView)
        mode, codec = (view.mode, view.encoder) if is_spelled else (HISTORY, None)
    write_parts(batch, {which: conversations}, mode=mode, encoder=codec)


def write_parts(
    batch: TensorDictBase,
    parts: Mapping[str, Conversations],
    *,
    mode: str = HISTORY,
    encoder: "ConversationEncoder | None" = None,
) -> None:
    """Put snapshots of the batch's rows at ``(mode, which)``; see :func:`write_conversations`."""
    size = batch.batch_size
    rows = torch.arange(batch.numel()).view(size)
    leaves = {}
    for which, conversations in parts.items():
        if mode != HISTORY and encoder is None:
            raise ValueError(f"Conversations are spelled out as {mode} by an encoder: give it.")
        view = ConversationView(which, mode, None if mode == HISTORY else encoder)
        leaves[which] = BatchedObject.of(conversations, size, rows, rows, view)
    group = _group(batch, mode)
    if group is None:
        kind: Any = {HISTORY: ChatHistory, TEXT: Text}.get(mode, Tokens)
        entries = TensorDict._new_unsafe(leaves, batch_size=size)
        batch.set(mode, kind._from_tensordict(entries, {}))
        return
    for which, leaf in leaves.items():
        group.set(which, leaf)


def read_conversations(batch: TensorDictBase, which: str, *, who: str) -> Conversations:
    """The snapshot of a name, in whatever mode, with exactly the rows of the batch.

    Args:
        batch: of any batch shape ``[*B]``; holds it at ``("history", which)``,
            ``("text", which)`` or ``("tokens", which)``.
        which: ``"prompt"``, ``"response"`` or ``"full"``.
        who: the component that reads, named in the error.

    Returns:
        The conversations of its B rows, in order.

    Raises:
        MissingEntryError: there is none, or a ``History`` built by hand, which has no tokens.

    Example:
        >>> from torchrl_envs import ChatEnv
        >>> queries = TensorDict({"query": ["hello", "bye"]}, batch_size=[2])
        >>> batch = ChatEnv(batch_size=(2,)).reset(queries)
        >>> conversations = read_conversations(batch, "prompt", who="my_function")
        >>> len(conversations), conversations.messages(1)
        (2, [{'role': 'user', 'content': 'bye'}])
    """
    stored = _newest(batch, which)
    if stored is None:
        group = _group(batch, HISTORY)
        kind = type(None if group is None else group.get(which, None)).__name__
        instead = f"where the batch holds {kind} instead of Conversations (text can't be set)"
        raise missing_entry(batch, (HISTORY, which), who, instead=instead)
    return stored.conversations


def _group(batch: TensorDictBase, mode: str) -> Any:
    """The group of a mode; a value of the same name (a column ``text``, say) is none."""
    group = batch.get(mode, None)
    if group is None or is_non_tensor(group):
        return None
    return group if isinstance(group, TensorDictBase) else group._tensordict


class Stored(NamedTuple):
    """Conversations that a batch holds as such."""

    conversations: Conversations
    leaf: Any


def stored_conversations(batch: TensorDictBase, mode: str, which: str) -> Stored | None:
    """Return what is at ``(mode, which)`` if it is conversations, and otherwise ``None``."""
    group = _group(batch, mode)
    if isinstance(group, LazyStackedTensorDict):
        # Of rows of other kinds there may be no stack: the first one tells.
        first = first_entries(group).get(which, None)
        group = group if snapshot_of(first, Conversations) is not None else None
    leaf = None if group is None else group.get(which, None)
    conversations = None if leaf is None else snapshot_of(leaf, Conversations)
    return None if conversations is None else Stored(conversations, leaf)


def _newest(batch: TensorDictBase, which: str) -> Stored | None:
    """The conversations of a name."""
    # A policy writes `history` in every mode, so that of another mode is the newer one.
    found = (stored_conversations(batch, mode, which) for mode in reversed(INPUT_MODES))
    return next((stored for stored in found if stored is not None), None)


def row_tensordicts(conversations: Conversations) -> list[TensorDict]:
    """A TensorDict per row, with everything that a loss reads of its tokens.

    Args:
        conversations: a snapshot.

    Returns:
        B TensorDicts without batch size: ``tokens``, a :class:`Tokens` of prompt, response and
        full, int64; ``masks``, a :class:`Masks`, bool; ``log_probs``, a :class:`LogProbs` of
        response and full, float32; ``("policy_versions", "full")``, int64; further values as
        ``(name, "response" / "full")``, float32. All ``[T]``, aligned with the full tokens but
        for prompt and response, which are its beginning and end. ``sampling_mask`` of a row that
        has any (see :class:`~torchrl_data.SamplingMasks`), ``routed_experts`` and ``images``.

    Example:
        >>> from torchrl_data import ConversationEncoder, encode_demonstrations
        >>> chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
        >>> [row] = row_tensordicts(encode_demonstrations(ConversationEncoder(tokenizer), [chat]))
        >>> ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        >>> ids.shape == mask.shape, tokenizer.decode(ids[mask])
        (True, '4<|im_end|>')
    """
    rows, size = [], torch.Size([])
    for row, record in enumerate(conversations._records):
        position = conversations._positions[row]
        n, start = position.num_tokens, position.response_start
        ids = torch.from_numpy(np.array(record.ids[:n], np.int64))
        log_probs = torch.from_numpy(np.array(record.log_probs[:n], np.float32))
        is_sampled = np.frombuffer(record.sources, np.uint8, n) == Source.MODEL.value
        groups = {
            "tokens": {"prompt": ids[:start], "response": ids[start:], "full": ids},
            "masks": {
                "all_attention_mask": torch.ones(n, dtype=torch.bool),
                "all_assistant_mask": torch.from_numpy(is_sampled),
            },
            "log_probs": {"response": log_probs[start:], "full": log_probs},
            "policy_versions": {"full": torch.from_numpy(np.array(record.versions[:n], np.int64))},
        }
        for name, values in conversations.extra(row).items():
            groups[name] = {"response": values[start:], "full": values}
        entries: dict[str, Any] = {}
        for name, group in groups.items():
            kind, values = TOKEN_GROUPS.get(name), TensorDict._new_unsafe(group, batch_size=size)
            entries[name] = values if kind is None else kind._from_tensordict(values, {})
        if record.sampling_masks:
            entries[SAMPLING_MASK] = mask_entries(conversations.sampling_masks(row))
        if record.routed_experts is not None:
            experts = {FULL: conversations.routed_experts(row)}
            entries[ROUTED_EXPERTS] = TensorDict._new_unsafe(experts, batch_size=size)
        if images := images_of(record.messages[: position.num_encoded]):
            entries[IMAGES] = NonTensorData({"data": images})
        rows.append(TensorDict._new_unsafe(entries, batch_size=size))
    return rows

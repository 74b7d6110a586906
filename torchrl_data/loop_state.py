"""Where the loop keeps its conversations in a TensorDict: one opaque object for the whole batch.

A leaf beside the tensors carries the :class:`Conversations` and which of its rows it stands for, so
that indexing, splitting and stacking the TensorDict keep the rows right, at the cost of one small
tensor. The group that holds the leaves is a :class:`ChatHistory`, which builds a ``History`` when
somebody asks for one.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
)
from torch import Tensor

from .conversation import Conversations
from .conversation_faces import ConversationFace, in_shape
from .conversation_views import conversations_of
from .errors import MissingEntryError
from .keys import HISTORY, INPUT_MODES, STEP_MASK, TEXT
from .layout import ChatHistory, Text, Tokens
from .ragged import entries_of
from .tensorclass_views import attribute_reader, documented

if TYPE_CHECKING:
    from .encoder import ConversationEncoder


def _read(leaf: Any, name: str, read: Callable[[Any, str], Any]) -> Any:
    return leaf.shown() if name == "data" else read(leaf, name)


@documented
@attribute_reader(_read)
class ConversationLeaf(NonTensorData):
    """Conversations as a leaf of a TensorDict, one row per batch element.

    Its ``data`` are always the conversations of its own rows: ``td[2:4]["history", "prompt"]`` has
    two of them. With a face they are what the face shows: ``td["text", "prompt"]`` is a list of
    strings, ``td["tokens", "prompt"]`` a list of int64 ``[T]``.
    """

    _documentation = __doc__

    data: Any
    rows: Tensor | None = None
    """Which row of the conversations each batch element is; int64, shaped like the batch."""
    whole: Tensor | None = None
    """The ``rows`` of a leaf that was never indexed: the same tensor, so the check is ``is``."""
    face: Any = None
    """A :class:`ConversationFace`, or ``None`` to show the conversations themselves."""
    _metadata: dict | None = None
    _is_non_tensor: bool = True

    @classmethod
    def of(
        cls,
        conversations: Conversations,
        batch_size: torch.Size,
        rows: Tensor | None = None,
        whole: Tensor | None = None,
        face: ConversationFace | None = None,
    ) -> "ConversationLeaf":
        """A leaf of a batch size; without ``rows``, one that stands for all of them in order."""
        if rows is None:
            rows = whole = torch.arange(len(conversations)).view(batch_size)
        leaf = cls(data=conversations, batch_size=batch_size)
        # As an entry of the inner TensorDict, the rows follow every operation on the batch.
        state = leaf.__dict__
        state["_tensordict"]._set_str(
            "rows", rows, inplace=False, validated=True, non_blocking=False
        )
        state["_non_tensordict"].pop("rows", None)
        state["_non_tensordict"]["whole"] = whole
        state["_non_tensordict"]["face"] = face
        return leaf

    @property
    def dtype(self) -> None:  # type: ignore[override]
        """None, as for all leaves that are not tensors (specs compare it)."""
        return None

    def conversations(self) -> Conversations:
        """The conversations of this leaf's rows."""
        state = self.__dict__
        everything = state["_non_tensordict"]["data"]
        rows = state["_tensordict"]._get_str("rows", None)
        if rows is None or rows is state["_non_tensordict"].get("whole"):
            return everything
        return everything[rows]

    def shown(self) -> Any:
        """What the face shows of this leaf's rows, or the conversations if there is none."""
        face = self.__dict__["_non_tensordict"].get("face")
        conversations = self.conversations()
        if face is None:
            return conversations
        return in_shape(face.rows(conversations), self.batch_size)

    def clone(self, recurse: bool = True, **kwargs: Any) -> "ConversationLeaf":  # noqa: ARG002
        """The same leaf: conversations are snapshots, which nothing changes."""
        return self.empty()

    def empty(
        self,
        recurse: bool = False,  # noqa: ARG002
        *,
        device: Any = None,  # noqa: ARG002
        batch_size: torch.Size | None = None,
        names: Any = None,  # noqa: ARG002
    ) -> "ConversationLeaf":
        """The same leaf, perhaps of another shape."""
        state = self.__dict__
        size = self.batch_size if batch_size is None else torch.Size(batch_size)
        rows = state["_tensordict"]._get_str("rows", None)
        whole = state["_non_tensordict"].get("whole")
        if rows is not None and rows.shape != size:
            rows = rows.view(size)
        return type(self).of(state["_non_tensordict"]["data"], size, rows, whole, face_of(self))

    def where(  # type: ignore[override]
        self,
        condition: Tensor,
        other: Any,
        *,
        out: Any = None,  # noqa: ARG002
        pad: Any = None,  # noqa: ARG002
    ) -> "ConversationLeaf":
        """This leaf's conversations where a condition holds, another leaf's elsewhere."""
        if not isinstance(other, ConversationLeaf):
            raise TypeError(
                f"ConversationLeaf.where takes another one, got {type(other).__name__}."
            )
        both = Conversations.cat([self.conversations(), other.conversations()])
        own = torch.arange(self.numel())
        rows = torch.where(condition.reshape(-1), own, own + self.numel())
        return type(self).of(both[rows], self.batch_size, face=face_of(self))


def face_of(leaf: Any) -> ConversationFace | None:
    """The face of a leaf that holds conversations, of the first one in a stack of leaves.

    Args:
        leaf: of a batch, or of several batches that were stacked.
    """
    while isinstance(leaf, NonTensorStack):
        leaf = leaf.unbind(0)[0]
    return leaf.__dict__["_non_tensordict"].get("face")


def active_rows(batch: TensorDictBase) -> Tensor:
    """The rows that take part in a step, bool ``[B]``: those of the step mask, or all."""
    mask = batch.get(STEP_MASK, None)
    return torch.ones(batch.numel(), dtype=torch.bool) if mask is None else mask.view(-1)


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
        ValueError: the number of rows differs.
    """
    if batch.numel() != len(conversations):
        raise ValueError(
            f"A batch of {batch.numel()} rows can't hold {len(conversations)} conversations."
        )
    face = None
    if mode is None:
        held = _held_leaf(batch, which)
        face = None if held is None else face_of(held)
        mode = HISTORY if face is None else face.mode
    elif mode != HISTORY and encoder is not None:
        face = ConversationFace(mode, which, encoder)
    leaf = ConversationLeaf.of(conversations, batch.batch_size, face=face)
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
    conversations = conversations_of(_held_leaf(batch, which))
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


def _held_leaf(batch: TensorDictBase, which: str) -> Any:
    """The leaf of a name that holds conversations.

    A policy writes ``history`` in every mode, so that of another mode is the newer one.
    """
    leaves = (conversation_leaf(batch, mode, which) for mode in reversed(INPUT_MODES))
    return next((leaf for leaf in leaves if leaf is not None), None)


def conversation_leaf(batch: TensorDictBase, mode: str, which: str) -> Any:
    """The leaf at ``(mode, which)`` if it holds conversations, and otherwise ``None``.

    Args:
        batch: of any shape and layout.
        mode: ``"history"``, ``"text"`` or ``"tokens"``.
        which: ``"prompt"``, ``"response"`` or ``"full"``.
    """
    group = _group(batch, mode)
    if group is None:
        return None
    first = group
    while isinstance(first, LazyStackedTensorDict):
        first = entries_of(first.tensordicts[0])
    # Ragged rows of tensors can't be stacked, so they are not asked for.
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

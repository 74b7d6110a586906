"""Where the loop keeps its conversations in a TensorDict: one opaque object for the whole batch.

A leaf beside the tensors carries the :class:`Conversations` and which of its rows it stands for, so
that indexing, splitting and stacking the TensorDict keep the rows right, at the cost of one small
tensor. The group that holds the leaves is a :class:`ChatHistory`, which builds a ``History`` when
somebody asks for one.
"""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase
from torch import Tensor

from .conversation import Conversations
from .conversation_views import conversations_of
from .errors import MissingEntryError
from .keys import HISTORY, STEP_MASK
from .layout import ChatHistory
from .tensorclass_views import attribute_reader, documented


def _read(leaf: Any, name: str, read: Callable[[Any, str], Any]) -> Any:
    return leaf.conversations() if name == "data" else read(leaf, name)


@documented
@attribute_reader(_read)
class ConversationLeaf(NonTensorData):
    """Conversations as a leaf of a TensorDict, one row per batch element.

    Its ``data`` are always the conversations of its own rows: ``td[2:4]["history", "prompt"]`` has
    two of them.
    """

    _documentation = __doc__

    data: Any
    rows: Tensor | None = None
    """Which row of the conversations each batch element is; int64, shaped like the batch."""
    whole: Tensor | None = None
    """The ``rows`` of a leaf that was never indexed: the same tensor, so the check is ``is``."""
    _metadata: dict | None = None
    _is_non_tensor: bool = True

    @classmethod
    def of(
        cls,
        conversations: Conversations,
        batch_size: torch.Size,
        rows: Tensor | None = None,
        whole: Tensor | None = None,
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
        return type(self).of(state["_non_tensordict"]["data"], size, rows, whole)

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
        return type(self).of(both[rows], self.batch_size)


def active_rows(batch: TensorDictBase) -> Tensor:
    """The rows that take part in a step, bool ``[B]``: those of the step mask, or all."""
    mask = batch.get(STEP_MASK, None)
    return torch.ones(batch.numel(), dtype=torch.bool) if mask is None else mask.view(-1)


def write_conversations(batch: TensorDictBase, which: str, conversations: Conversations) -> None:
    """Put a snapshot at ``("history", which)``.

    Args:
        batch: a TensorDict of as many rows as the snapshot has.
        which: ``"prompt"``, ``"response"`` or ``"full"``.
        conversations: the snapshot.

    Raises:
        ValueError: the number of rows differs.
    """
    if batch.numel() != len(conversations):
        raise ValueError(
            f"A batch of {batch.numel()} rows can't hold {len(conversations)} conversations."
        )
    leaf = ConversationLeaf.of(conversations, batch.batch_size)
    group = batch.get(HISTORY, None)
    if group is None:
        batch.set(HISTORY, ChatHistory.of({which: leaf}, batch.batch_size))
    else:
        group.set(which, leaf)


def read_conversations(batch: TensorDictBase, which: str, *, who: str) -> Conversations:
    """The snapshot at ``("history", which)``, with exactly the rows of the batch.

    Args:
        batch: what holds it.
        which: ``"prompt"``, ``"response"`` or ``"full"``.
        who: the component that reads, named in the error.

    Raises:
        MissingEntryError: there is none.
    """
    group = batch.get(HISTORY, None)
    leaf = None if group is None else group.get(which, None)
    conversations = conversations_of(leaf)
    if conversations is None:
        found = sorted(map(str, batch.keys(include_nested=True, leaves_only=True)))
        raise MissingEntryError(
            f"{who} reads {(HISTORY, which)}, where the batch holds {type(leaf).__name__} instead "
            f"of Conversations. The batch holds {found}. Reset the environment (prompt) or run "
            "the policy (full) first."
        )
    return conversations

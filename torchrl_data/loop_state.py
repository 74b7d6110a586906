"""Where the loop keeps its conversations in a TensorDict: one opaque object for the whole batch."""

from tensordict import NonTensorData, TensorDictBase

from .conversation import Conversations
from .errors import MissingEntryError
from .keys import HISTORY


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
    batch.set((HISTORY, which), NonTensorData(conversations, batch_size=batch.batch_size))


def read_conversations(batch: TensorDictBase, which: str, *, who: str) -> Conversations:
    """The snapshot at ``("history", which)``.

    Args:
        batch: what holds it.
        which: ``"prompt"``, ``"response"`` or ``"full"``.
        who: the component that reads, named in the error.

    Raises:
        MissingEntryError: there is none.
    """
    value = batch.get((HISTORY, which), None)
    data = getattr(value, "data", None)
    if not isinstance(data, Conversations):
        found = sorted(map(str, batch.keys(include_nested=True, leaves_only=True)))
        raise MissingEntryError(
            f"{who} reads {(HISTORY, which)}, where the batch holds {type(data).__name__} instead "
            f"of Conversations. The batch holds {found}. Reset the environment (prompt) or run "
            "the policy (full) first."
        )
    return data

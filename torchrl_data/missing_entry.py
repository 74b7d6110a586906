"""Error of an entry that a batch does not have: who asked, what is there, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from tensordict import NestedKey, TensorDictBase


class MissingEntryError(KeyError):
    """A batch lacks an entry that a component reads.

    ``KeyError`` prints its message through ``repr``; this class prints it as it is written.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


def require_entries(batch: TensorDictBase, keys: Iterable[NestedKey], who: str) -> None:
    """Check that a batch holds all of some entries.

    Args:
        batch: what is about to be read.
        keys: the entries that must be there.
        who: the component that reads, named in the message.

    Raises:
        MissingEntryError: one or more entries are missing; the message names them and what the
            batch holds instead.
    """
    present = set(batch.keys(include_nested=True))
    if missing := [key for key in keys if key not in present]:
        remedy = "Run the step that writes the entry first, or rename it."
        raise missing_entry(batch, missing, who, remedy=remedy)


_RESET: Final = (
    "Reset the environment (prompt) or run the policy (full) first, or choose another input_mode."
)


def missing_entry(
    batch: TensorDictBase,
    key: Any,
    who: str,
    *,
    instead: str = "which the batch lacks",
    remedy: str = _RESET,
) -> MissingEntryError:
    """The error for an entry that a batch lacks, such as a part of a mode."""
    held = known_entries(batch)
    return MissingEntryError(f"{who} reads {key}, {instead}. The batch holds {held}. {remedy}")


def known_entries(batch: TensorDictBase) -> list[str]:
    """Name the entries of a batch for an error: tensors, conversations and plain values."""
    found: list[Any] = list(batch.keys(include_nested=True))
    keys: list[tuple[str, ...]] = [(k,) if isinstance(k, str) else k for k in found]
    # A conversation is one entry, whatever it is made of.
    short: set[Any] = {key[: 3 if key[0] == "next" else 2] for key in keys}
    inner = {key[:end] for key in short for end in range(1, len(key))}
    return sorted(str(key if len(key) > 1 else key[0]) for key in short - inner)

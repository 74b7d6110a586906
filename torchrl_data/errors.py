"""Errors that say who, what is wrong, what was found and what to do."""

from collections.abc import Iterable

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
    missing = [key for key in keys if key not in present]
    if missing:
        found = sorted(map(str, batch.keys(include_nested=True, leaves_only=True)))
        raise MissingEntryError(
            f"{who} reads {missing}, which the batch lacks. The batch holds {found}. "
            "Run the step that writes the entry first, or rename it."
        )


def missing_part(batch: TensorDictBase, key: tuple[str, str], who: str) -> MissingEntryError:
    """The error for a part of a mode that a batch lacks."""
    found = sorted(map(str, batch.keys(include_nested=True, leaves_only=True)))
    return MissingEntryError(
        f"{who} reads {key}, which the batch lacks. The batch holds {found}. Reset the environment "
        "(prompt) or run the policy (full) first, or choose another input_mode."
    )

"""The processes that save and load one checkpoint together."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from .errors import CheckpointError

_T = TypeVar("_T")


class CheckpointGroup:
    """The ranks of a process group, or one process by itself.

    Args:
        group: of all that take part, each of which makes a ``CheckpointGroup``; ``None`` for one
            process.
    """

    # A group of its own: what is gathered on a thread must not meet what training sends meanwhile.

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group: Any = None
        self.rank, self.size = 0, 1
        if group is not None:
            members = dist.get_process_group_ranks(group)
            self.group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
            self.rank, self.size = dist.get_rank(group), len(members)

    def gather(self, value: _T) -> list[_T]:
        """The values of all ranks."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Goes on behind what is inside if that fails on no rank; all ranks enter it together.

        Raises:
            CheckpointError: it failed on another rank.
            Exception: it failed on this one, as it did.
        """
        error = None
        try:
            yield
        except Exception as caught:
            error = caught
        failures = self.gather(None if error is None else str(error))
        if error is not None:
            raise error
        told = [f"rank {rank}: {what}" for rank, what in enumerate(failures) if what is not None]
        if told:
            raise CheckpointError(" ".join(told))

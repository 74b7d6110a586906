"""A replay buffer as a part of a run: rows whole, which its own ``state_dict`` leaves out."""

from collections.abc import Mapping
from typing import Any

from torchrl.data import ReplayBuffer


class BufferPart:
    """Saves and restores a buffer's rows, its place, its sampler and its transforms.

    Args:
        buffer: restored, it holds the rows that it held, in their order, and goes on writing and
            sampling as it would have.

    Raises:
        ValueError: it draws batches ahead, which nobody saves.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        if buffer._prefetch:
            raise ValueError(
                "RunState: the replay buffer has a prefetch, and batches that are drawn ahead are "
                "lost when a run stops. Make it without prefetch."
            )
        self._buffer = buffer

    def state_dict(self) -> dict[str, Any]:
        """The rows as they lie in the storage, and what else it needs to go on."""
        buffer = self._buffer
        return {
            "rows": [buffer._storage.get(number) for number in range(len(buffer))],
            "sampler": buffer._sampler.state_dict(),
            "writer": buffer._writer.state_dict(),
            "transforms": dict(buffer._transform.state_dict()),
            "random": None if buffer._rng is None else buffer._rng.get_state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            ValueError: the storage is too small for the rows, or the state has random numbers of
                the buffer's own and the buffer has none, or the reverse.
        """
        buffer, rows = self._buffer, state_dict["rows"]
        if len(rows) > buffer._storage.max_size:
            raise ValueError(
                f"RunState: {len(rows)} rows were saved, and the storage of the buffer holds "
                f"{buffer._storage.max_size}. Give it at least as many."
            )
        if (state_dict["random"] is None) != (buffer._rng is None):
            raise ValueError(
                "RunState: a generator of random numbers of its own has the buffer that was saved "
                "or this one, and not the other: set_rng() of both, or of none."
            )
        buffer.empty()
        for number, row in enumerate(rows):
            buffer._storage.set(number, row)
        buffer._sampler.load_state_dict(state_dict["sampler"])
        buffer._writer.load_state_dict(state_dict["writer"])
        buffer._transform.load_state_dict(state_dict["transforms"])
        if buffer._rng is not None:
            buffer._rng.set_state(state_dict["random"])

"""What a loss divides by: counts of the whole accumulation window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Window(NamedTuple):
    """The counts of one optimizer step, whatever it is split into.

    Pass it to each micro-batch's loss, add their gradients up, and the sum is the gradient of the
    whole. Across processes: add the counts of all; where the framework averages gradients (DDP),
    divide them by the number of processes.
    """

    num_active_tokens: float
    """Trained tokens."""
    num_sequences: float
    """Rows, also those without a trained token."""
    entropy_threshold: float | None = None
    """In nats, for ``TokenFilters(top_entropy_fraction=...)``; None: each call takes its own."""

    @classmethod
    def of(cls, windows: Iterable[Window]) -> Window:
        """Add windows up.

        Args:
            windows: of the micro-batches, or of the processes.

        Returns:
            The sum of their counts.
        """
        tokens, sequences = 0.0, 0.0
        for window in windows:
            tokens += window.num_active_tokens
            sequences += window.num_sequences
        return cls(tokens, sequences)

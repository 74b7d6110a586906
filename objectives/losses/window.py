"""The counts by which the losses of one optimizer step are divided."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class Window(NamedTuple):
    """The counts of one optimizer step, whatever it is split into.

    Pass it to each micro-batch's loss, add their gradients up, and the sum is the gradient of the
    whole. ``loss.measure_window(parts, ranks=ranks)`` gives the counts of all ranks, divided by
    their number because the mean of their gradients is taken.

    Example:
        >>> Window.of([Window(3.0, 1.0), Window(5.0, 2.0)])[:2]
        (8.0, 3.0)
    """

    num_active_tokens: float
    """Trained tokens."""
    num_sequences: float
    """Rows, also those without a trained token."""
    entropy_threshold: float | None = None
    """In nats; ``TokenFilters(top_entropy_fraction=...)`` needs it, so that all parts filter alike.
    ``GRPOLoss.measure_window`` takes it when that filter is on."""
    sampler_weight_mean: float | None = None
    """Over the trained tokens; ``SamplerCorrection(normalize=True)`` divides by it.
    ``GRPOLoss.measure_window`` takes it then."""
    reference_kl: float | None = None
    """An estimate of the KL divergence of the policy from the reference, in nats, that all answers
    of ``KTOLoss`` are compared with. Its ``measure_window`` takes it."""

    @classmethod
    def of(cls, windows: Iterable[Window]) -> Window:
        """Add windows up.

        Args:
            windows: of the micro-batches, or of the processes.

        Returns:
            The sum of their counts, and the mean of their means. Quantiles and divergences do not
            add up: they are theirs where all have the same, and None where they differ.
        """
        windows = list(windows)
        tokens = sum(window.num_active_tokens for window in windows)
        sequences = sum(window.num_sequences for window in windows)
        alike = []
        for name in ("entropy_threshold", "reference_kl"):
            values = {getattr(window, name) for window in windows}
            alike.append(values.pop() if len(values) == 1 else None)
        weights = [w.sampler_weight_mean for w in windows if w.sampler_weight_mean is not None]
        mean = None
        if weights and len(weights) == len(windows):
            total = sum(
                w * each.num_active_tokens for w, each in zip(weights, windows, strict=True)
            )
            mean = total / tokens if tokens else 1.0
        threshold, reference_kl = alike
        return cls(tokens, sequences, threshold, mean, reference_kl)

    def check(self, num_active_tokens: int, num_sequences: int, who: str) -> Window:
        """Check the counts beside those of a part of the window.

        Args:
            num_active_tokens: trained tokens of the part.
            num_sequences: its rows.
            who: the loss, for the message.

        Returns:
            The window to divide by; a count of 0, of nothing, is 1.

        Raises:
            ValueError: a count is negative or not finite, or 0 though the part has some.
        """
        for name, found, part in (
            ("num_active_tokens", self.num_active_tokens, num_active_tokens),
            ("num_sequences", self.num_sequences, num_sequences),
        ):
            if not 0 <= found < math.inf or (found == 0 and part):
                raise ValueError(
                    f"{who}: the window has {name}={found}, but the batch at hand has {part} of "
                    "them. Measure the window over all of its batches: measure_window(...)."
                )
        return self._replace(
            num_active_tokens=self.num_active_tokens or 1, num_sequences=self.num_sequences or 1
        )

"""Settings of the weights for the gap between the engine that samples and the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import objectives
from torchrl_data.checks import POSITIVE, check_numbers, one_of

if TYPE_CHECKING:
    from torch import Tensor

    from objectives import functional as F


@dataclass(frozen=True, kw_only=True)
class SamplerCorrection:
    """Settings of :func:`~objectives.functional.sampler_correction`.

    Raises:
        ValueError: a name is unknown, the bounds are not ``0 <= lower <= 1 <= upper``, or a setting
            has no effect at the level.

    Example:
        >>> correction = SamplerCorrection(upper=2.0)
        >>> old, sampler = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0])  # [K], in nats
        >>> sampled, lengths = torch.tensor([True, True]), torch.tensor([2])
        >>> correction.weights(old, sampler, sampled, lengths).weight  # exp(1) is cut to 2
        tensor([1., 2.])
    """

    level: F.CorrectionLevel = "token"
    """``"token"``, ``"sequence"``, or ``"k3"``: no weights, sequences are dropped."""
    mode: F.CorrectionMode = "truncate"
    """``"truncate"`` or ``"mask"``."""
    upper: float = 2.0
    """The highest weight."""
    lower: float = 0.0
    """The lowest weight."""
    max_k3: float | None = None
    """In nats per token: sequences whose mean k3 exceeds it have weight 0; 0.01 is usual at level
    ``"k3"``, which needs it."""
    normalize: bool = False
    """Divide the weights by their mean over the window (``measure_window``), so that they neither
    shrink nor stretch the step."""

    def __post_init__(self) -> None:
        one_of(
            "level", self.level, objectives.functional.CORRECTION_LEVELS, who="SamplerCorrection"
        )
        one_of("mode", self.mode, objectives.functional.CORRECTION_MODES, who="SamplerCorrection")
        check_numbers("SamplerCorrection", POSITIVE, max_k3=self.max_k3)
        if not 0 <= self.lower <= 1 <= self.upper:
            raise ValueError(
                "SamplerCorrection: bounds must be 0 <= lower <= 1 <= upper, got "
                f"lower={self.lower} and upper={self.upper}."
            )
        if self.level != "k3":
            return
        if self.max_k3 is None:
            raise ValueError("SamplerCorrection: level 'k3' needs max_k3, such as 0.01.")
        if (self.mode, self.upper, self.lower) != ("truncate", 2.0, 0.0):
            raise ValueError(
                "SamplerCorrection: at level 'k3' there are no weights to bound: leave mode, upper "
                f"and lower out, got {self}."
            )

    def weights(
        self, train_log_prob: Tensor, sampler_log_prob: Tensor, mask: Tensor, lengths: Tensor
    ) -> F.SamplerWeights:
        """The weights of packed tokens, not yet normalised.

        Args:
            train_log_prob: in nats, ``[K]``.
            sampler_log_prob: in nats, ``[K]``.
            mask: True where the policy sampled, ``[K]``.
            lengths: int64 ``[B]``, summing to K.

        Returns:
            Weights and where they were changed, ``[K]``.
        """
        bounds = {"upper": self.upper, "lower": self.lower, "max_k3": self.max_k3}
        packed = (train_log_prob, sampler_log_prob, mask, lengths)
        return objectives.functional.sampler_correction(
            *packed, level=self.level, mode=self.mode, **bounds
        )

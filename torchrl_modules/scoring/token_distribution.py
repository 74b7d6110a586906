"""The distributions that the scored tokens of a batch were drawn from.

Shape legend: B rows, T columns of the padded batch, K scored positions, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution


class TokenDistribution(Distribution):
    """One categorical distribution per scored position of a padded batch.

    It holds logits for the scored positions alone; elsewhere there is nothing to draw, so
    log-probs and entropies are 0 there, and so are drawn tokens.

    Args:
        log_p: normalised log-probabilities, ``[K, V]``.
        mask: bool ``[*B, T]``: the K scored positions, in order.
    """

    def __init__(self, log_p: Tensor, mask: Tensor) -> None:
        self.log_p = log_p
        self.mask = mask.to(log_p.device)
        super().__init__(batch_shape=mask.shape, validate_args=False)

    @property
    def arg_constraints(self) -> dict[str, Any]:
        """None are checked."""
        return {}

    def _spread(self, values: Tensor) -> Tensor:
        """``[K, ...]`` to ``[*B, T, ...]``, 0 where nothing is scored."""
        out = values.new_zeros((*self.mask.shape, *values.shape[1:]))
        out[self.mask] = values
        return out

    @property
    def logits(self) -> Tensor:
        """Log-probabilities ``[*B, T, V]``, 0 where nothing is scored; made when asked for."""
        return self._spread(self.log_p)

    @property
    def probs(self) -> Tensor:
        """Probabilities ``[*B, T, V]``, 0 where nothing is scored; made when asked for."""
        return self._spread(self.log_p.exp())

    @property
    def mode(self) -> Tensor:
        """The most likely tokens, int64 ``[*B, T]``."""
        return self._spread(self.log_p.argmax(-1))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-prob of a token at each position, in nats, differentiable.

        Args:
            value: int64 ``[*B, T]``; what stands where nothing is scored is ignored.

        Returns:
            ``[*B, T]``.
        """
        chosen = value.to(self.mask.device)[self.mask][:, None]
        return self._spread(self.log_p.gather(1, chosen).squeeze(1))

    def entropy(self) -> Tensor:
        """Entropy in nats, ``[*B, T]``, differentiable."""
        finite = self.log_p.masked_fill(self.log_p == -torch.inf, 0.0)
        return self._spread(-(self.log_p.exp() * finite).sum(-1))

    def sample(self, sample_shape: Sequence[int] | torch.Size = ()) -> Tensor:
        """Draw a token at each scored position.

        Args:
            sample_shape: how often.

        Returns:
            int64 ``[*sample_shape, *B, T]``.
        """
        shape = torch.Size(sample_shape)
        drawn = torch.multinomial(self.log_p.detach().exp(), shape.numel(), replacement=True)
        rows = [self._spread(column) for column in drawn.unbind(1)]
        return torch.stack(rows).reshape(*shape, *self.mask.shape)

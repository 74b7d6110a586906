"""What the losses give back: named terms, of which only the ``loss_*`` ones are optimised.

Every tensor is a scalar, unless the loss was told not to aggregate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from tensordict import TensorClass, TensorDict
from torch import Tensor

Output = TypeVar("Output", bound=TensorClass)


def sum_of_losses(output: TensorClass) -> Tensor:
    """Add up the entries whose name begins with ``loss_``.

    Args:
        output: of a loss.

    Returns:
        What to call ``backward`` on.
    """
    terms = [value for key, value in output.items() if str(key).startswith("loss_")]
    return torch.stack([term for term in terms if term is not None]).sum(0)


def make_output(kind: type[Output], terms: Mapping[str, Tensor]) -> Output:
    """Make an output from its entries by name.

    Args:
        kind: the class of the output.
        terms: its entries; those that are missing are None.

    Returns:
        The output, of batch size ``[]``.
    """
    return kind.from_tensordict(TensorDict(dict(terms)))


class GRPOLossOutput(TensorClass["nocast"]):
    """Terms and figures of :class:`~objectives.GRPOLoss`.

    Figures are detached. Fractions and means are over the trained tokens of the window, so those
    of its micro-batches add up; :meth:`combine` does so.
    """

    loss_objective: Tensor
    """The policy term."""
    clip_fraction: Tensor
    """Tokens that the clip leaves without gradient."""
    clip_fraction_low: Tensor
    """Of them, bad tokens with too low a ratio."""
    clip_fraction_high: Tensor
    """Of them, good tokens with too high a ratio."""
    kl_approx: Tensor
    """Mean of ``log pi_old - log pi``, in nats per token."""
    ESS: Tensor
    """Effective sample size of the ratios as a fraction of the tokens, in (0, 1]."""
    ratio_mean: Tensor
    """Mean ratio; 1 on policy."""
    kept_fraction: Tensor
    """Tokens that no filter took out of the policy term."""
    num_active_tokens: Tensor
    """Trained tokens of this call."""
    num_sequences: Tensor
    """Rows of this call."""
    entropy: Tensor | None = None
    """Mean entropy in nats, where it was asked for."""
    loss_entropy: Tensor | None = None
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None
    """Mean KL estimate to the reference, in nats per token."""
    loss_kl_to_inference: Tensor | None = None
    kl_to_inference: Tensor | None = None
    """Mean KL estimate to the policy that sampled, in nats per token."""
    sampler_gap: Tensor | None = None
    """Mean absolute gap between the trainer's and the engine's log-probs, in nats per token."""
    correction_fraction: Tensor | None = None
    """Tokens whose sampler correction was truncated or masked."""

    def total(self) -> Tensor:
        """The objective: the sum of the ``loss_*`` entries."""
        return sum_of_losses(self)

    @classmethod
    def combine(cls, outputs: Sequence[GRPOLossOutput]) -> GRPOLossOutput:
        """The output of a whole window from those of its micro-batches, detached.

        Args:
            outputs: at least one, each computed with the window's counts (``window=``).

        Returns:
            What one call on all rows would have given.

        Raises:
            ValueError: there are no outputs.
        """
        if not outputs:
            raise ValueError("combine needs at least one output.")
        dicts = [
            {str(key): value.detach() for key, value in output.items() if value is not None}
            for output in outputs
        ]
        names = dict.fromkeys(name for one in dicts for name in one)
        total = {
            name: torch.stack([one[name] for one in dicts if name in one]).sum(0) for name in names
        }
        # ESS = (sum w)^2 / (n sum w^2): recover both sums of each part from its mean and ESS.
        squares = torch.stack(
            [
                one["ratio_mean"].square() / (one["num_active_tokens"].clamp(min=1) * one["ESS"])
                for one in dicts
            ]
        ).sum()
        count = total["num_active_tokens"]
        fraction = total["ratio_mean"].square() / (count.clamp(min=1) * squares)
        total["ESS"] = torch.where(count > 0, fraction, torch.ones_like(fraction))
        return make_output(cls, total)


class SFTLossOutput(TensorClass["nocast"]):
    """Terms and figures of :class:`~objectives.SFTLoss`."""

    loss_sft: Tensor
    num_active_tokens: Tensor
    """Trained tokens of this call."""
    num_sequences: Tensor
    """Rows of this call."""
    nll: Tensor
    """Mean negative log-likelihood, in nats per token of the window; detached."""
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None
    """Mean KL estimate to the reference, in nats per token; detached."""

    def total(self) -> Tensor:
        """The objective: the sum of the ``loss_*`` entries."""
        return sum_of_losses(self)


class DistillationLossOutput(TensorClass["nocast"]):
    """Terms and figures of :class:`~objectives.DistillationLoss`."""

    loss_distill: Tensor
    kl_to_teacher: Tensor
    """Mean KL estimate, in nats per token of the window; detached."""
    num_active_tokens: Tensor
    """Trained tokens of this call."""
    num_sequences: Tensor
    """Rows of this call."""

    def total(self) -> Tensor:
        """The objective: the sum of the ``loss_*`` entries."""
        return sum_of_losses(self)

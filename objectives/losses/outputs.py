"""What the losses give back: named terms, of which only the ``loss_*`` ones are optimised.

Every tensor is a scalar, unless the loss was told not to aggregate. Losses are shares of the
accumulation window, so those of its micro-batches add up; metrics are means over the trained tokens
of the call, and ``combine`` weighs them by these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import TensorClass, TensorDict
from torch import Tensor

from objectives.batching.ranks import Ranks

Output = TypeVar("Output")


def sum_of_losses(output: Any) -> Tensor:
    """Add up the entries whose name begins with ``loss_``."""
    terms = [value for key, value in output.items() if str(key).startswith("loss_")]
    return torch.stack([term for term in terms if term is not None]).sum(0)


def make_output(kind: type[Output], terms: Mapping[str, Tensor]) -> Output:
    """Make an output from its entries by name."""
    made: Any = kind
    return made.from_tensordict(TensorDict(dict(terms)))


class LossTerms:
    """What every output of a loss has."""

    def total(self) -> Tensor:
        """The objective: the sum of the ``loss_*`` entries."""
        return sum_of_losses(self)

    @classmethod
    def combine(
        cls: type[Output], outputs: Sequence[Output], *, ranks: Ranks | None = None
    ) -> Output:
        """The output of a whole window from those of its micro-batches, detached.

        Args:
            outputs: at least one, each computed with the window's counts (``window=``).
            ranks: also over all of these, each of which calls it.

        Returns:
            What one call on all rows would have given; over several ranks on the CPU.

        Raises:
            ValueError: there are no outputs.
        """
        if not outputs:
            raise ValueError("combine needs at least one output.")
        terms = combined_terms(outputs)
        if ranks is not None and ranks.size > 1:
            terms = combined_terms(ranks.gather(_shares(terms, ranks.size)))
        return make_output(cls, terms)


def _shares(terms: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """One rank's entries on the CPU; its losses were divided by its share of the counts of all."""
    return {
        name: value.cpu() / size if name.startswith("loss_") else value.cpu()
        for name, value in terms.items()
    }


def combined_terms(outputs: Sequence[Any]) -> dict[str, Tensor]:
    """The entries of a whole window by name, from the outputs of its micro-batches."""
    parts = [
        {str(key): value.detach() for key, value in output.items() if value is not None}
        for output in outputs
    ]
    combined: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        present = [part for part in parts if name in part]
        values = torch.stack([part[name] for part in present])
        if name.startswith(("loss_", "num_")):
            combined[name] = values.sum(0)
        else:
            combined[name] = _token_mean(values, present)
    if "ESS" in combined:
        # ESS = mean(r)^2 / mean(r^2): recover the mean square of each part.
        ratio = torch.stack([part["ratio_mean"] for part in parts])
        ess = torch.stack([part["ESS"] for part in parts])
        fraction = combined["ratio_mean"].square() / _token_mean(ratio.square() / ess, parts)
        combined["ESS"] = torch.where(combined["num_active_tokens"] > 0, fraction, 1.0)
    return combined


def _token_mean(values: Tensor, parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
    weights = torch.stack([part["num_active_tokens"] for part in parts])
    return (values * weights).sum(0) / weights.sum(0).clamp(min=1)


def loss_output(kind: type[Output]) -> type[Output]:
    """Class decorator: an output shows its values, and reduces to its objective."""
    # loss.mean(reduce=True) is TorchRL's idiom for what to differentiate.
    methods = {name: _reduction(name, getattr(kind, name)) for name in ("mean", "sum")}
    for name, method in {**methods, "__repr__": _shown}.items():
        setattr(kind, name, method)
    return kind


def _reduction(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def reduction(output: Any, *args: Any, reduce: bool | None = None, **options: Any) -> Any:
        if reduce:
            return getattr(sum_of_losses(output), name)(*args, **options)
        return plain(output, *args, reduce=reduce, **options)

    reduction.__name__ = name
    reduction.__doc__ = f"With ``reduce=True`` the {name} of the objective; else of each entry."
    return reduction


def _shown(output: TensorClass) -> str:
    entries = ", ".join(
        f"{key}={value.item():.6g}" if value.numel() == 1 else f"{key}=[{value.numel()} values]"
        for key, value in output.items()
        if isinstance(value, Tensor)
    )
    return f"{type(output).__name__}({entries})"


@loss_output
class GRPOLossOutput(LossTerms, TensorClass["nocast"]):
    """Terms and metrics of :class:`~objectives.GRPOLoss`.

    Metrics are detached, and over the trained tokens of the call; :meth:`combine` gives those of a
    window.
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
    signal_fraction: Tensor
    """Tokens whose advantage is not 0; where it is 0, only KL and entropy terms have a gradient."""
    num_active_tokens: Tensor
    """Trained tokens of this call."""
    num_sequences: Tensor
    """Rows of this call."""
    num_rows_left_out: Tensor
    """Of them, those that no policy can have sampled with the log-probs that they hold (NaN,
    infinite or positive); nothing of them is trained."""
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


@loss_output
class SFTLossOutput(LossTerms, TensorClass["nocast"]):
    """Terms and metrics of :class:`~objectives.SFTLoss`."""

    loss_sft: Tensor
    num_active_tokens: Tensor
    """Trained tokens of this call."""
    num_sequences: Tensor
    """Rows of this call."""
    nll: Tensor
    """Mean negative log-likelihood, in nats per token; detached."""
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None
    """Mean KL estimate to the reference, in nats per token; detached."""


@loss_output
class DistillationLossOutput(LossTerms, TensorClass["nocast"]):
    """Terms and metrics of :class:`~objectives.DistillationLoss`."""

    loss_distill: Tensor
    kl_to_teacher: Tensor
    """Mean KL estimate, in nats per token; detached."""
    num_active_tokens: Tensor
    """Trained tokens of this call."""
    num_sequences: Tensor
    """Rows of this call."""

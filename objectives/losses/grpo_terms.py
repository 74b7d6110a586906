"""The tensors between the scores of a batch and the terms of the GRPO loss.

Shape legend: B rows, K trained tokens of all of them.
"""

import math
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from objectives import functional as F
from objectives.batching.packed_batch import PackedBatch
from objectives.losses.base import Window
from torchrl_data.protocols import TokenScores
from torchrl_data.ragged.packed import sequence_index

from .grpo_options import GRPOOptions
from .surrogate_options import TokenFilters

_FIGURES: Final = (
    "clip_fraction",
    "clip_fraction_low",
    "clip_fraction_high",
    "kl_approx",
    "ratio_mean",
    "kept_fraction",
    "signal_fraction",
    "num_active_tokens",
)
_MOST_LOG_PROB: Final = 1e-3
"""Log-probs are at most 0, but for the rounding of an engine, in nats."""


class PolicyScores(NamedTuple):
    """Log-probs of the K trained tokens under the policies involved, each ``[K]`` in nats."""

    current: Tensor
    """Under the policy that is trained; differentiable."""
    old: Tensor
    """The ratio's denominator."""
    sampler: Tensor
    """As the engine reported when it sampled; the current value where it sampled nothing."""
    advantage: Tensor
    """What the policy term goes by: the batch's, the teacher's, or both."""
    entropy: Tensor | None
    """Of the distribution that each token was drawn from; differentiable."""


def policy_scores(batch: PackedBatch, scores: TokenScores, options: GRPOOptions) -> PolicyScores:
    """Put the log-probs side by side, in the dtype of the scores."""
    # What was not sampled has no behaviour log-prob: it counts as on policy.
    current = scores.log_prob
    fixed = current.detach()
    sampler = fixed
    if "log_probs" in batch.entries:
        sampler = torch.where(batch.sampled, batch.entries["log_probs"].to(fixed.dtype), fixed)
    old = sampler if options.old_policy == "sampler" else fixed
    if options.old_policy == "recomputed":
        old = batch.entries["old_log_probs"].to(fixed.dtype)
    advantage = torch.zeros_like(fixed)
    if options.advantage_coeff:
        advantage = options.advantage_coeff * batch.entries["advantage"].to(fixed.dtype)
    if options.teacher_coeff is not None:
        teacher = F.distillation_advantage(fixed, batch.entries["teacher_log_probs"])
        advantage = advantage + options.teacher_coeff * teacher
    return PolicyScores(current, old, sampler, advantage, scores.entropy)


def filter_tokens(
    filters: TokenFilters,
    scores: PolicyScores,
    batch: PackedBatch,
    *,
    entropy_threshold: float | None = None,
) -> Tensor:
    """Where the policy term counts, bool ``[K]``."""
    keep = torch.ones_like(batch.sampled)
    if filters.trust_region is not None:
        keep = keep & F.trust_region_mask(
            scores.current, scores.sampler, threshold=filters.trust_region
        )
    if filters.top_entropy_fraction is not None and scores.entropy is not None:
        threshold = entropy_threshold
        keep = keep & F.high_entropy_mask(
            scores.entropy,
            top_fraction=filters.top_entropy_fraction,
            threshold=None if threshold is None else scores.entropy.new_tensor(threshold),
        )
    if filters.off_policy_threshold is not None:
        keep = keep & F.off_policy_sequence_mask(
            scores.current,
            scores.sampler,
            scores.advantage,
            lengths=batch.target_lengths,
            threshold=filters.off_policy_threshold,
        )
    if filters.drop_truncated:
        keep = keep & ~batch.entries["truncated"].bool()
    return keep


def separating_threshold(entropy: Tensor, *, top_fraction: float) -> float:
    """The entropy threshold of a window, in nats; -inf where all tokens are kept."""
    # Midway between the last token that is kept and the next one that is not, so that the rounding
    # of a differently split batch pushes none to the other side.
    keep = F.high_entropy_mask(entropy, top_fraction=top_fraction)
    dropped = entropy[~keep]
    if not len(dropped):
        return -math.inf
    return float(entropy[keep].min().double() + dropped.max().double()) / 2


def sampling_temperature(actor: object) -> float:
    """The temperature that an actor samples with, as its ``temperature`` says."""
    return float(getattr(actor, "temperature", 1.0)) or 1.0


def _rows_with(flag: Tensor, batch: PackedBatch) -> Tensor:
    """Rows of which a trained token carries a flag ``[K]``, bool ``[B]``."""
    index = sequence_index(batch.target_lengths)
    return torch.zeros_like(batch.lengths).index_add(0, index, flag.long()) > 0


def impossible_rows(batch: PackedBatch) -> Tensor:
    """Rows with a sampled log-prob that is NaN, infinite or above 0, bool ``[B]``."""
    log_probs = batch.entries["log_probs"]
    possible = log_probs.isfinite() & (log_probs <= _MOST_LOG_PROB)
    return _rows_with(batch.sampled & ~possible, batch)


def signal(batch: PackedBatch) -> Tensor:
    """The tokens that can move the policy: bool ``[K]``, True where the advantage is not 0."""
    return batch.entries["advantage"] != 0


def with_signal(batch: PackedBatch) -> PackedBatch:
    """Drop the rows that cannot move the policy: advantage 0 on every trained token."""
    return batch.take_rows(_rows_with(signal(batch), batch))


def resting_terms(penalties: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """The metrics of a batch in which nothing is trained."""
    zero, one = torch.zeros((), device=device), torch.ones((), device=device)
    terms = dict.fromkeys(_FIGURES, zero) | {"ESS": one}
    for name in penalties:
        terms |= {name: zero, f"loss_{name}": zero}
    return terms


def measured_weights(
    options: GRPOOptions, batch: PackedBatch, scores: PolicyScores, window: Window
) -> F.SamplerWeights | None:
    """The sampler correction of each token, ``[K]``; None for none."""
    correction = options.sampler_correction
    if correction is None:
        return None
    weights = correction.weights(scores.old, scores.sampler, batch.sampled, batch.target_lengths)
    if not correction.normalize:
        return weights
    mean = window.sampler_weight_mean
    divisor = weights.weight.mean() if mean is None else weights.weight.new_tensor(mean)
    return weights._replace(weight=weights.weight / divisor.masked_fill(divisor == 0, 1.0))


def penalty_terms(
    options: GRPOOptions,
    batch: PackedBatch,
    scores: PolicyScores,
    window: Window,
    reduce: Callable[[Tensor, PackedBatch, Window], Tensor],
) -> dict[str, Tensor]:
    """KL and entropy: losses and metrics."""
    terms: dict[str, Tensor] = {}
    estimator = options.kl_estimator or "k3"
    if options.kl_to_ref_coeff:
        reference = batch.entries["ref_log_probs"].to(scores.old.dtype)
        log_ratio = None
        if options.kl_bias_correction:
            log_ratio = F.log_ratio(scores.current, scores.old)
        kl = F.kl_estimate(scores.current, reference, estimator=estimator, log_ratio=log_ratio)
        terms["kl_to_ref"] = kl.detach().mean()
        terms["loss_kl_to_ref"] = options.kl_to_ref_coeff * reduce(kl, batch, window)
    if options.kl_to_inference_coeff:
        kl = F.kl_estimate(scores.current, scores.sampler, batch.sampled, estimator=estimator)
        terms["kl_to_inference"] = kl.detach().mean()
        reduced = reduce(kl, batch, window)
        terms["loss_kl_to_inference"] = options.kl_to_inference_coeff * reduced
    if scores.entropy is not None:
        terms["entropy"] = scores.entropy.detach().mean()
    if scores.entropy is not None and options.entropy_bonus:
        coefficient = 0.01 if options.entropy_coeff is None else options.entropy_coeff
        entropy = scores.entropy
        if batch.weights is not None:
            entropy = entropy * batch.weights.to(entropy.dtype)
        terms["loss_entropy"] = -coefficient * entropy.sum() / window.num_active_tokens
    return terms

"""The tensors between the scores of a batch and the terms of the GRPO loss.

Shape legend: B rows, K trained tokens of all of them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from objectives import functional as F
from objectives.batching.packed_batch import PackedBatch
from torchrl_data.token_scorer import TokenScores

from .grpo_options import GRPOOptions
from .token_filters import TokenFilters
from .window import Window

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
    filters: TokenFilters, scores: PolicyScores, batch: PackedBatch, window: Window
) -> Tensor:
    """Return where the policy term counts, bool ``[K]``."""
    keep = torch.ones_like(batch.sampled)
    if filters.trust_region is not None:
        keep = keep & F.trust_region_mask(
            scores.current, scores.sampler, threshold=filters.trust_region
        )
    if filters.top_entropy_fraction is not None and scores.entropy is not None:
        threshold = window.entropy_threshold
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
        keep = keep & ~batch.entries["truncated"]
    return keep

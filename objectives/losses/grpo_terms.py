"""The tensors between the scores of a batch and the terms of the GRPO loss.

Shape legend: B rows, K trained tokens of all of them.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from objectives import functional as F
from objectives.batching.accumulation import Window
from objectives.batching.packed_batch import PackedBatch
from torchrl_data.protocols import TokenScores
from torchrl_data.ragged.packed import sequence_index

from .surrogate_options import TokenFilters

OldPolicy = Literal["sampler", "recomputed", "current"]
_FIGURES: Final = (
    "clip_fraction",
    "clip_fraction_low",
    "clip_fraction_high",
    "kl_approx",
    "ratio_mean",
    "kept_fraction",
    "num_active_tokens",
)


class PolicyScores(NamedTuple):
    """Log-probs of the K trained tokens under the policies involved, each ``[K]`` in nats."""

    current: Tensor
    """Under the policy that is trained; differentiable."""
    old: Tensor
    """The ratio's denominator."""
    sampler: Tensor
    """As the engine reported when it sampled; the current value where it sampled nothing."""
    entropy: Tensor | None
    """Of the distribution that each token was drawn from; differentiable."""


def policy_scores(batch: PackedBatch, scores: TokenScores, old_policy: OldPolicy) -> PolicyScores:
    """Put the log-probs side by side.

    Args:
        batch: with ``log_probs``, and ``old_log_probs`` where they are recomputed.
        scores: of the policy that is trained.
        old_policy: which of them is the ratio's denominator.

    Returns:
        All in the dtype of the scores. A token that the policy did not sample has no behaviour
        log-prob: what is stored there is ignored, and it counts as on policy.
    """
    current = scores.log_prob
    fixed = current.detach()
    sampler = fixed
    if "log_probs" in batch.entries:
        sampler = torch.where(batch.sampled, batch.entries["log_probs"].to(fixed.dtype), fixed)
    old = sampler if old_policy == "sampler" else fixed
    if old_policy == "recomputed":
        old = batch.entries["old_log_probs"].to(fixed.dtype)
    return PolicyScores(current, old, sampler, scores.entropy)


def filter_tokens(
    filters: TokenFilters,
    scores: PolicyScores,
    batch: PackedBatch,
    *,
    entropy_threshold: float | None = None,
) -> Tensor:
    """Where the policy term counts.

    Args:
        filters: which filters are on.
        scores: of the batch.
        batch: with ``advantage``, and ``truncated`` where that filter is on.
        entropy_threshold: of the whole window, in nats; None to take it from this batch.

    Returns:
        bool ``[K]``.
    """
    active = torch.ones_like(batch.sampled)
    keep = active
    if filters.trust_region is not None:
        keep = keep & F.trust_region_mask(
            scores.current, scores.sampler, active, threshold=filters.trust_region
        )
    if filters.top_entropy_fraction is not None and scores.entropy is not None:
        threshold = entropy_threshold
        keep = keep & F.high_entropy_mask(
            scores.entropy,
            active,
            top_fraction=filters.top_entropy_fraction,
            threshold=None if threshold is None else scores.entropy.new_tensor(threshold),
        )
    if filters.off_policy_threshold is not None:
        keep = keep & F.off_policy_sequence_mask(
            scores.current,
            scores.sampler,
            batch.entries["advantage"],
            active,
            batch.target_lengths,
            threshold=filters.off_policy_threshold,
        )
    if filters.drop_truncated:
        keep = keep & ~batch.entries["truncated"].bool()
    return keep


def separating_threshold(entropy: Tensor, *, top_fraction: float) -> float:
    """The entropy threshold of a window, which rounding cannot push to the other side of a token.

    Args:
        entropy: of all tokens of the window, in nats, ``[K]``.
        top_fraction: what part of them is kept, in (0, 1].

    Returns:
        In nats: keeps the same tokens as :func:`~objectives.functional.entropy_threshold`, but
        lies midway between the last one that is kept and the next one that is not, so that the
        scores of a differently split batch give the same. -inf when all are kept.
    """
    active = torch.ones_like(entropy, dtype=torch.bool)
    keep = F.high_entropy_mask(entropy, active, top_fraction=top_fraction)
    dropped = entropy[~keep]
    if not len(dropped):
        return -math.inf
    return float(entropy[keep].min().double() + dropped.max().double()) / 2


def with_signal(batch: PackedBatch) -> PackedBatch:
    """Drop the rows that cannot move the policy: advantage 0 on every trained token.

    Args:
        batch: with ``advantage``.

    Returns:
        The batch of the other rows.
    """
    moves = torch.zeros_like(batch.lengths).index_add(
        0, sequence_index(batch.target_lengths), (batch.entries["advantage"] != 0).long()
    )
    return batch.take_rows(moves > 0)


def token_figure(values: Tensor, window: Window) -> Tensor:
    """Mean over the trained tokens of the window, to look at.

    Args:
        values: float or bool, ``[K]``.
        window: the counts.

    Returns:
        A detached scalar; those of a window's micro-batches add up to that of the window.
    """
    values = values.detach()
    return (values if values.is_floating_point() else values.float()).sum() / max(
        window.num_active_tokens, 1
    )


def token_figures(values: Mapping[str, Tensor], window: Window) -> dict[str, Tensor]:
    """:func:`token_figure` of each.

    Args:
        values: ``[K]`` each, by name.
        window: the counts.

    Returns:
        Detached scalars by the same names.
    """
    return {name: token_figure(value, window) for name, value in values.items()}


def resting_terms(penalties: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """The figures of a batch in which nothing is trained.

    Args:
        penalties: the penalties that are on; each has a figure and a ``loss_`` term.
        device: of the result.

    Returns:
        Scalars, all finite.
    """
    zero, one = torch.zeros((), device=device), torch.ones((), device=device)
    terms = dict.fromkeys(_FIGURES, zero) | {"ESS": one}
    for name in penalties:
        terms |= {name: zero, f"loss_{name}": zero}
    return terms

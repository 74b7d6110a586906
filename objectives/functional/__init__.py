"""Losses and advantages as functions of tensors; needs torch and jaxtyping, nothing else.

The folder can be copied whole into another codebase. What is where:

* ``surrogates``, ``sequence_surrogates``, ``divergence_surrogate``: log-ratios at token and
  sequence level, and the policy term of each algorithm, one value per token;
* ``aggregation``: from tokens to the loss, over the whole accumulation window, and to metrics;
* ``divergence``: KL estimators; ``log_probs``: log-probability and entropy from logits;
* ``token_filters``, ``sampler_correction``: which tokens count, and how much;
* ``advantages``, ``turn_advantages``: from rewards to advantages;
* ``supervised``: fine-tuning and distillation.

Tokens come padded, ``[B, T]``, or packed, ``[N]`` beside ``lengths [B]``; both give the same
numbers. Everything that does not lie in a mask is ignored, whatever it holds. Log-probabilities,
entropies and divergences are in nats.
"""

from .advantages import (
    SCALES,
    STD_OFFSET,
    Scale,
    gdpo_advantage,
    group_advantage,
    maxrl_advantage,
    pass_at_k_advantage,
    relative_length,
    rloo_advantage,
)
from .aggregation import (
    AGGREGATIONS,
    Aggregation,
    aggregate,
    effective_sample_fraction,
    fixed_length_mean,
    flag_fraction,
    mean_of_sequence_means,
    mean_of_sequence_sums,
    token_mean,
)
from .divergence import KL_ESTIMATORS, KLEstimator, kl_between, kl_estimate
from .divergence_surrogate import (
    BINARY_DIVERGENCES,
    DIVERGENCE_THRESHOLDS,
    PROBABILITY_FLOOR,
    BinaryDivergence,
    binary_divergence,
    divergence_masked,
)
from .log_probs import LogProbs, token_log_probs
from .sampler_correction import (
    CORRECTION_LEVELS,
    CORRECTION_MODES,
    CorrectionLevel,
    CorrectionMode,
    SamplerWeights,
    off_policy_gap,
    sampler_correction,
)
from .segments import (
    at_least_float32,
    sequence_count,
    sequence_index,
    sequence_mean,
    sequence_sum,
    spread,
)
from .sequence_surrogates import gmpo, vespo
from .supervised import (
    KL_DIRECTIONS,
    KLDirection,
    distillation_advantage,
    generalized_jsd,
    minor_sft,
    negative_log_likelihood,
    sampled_distillation,
)
from .surrogates import (
    LOG_RATIO_LIMIT,
    RATIO_LEVELS,
    RatioLevel,
    Surrogate,
    cispo,
    clipped_surrogate,
    leveled_log_ratio,
    log_ratio,
    sapo,
    sequence_log_ratio,
)
from .token_filters import (
    entropy_threshold,
    high_entropy_mask,
    off_policy_sequence_mask,
    overlong_mask,
    overlong_penalty,
    trust_region_mask,
)
from .turn_advantages import turn_advantage, turn_index

__all__ = [
    "AGGREGATIONS",
    "BINARY_DIVERGENCES",
    "CORRECTION_LEVELS",
    "CORRECTION_MODES",
    "DIVERGENCE_THRESHOLDS",
    "KL_DIRECTIONS",
    "KL_ESTIMATORS",
    "LOG_RATIO_LIMIT",
    "PROBABILITY_FLOOR",
    "RATIO_LEVELS",
    "SCALES",
    "STD_OFFSET",
    "Aggregation",
    "BinaryDivergence",
    "CorrectionLevel",
    "CorrectionMode",
    "KLDirection",
    "KLEstimator",
    "LogProbs",
    "RatioLevel",
    "SamplerWeights",
    "Scale",
    "Surrogate",
    "aggregate",
    "at_least_float32",
    "binary_divergence",
    "cispo",
    "clipped_surrogate",
    "distillation_advantage",
    "divergence_masked",
    "effective_sample_fraction",
    "entropy_threshold",
    "fixed_length_mean",
    "flag_fraction",
    "gdpo_advantage",
    "generalized_jsd",
    "gmpo",
    "group_advantage",
    "high_entropy_mask",
    "kl_between",
    "kl_estimate",
    "leveled_log_ratio",
    "log_ratio",
    "maxrl_advantage",
    "mean_of_sequence_means",
    "mean_of_sequence_sums",
    "minor_sft",
    "negative_log_likelihood",
    "off_policy_gap",
    "off_policy_sequence_mask",
    "overlong_mask",
    "overlong_penalty",
    "pass_at_k_advantage",
    "relative_length",
    "rloo_advantage",
    "sampled_distillation",
    "sampler_correction",
    "sapo",
    "sequence_count",
    "sequence_index",
    "sequence_log_ratio",
    "sequence_mean",
    "sequence_sum",
    "spread",
    "token_log_probs",
    "token_mean",
    "trust_region_mask",
    "turn_advantage",
    "turn_index",
    "vespo",
]

"""Losses and advantages as functions of tensors; needs torch and jaxtyping, nothing else.

The folder can be copied whole into another codebase. What is where:

* ``surrogates``: log-ratios at token and sequence level, KL estimators, and the policy term of
  each algorithm, one value per token;
* ``aggregation``: from tokens to the loss, over the whole accumulation window, and to metrics;
* ``weights``: which tokens count and how much; log-probability and entropy from logits;
* ``advantages``: from rewards to advantages, of an answer or of its turns;
* ``values``: from the values of a critic to advantages, and the critic's loss;
* ``supervised``: fine-tuning and distillation;
* ``preferences``: of two answers, which is the better one;
* ``labelled_answers``: single answers, desirable or not.

Tokens come padded, ``[B, T]``, or packed, ``[N]`` beside ``lengths [B]``; both give the same
numbers. Everything that does not lie in a mask is ignored, whatever it holds. Log-probabilities,
entropies and divergences are in nats.
"""

from .advantages import SCALES as SCALES
from .advantages import STD_OFFSET as STD_OFFSET
from .advantages import Scale as Scale
from .advantages import gdpo_advantage as gdpo_advantage
from .advantages import group_advantage as group_advantage
from .advantages import maxrl_advantage as maxrl_advantage
from .advantages import pass_at_k_advantage as pass_at_k_advantage
from .advantages import relative_length as relative_length
from .advantages import rloo_advantage as rloo_advantage
from .aggregation import AGGREGATIONS as AGGREGATIONS
from .aggregation import Aggregation as Aggregation
from .aggregation import aggregate as aggregate
from .aggregation import fixed_length_mean as fixed_length_mean
from .aggregation import mean_of_sequence_means as mean_of_sequence_means
from .aggregation import mean_of_sequence_sums as mean_of_sequence_sums
from .aggregation import token_mean as token_mean
from .divergence import BINARY_DIVERGENCES as BINARY_DIVERGENCES
from .divergence import DIVERGENCE_THRESHOLDS as DIVERGENCE_THRESHOLDS
from .divergence import PROBABILITY_FLOOR as PROBABILITY_FLOOR
from .divergence import BinaryDivergence as BinaryDivergence
from .divergence import binary_divergence as binary_divergence
from .divergence import divergence_masked as divergence_masked
from .kl import KL_ESTIMATORS as KL_ESTIMATORS
from .kl import KLEstimator as KLEstimator
from .kl import kl_between as kl_between
from .kl import kl_estimate as kl_estimate
from .labelled_answers import check_kto as check_kto
from .labelled_answers import kto_loss as kto_loss
from .log_probs import LogProbs as LogProbs
from .log_probs import token_log_probs as token_log_probs
from .metrics import effective_sample_fraction as effective_sample_fraction
from .metrics import flag_fraction as flag_fraction
from .preferences import AGAINST_REFERENCE as AGAINST_REFERENCE
from .preferences import PREFERENCE_FUNCTIONS as PREFERENCE_FUNCTIONS
from .preferences import PreferenceFunction as PreferenceFunction
from .preferences import check_preference as check_preference
from .preferences import preference_loss as preference_loss
from .ratios import LOG_RATIO_LIMIT as LOG_RATIO_LIMIT
from .ratios import RATIO_LEVELS as RATIO_LEVELS
from .ratios import RatioLevel as RatioLevel
from .ratios import leveled_log_ratio as leveled_log_ratio
from .ratios import log_ratio as log_ratio
from .ratios import sequence_log_ratio as sequence_log_ratio
from .sampler_correction import CORRECTION_LEVELS as CORRECTION_LEVELS
from .sampler_correction import CORRECTION_MODES as CORRECTION_MODES
from .sampler_correction import CorrectionLevel as CorrectionLevel
from .sampler_correction import CorrectionMode as CorrectionMode
from .sampler_correction import SamplerWeights as SamplerWeights
from .sampler_correction import off_policy_gap as off_policy_gap
from .sampler_correction import sampler_correction as sampler_correction
from .sequence_surrogates import gmpo as gmpo
from .sequence_surrogates import vespo as vespo
from .sequences import at_least_float32 as at_least_float32
from .sequences import sequence_count as sequence_count
from .sequences import sequence_index as sequence_index
from .sequences import sequence_mean as sequence_mean
from .sequences import sequence_sum as sequence_sum
from .sequences import spread as spread
from .supervised import KL_DIRECTIONS as KL_DIRECTIONS
from .supervised import KLDirection as KLDirection
from .supervised import distillation_advantage as distillation_advantage
from .supervised import generalized_jsd as generalized_jsd
from .supervised import minor_sft as minor_sft
from .supervised import negative_log_likelihood as negative_log_likelihood
from .supervised import sampled_distillation as sampled_distillation
from .surrogates import Surrogate as Surrogate
from .surrogates import cispo as cispo
from .surrogates import clipped_surrogate as clipped_surrogate
from .surrogates import sapo as sapo
from .token_masks import entropy_threshold as entropy_threshold
from .token_masks import high_entropy_mask as high_entropy_mask
from .token_masks import off_policy_sequence_mask as off_policy_sequence_mask
from .token_masks import overlong_mask as overlong_mask
from .token_masks import overlong_penalty as overlong_penalty
from .token_masks import trust_region_mask as trust_region_mask
from .turn_advantage import turn_advantage as turn_advantage
from .turn_advantage import turn_index as turn_index
from .values import CRITIC_LOSS_TYPES as CRITIC_LOSS_TYPES
from .values import CriticLossType as CriticLossType
from .values import generalized_advantage as generalized_advantage
from .values import value_loss as value_loss

"""Settings of the filters that take tokens out of the policy term."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_data.checks import POSITIVE, check_numbers


@dataclass(frozen=True, kw_only=True)
class TokenFilters:
    """Filters of the tokens that the policy term trains; None (or False) leaves a filter off.

    They make the term 0 there and leave the counts that it is divided by alone.

    Raises:
        ValueError: a threshold is out of range.

    Example:
        >>> filters = TokenFilters(trust_region=0.05)  # for GRPOLoss(policy, filters=filters)
        >>> filters.trust_region, filters.drop_truncated
        (0.05, False)
    """

    trust_region: float | None = None
    """In nats: tokens that moved further from where they were sampled are left out
    (:func:`~objectives.functional.trust_region_mask`, KL-mask)."""
    top_entropy_fraction: float | None = None
    """Only this share of the tokens is trained, those of the highest entropy
    (:func:`~objectives.functional.high_entropy_mask`)."""
    off_policy_threshold: float | None = None
    """In nats: bad sequences that moved further in the mean are left out
    (:func:`~objectives.functional.off_policy_sequence_mask`)."""
    drop_truncated: bool = False
    """Rollouts that were cut are left out (:func:`~objectives.functional.overlong_mask`)."""

    def __post_init__(self) -> None:
        check_numbers("TokenFilters", POSITIVE, trust_region=self.trust_region)
        check_numbers("TokenFilters", "(0, 1]", top_entropy_fraction=self.top_entropy_fraction)
        check_numbers("TokenFilters", off_policy_threshold=self.off_policy_threshold)

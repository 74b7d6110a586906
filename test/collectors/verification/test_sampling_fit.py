"""What the log-probs of a sampler give away, against distributions that are written down."""

import math

import pytest
import torch

from collectors.verification.explain import Rounding
from collectors.verification.sampling_fit import fitted_temperature, fitted_truncations
from torchrl_modules import SamplingParameters

P = [0.5, 0.25, 0.125, 0.0625, 0.0625]
LOGITS = torch.tensor([P, P, P]).log()


def test_a_temperature_is_found():
    # softmax(log p / T) at T = 0.5 is p^2 / sum(p^2).
    squares = sum(p * p for p in P)
    told = torch.tensor([math.log(P[i] ** 2 / squares) for i in (0, 1, 3)])
    assert fitted_temperature(LOGITS, torch.tensor([0, 1, 3]), told) == pytest.approx(0.5, 1e-6)


def fits(kept, targets):
    """Truncations that keep so many tokens at each place."""
    told = [math.log(P[i] / sum(P[:k])) for i, k in zip(targets, kept, strict=True)]
    found = fitted_truncations(
        LOGITS, torch.tensor(targets), torch.tensor(told), SamplingParameters(), 1e-6
    )
    return {
        (name, getattr(each, name))
        for each in found
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
        if getattr(each, name) != off
    }


def test_what_kept_three_of_equal_distributions_may_have_been_any_truncation():
    # The mass of two is 0.75 and of three 0.875; the third has 0.25 of the first, the next 0.125.
    assert fits([3, 3, 3], [0, 1, 2]) == {("top_k", 3), ("top_p", 0.8), ("min_p", 0.2)}


def test_no_truncation_keeps_two_and_three_tokens_of_equal_distributions():
    assert fits([2, 3, 3], [0, 1, 2]) == set()


def test_what_was_not_cut_has_no_truncation():
    assert fits([5, 5, 5], [0, 1, 2]) == set()


def test_gaps_that_lean_to_one_side_are_no_rounding():
    rounding, every = Rounding(rms=0.01, largest=0.03), torch.ones(100, dtype=torch.bool)
    even = torch.tensor([0.009, -0.009] * 50)
    assert bool(rounding.fits(even, every).all())
    # Each is as small, and their mean of 0.022 is 22 standard errors of 0.001 away.
    leaning = even + 0.022
    assert int(rounding.fits(leaning, every).sum()) == 50  # those within twice the spread
    assert int(rounding.fits(even * 7, every).sum()) == 0  # 0.063: beyond twice the largest

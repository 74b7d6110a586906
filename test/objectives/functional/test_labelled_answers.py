"""``kto_loss`` by hand, and what becomes of weights and labels."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objectives import functional as F

numbers = st.floats(-20, 20)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_by_hand():
    score = torch.tensor([3.0, 3.0, -1.0, 1.0])
    label = torch.tensor([True, False, False, True])
    options = {"beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 3.0}
    found = F.kto_loss(score, label, reference_kl=1.0, **options)
    expected = [2 * (1 - sigmoid(1)), 3 * (1 - sigmoid(-1)), 3 * (1 - sigmoid(1)), 1.0]
    torch.testing.assert_close(found, torch.tensor(expected))
    usual = F.kto_loss(score, label)
    expected = [1 - sigmoid(0.3), 1 - sigmoid(-0.3), 1 - sigmoid(0.1), 1 - sigmoid(0.1)]
    torch.testing.assert_close(usual, torch.tensor(expected))


@given(numbers, numbers, st.floats(0.01, 3))
def test_two_single_answers_are_the_pair_of_apo_zero(chosen, rejected, beta):
    scores = torch.tensor([chosen, rejected], dtype=torch.float64)
    single = F.kto_loss(scores, torch.tensor([True, False]), beta=beta)
    pair = F.preference_loss(scores[:1], scores[1:], beta=beta, loss_function="apo_zero")
    torch.testing.assert_close(single.sum(), pair.sum())


REFUSED = {
    "beta": ({"beta": 0.0}, "beta must be positive, got 0.0"),
    "a weight": ({"undesirable_weight": 0.0}, "undesirable_weight must be positive, got 0.0"),
    "a divergence": ({"reference_kl": -0.1}, "reference_kl must be finite and at least 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    options, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        F.kto_loss(torch.zeros(1), torch.ones(1, dtype=torch.bool), **options)

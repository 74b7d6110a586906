"""``preference_loss`` by hand, and what each function is for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objectives import functional as F

SCORES = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.0, 1.0, 0.5])  # differences 1, -3, 0
OF_DIFFERENCE = ("sigmoid", "hinge", "ipo", "robust", "exo_pair")
EACH = ((1.0, 0.0), (-2.0, 1.0), (0.5, 0.5))
numbers = st.floats(-20, 20)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


BY_HAND = {
    "nothing given": ({}, [-math.log(sigmoid(0.1 * d)) for d in (1, -3, 0)]),
    "sigmoid": ({"beta": 0.5}, [-math.log(sigmoid(0.5 * d)) for d in (1, -3, 0)]),
    "sigmoid, smoothed": (
        {"beta": 2.0, "label_smoothing": 0.1},
        [-0.9 * math.log(sigmoid(2 * d)) - 0.1 * math.log(sigmoid(-2 * d)) for d in (1, -3, 0)],
    ),
    "sigmoid with a margin": (
        {"beta": 2.0, "margin": 0.5},
        [-math.log(sigmoid(2 * d - 0.5)) for d in (1, -3, 0)],
    ),
    "hinge": ({"beta": 0.5, "loss_function": "hinge"}, [0.5, 2.5, 1.0]),
    "ipo": ({"beta": 0.25, "loss_function": "ipo"}, [1.0, 25.0, 4.0]),
    "robust": (
        {"beta": 1.0, "loss_function": "robust", "label_smoothing": 0.2},
        [(-0.8 * math.log(sigmoid(d)) + 0.2 * math.log(sigmoid(-d))) / 0.6 for d in (1, -3, 0)],
    ),
    # sum of p log(p / q) over the two answers
    "exo_pair": (
        {"beta": 0.5, "loss_function": "exo_pair", "label_smoothing": 0.1},
        [
            sigmoid(0.5 * d) * math.log(sigmoid(0.5 * d) / 0.9)
            + sigmoid(-0.5 * d) * math.log(sigmoid(-0.5 * d) / 0.1)
            for d in (1, -3, 0)
        ],
    ),
    "apo_zero": (
        {"beta": 0.5, "loss_function": "apo_zero"},
        [1 - sigmoid(0.5 * c) + sigmoid(0.5 * r) for c, r in EACH],
    ),
    "apo_down": (
        {"beta": 0.5, "loss_function": "apo_down"},
        [sigmoid(0.5 * c) + 1 - sigmoid(0.5 * (c - r)) for c, r in EACH],
    ),
    "bco_pair": (
        {"beta": 0.5, "loss_function": "bco_pair"},
        [-math.log(sigmoid(0.5 * c)) - math.log(1 - sigmoid(0.5 * r)) for c, r in EACH],
    ),
    "nca_pair": (
        {"beta": 0.5, "loss_function": "nca_pair"},
        [
            -math.log(sigmoid(0.5 * c))
            - 0.5 * (math.log(1 - sigmoid(0.5 * c)) + math.log(1 - sigmoid(0.5 * r)))
            for c, r in EACH
        ],
    ),
    # 1 / (2 beta) is 1: (1 - 1, 0 + 1), (-2 - 1, 1 + 1), (0.5 - 1, 0.5 + 1)
    "sppo_hard": ({"beta": 0.5, "loss_function": "sppo_hard"}, [1.0, 13.0, 2.5]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    options, expected = BY_HAND[name]
    torch.testing.assert_close(F.preference_loss(*SCORES, **options), torch.tensor(expected))


def test_odds_by_hand():
    """A probability of 3/4 has odds of 3, and one of 1/2 odds of 1; a certain one has very many."""
    chosen, rejected = (torch.tensor(p).log().requires_grad_() for p in ([0.75, 1.0], [0.5, 0.5]))
    loss = F.preference_loss(chosen, rejected, beta=0.2, loss_function="orpo")
    # sigma(log 3) = 3 / 4; d/dx -0.2 log sigma(log odds) = -0.2 (1 - 3/4) / (1 - p), p is 3/4
    torch.testing.assert_close(loss[0].item(), -0.2 * math.log(0.75))
    assert 0 <= loss[1].item() < 1e-6
    loss.sum().backward()
    torch.testing.assert_close(chosen.grad, torch.tensor([-0.2, 0.0]))
    torch.testing.assert_close(rejected.grad[0].item(), 0.1)  # p is 1/2


@given(numbers, numbers, st.floats(0.01, 0.49), st.floats(0.01, 3))
def test_the_robust_loss_of_swapped_pairs_is_on_average_that_of_right_ones(a, b, share, beta):
    a, b = (torch.tensor([x], dtype=torch.float64) for x in (a, b))
    robust = {"loss_function": "robust", "label_smoothing": share, "beta": beta}
    of_right, of_swapped = F.preference_loss(a, b, **robust), F.preference_loss(b, a, **robust)
    mean = (1 - share) * of_right + share * of_swapped
    torch.testing.assert_close(mean, F.preference_loss(a, b, beta=beta))


@given(numbers, numbers, st.sampled_from(OF_DIFFERENCE))
def test_what_both_scores_have_in_common_counts_nothing(a, shift, loss_function):
    scores = torch.tensor([a], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    moved = [score + shift for score in scores]
    options = {"loss_function": loss_function, "label_smoothing": smoothing(loss_function)}
    loss = [F.preference_loss(*x, **options) for x in (scores, moved)]
    torch.testing.assert_close(*loss)


def smoothing(loss_function):
    return 1e-3 if loss_function == "exo_pair" else 0.0


@pytest.mark.parametrize("loss_function", F.PREFERENCE_FUNCTIONS)
def test_a_step_makes_the_better_answer_likelier_and_the_other_one_less(loss_function):
    start = -1.0 if loss_function == "orpo" else 0.0  # log-probabilities, or those of the reference
    chosen, rejected = (torch.full((1,), start, requires_grad=True) for _ in range(2))
    options = {"loss_function": loss_function, "label_smoothing": smoothing(loss_function)}
    F.preference_loss(chosen, rejected, **options).sum().backward()
    if loss_function == "apo_down":  # both become less likely; what they begin with is a standstill
        assert chosen.grad == 0 < rejected.grad
        return
    assert chosen.grad < 0 < rejected.grad
    torch.testing.assert_close(chosen.grad, -rejected.grad)


REFUSED = {
    "a function": ({"loss_function": "sigmoids"}, "loss_function must be one of .*'ipo'"),
    "beta": ({"beta": 0.0}, "beta must be positive, got 0.0"),
    "half of the pairs": ({"label_smoothing": 0.5}, "less than 0.5, got 0.5"),
    "smoothing of ipo": (
        {"label_smoothing": 0.1, "loss_function": "ipo"},
        "label_smoothing=0.1 goes with",
    ),
    "exo without smoothing": ({"loss_function": "exo_pair"}, "needs label_smoothing above 0"),
    "a margin of hinge": ({"margin": 1.0, "loss_function": "hinge"}, "margin=1.0 goes with"),
    "a negative margin": ({"margin": -1.0}, "margin must not be negative"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    options, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        F.preference_loss(*SCORES, **options)

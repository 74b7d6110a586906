"""The masks of DPPO, IPO and KPop, and distillation by policy gradient: values derived by hand."""

import math

import pytest
import torch

import objectives.functional as F

TV = {"divergence": "tv"}
KL = {"divergence": "kl"}
BOTH = {"divergence": "symmetric_kl", "one_sided": False}


@pytest.mark.parametrize(
    ("pi", "mu", "advantage", "options", "loss", "side"),
    [
        pytest.param(0.5, 0.5, 2.0, TV, -2.0, "", id="on policy: plain policy gradient"),
        pytest.param(0.5, 0.2, 1.0, TV, 0.0, "high", id="good token, moved up by 0.3: masked"),
        pytest.param(0.5, 0.2, -1.0, TV, 2.5, "", id="bad token, moved up: comes back"),
        pytest.param(0.2, 0.5, -1.0, TV, 0.0, "low", id="bad token, moved down by 0.3: masked"),
        pytest.param(0.2, 0.5, 1.0, TV, -0.4, "", id="good token, moved down: comes back"),
        pytest.param(0.01, 1e-4, 1.0, TV, -100.0, "", id="rare token: its ratio does not matter"),
        pytest.param(0.5, 0.2, 1.0, TV | {"threshold": 0.4}, -2.5, "", id="a wider region"),
        # KL(mu || pi) = 0.2 ln 0.4 + 0.8 ln 1.6 = 0.193 nats; of 0.5 and 0.4: 0.020.
        pytest.param(0.5, 0.2, 1.0, KL, 0.0, "high", id="KL of 0.193: masked"),
        pytest.param(0.5, 0.4, 1.0, KL, -1.25, "", id="KL of 0.020: kept"),
        pytest.param(0.5, 0.2, 1.0, KL | {"threshold": 0.2}, -2.5, "", id="KL of 0.193 under 0.2"),
        # The other way 0.5 ln 2.5 + 0.5 ln 0.625 = 0.223.
        pytest.param(
            0.5, 0.2, -1.0, BOTH | {"threshold": 0.2}, 0.0, "high", id="the larger of both KLs"
        ),
        pytest.param(
            0.2, 0.5, 1.0, BOTH | {"threshold": 0.2}, 0.0, "low", id="and the same from above"
        ),
        pytest.param(
            0.5, 0.2, -1.0, TV | {"one_sided": False}, 0.0, "high", id="two-sided: any direction"
        ),
        pytest.param(0.5, 0.2, 0.0, TV, 0.0, "", id="no advantage: nothing to mask"),
    ],
)
def test_one_token(pi, mu, advantage, options, loss, side):
    log_prob = torch.tensor([math.log(pi)], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor([math.log(mu)], dtype=torch.float64)
    term = F.divergence_masked(log_prob, behavior, torch.tensor([advantage]).double(), **options)
    torch.testing.assert_close(term.loss, torch.tensor([loss], dtype=torch.float64))
    # The gradient of -r A in log pi is -r A itself.
    (grad,) = torch.autograd.grad(term.loss.sum(), log_prob)
    torch.testing.assert_close(grad, torch.tensor([loss], dtype=torch.float64))
    assert term.ratio.item() == pytest.approx(pi / mu)
    assert (term.clipped_low.item(), term.clipped_high.item()) == (side == "low", side == "high")


@pytest.mark.parametrize("divergence", F.BINARY_DIVERGENCES)
def test_what_an_engine_rounds_to_certainty_is_near_what_it_was(divergence):
    """An engine that reports 1 for 1 - 1e-5 has not moved; nor has one that says 1e-9 for 1e-8."""
    log_prob = torch.tensor([math.log1p(-1e-5), math.log(1e-9), 0.0])
    behavior = torch.tensor([0.0, math.log(1e-8), 0.0])
    found = F.binary_divergence(log_prob, behavior, divergence=divergence)
    assert (found < 1e-4).all()
    assert (found >= 0).all()


def test_the_thresholds_are_those_of_the_papers():
    assert dict(F.DIVERGENCE_THRESHOLDS) == {"tv": 0.15, "kl": 0.05, "symmetric_kl": 0.1}


def test_padding_takes_no_part_whatever_it_holds():
    log_prob = torch.tensor([[-0.5, math.nan]], requires_grad=True)
    behavior = torch.tensor([[-3.0, math.inf]])
    mask = torch.tensor([[True, False]])
    advantage = torch.tensor([[1.0, math.nan]])
    term = F.divergence_masked(log_prob, behavior, advantage, mask, divergence="symmetric_kl")
    assert term.loss.tolist() == [[0, 0]]
    assert term.ratio[0, 1] == 1
    assert term.clipped_high.tolist() == [[True, False]]


def test_distillation_advantage_gives_the_gradient_of_the_reverse_kl():
    """Over a vocabulary of three, tokens of an older student: enumerated, weighed by r."""
    logits = torch.tensor([0.3, -0.4, 1.1], dtype=torch.float64, requires_grad=True)
    older = torch.tensor([0.9, 0.1, 0.0], dtype=torch.float64).log_softmax(-1)
    teacher = torch.tensor([-1.0, 0.5, 0.2], dtype=torch.float64).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    exact = (log_p.exp() * (log_p - teacher)).sum()
    (want,) = torch.autograd.grad(exact, logits, retain_graph=True)
    advantage = F.distillation_advantage(log_p, teacher)
    ratio = F.log_ratio(log_p, older)
    expected_loss = (older.exp() * -(ratio.exp() * advantage)).sum()
    (got,) = torch.autograd.grad(expected_loss, logits)
    torch.testing.assert_close(got, want)


def test_distillation_advantage_is_bounded_and_0_outside_the_mask():
    log_prob = torch.tensor([-0.1, math.nan])
    found = F.distillation_advantage(
        log_prob, torch.tensor([-math.inf, 0.0]), torch.tensor([True, False])
    )
    assert found.tolist() == [-F.LOG_RATIO_LIMIT, 0]


def test_a_sequence_beyond_the_k3_bound_weighs_nothing():
    """k3 of log 2 is 2 - ln 2 - 1 = 0.307; the other sequence's gap is 0."""
    train = torch.tensor([math.log(2.0), math.log(2.0), 0.0, 0.0], dtype=torch.float64) - 3
    sampler, lengths = torch.full((4,), -3.0, dtype=torch.float64), torch.tensor([3, 1])
    mean = 2 * (1 - math.log(2.0)) / 3
    for bound, weights in ((mean - 0.01, [0, 0, 0, 1]), (mean + 0.01, [1, 1, 1, 1])):
        found = F.sampler_correction(train, sampler, None, lengths, level="k3", max_k3=bound)
        assert found.weight.tolist() == weights
        assert found.changed.tolist() == [w == 0 for w in weights]
    both = F.sampler_correction(train, sampler, None, lengths, upper=1.5, max_k3=mean + 0.01)
    assert both.weight.tolist() == [1.5, 1.5, 1, 1]

"""Each loss against its formula, written down with plain numbers."""

import math

import pytest
import torch

from torchrl_agents.training_service.errors import RefusedRequest
from torchrl_agents.training_service.token_losses import TOKEN_LOSSES, ScoredTokens, token_loss

P = [0.5, 0.2, 0.9, 0.3]
Q = [0.4, 0.4, 0.3, 0.3]
A = [2.0, -1.0, 1.5, -0.5]
R = [p / q for p, q in zip(P, Q, strict=True)]  # 1.25, 0.5, 3, 1


def clip(ratio, low=0.8, high=1.2):
    return min(max(ratio, low), high)


def tokens(**more):
    log_prob = torch.tensor([math.log(p) for p in P], requires_grad=True)
    inputs = {"logprobs": torch.tensor([math.log(q) for q in Q]), "advantages": torch.tensor(A)}
    inputs |= {name: torch.tensor(value) for name, value in more.items()}
    return ScoredTokens(log_prob, inputs, torch.tensor([3, 1]))


def value_and_gradient(name, settings=None, **more):
    given = tokens(**more)
    each = token_loss(name, settings or {})(given)
    (gradient,) = torch.autograd.grad(each.sum(), given.log_prob)
    return each.detach().tolist(), gradient.tolist()


def near(values):
    return pytest.approx(values, rel=1e-5, abs=1e-6)


def test_cross_entropy():
    value, gradient = value_and_gradient("cross_entropy", weights=[1.0, 0.0, 0.5, 2.0])
    assert value == near([-math.log(0.5), 0, -0.5 * math.log(0.9), -2 * math.log(0.3)])
    assert gradient == near([-1, 0, -0.5, -2])


def test_importance_sampling():
    value, gradient = value_and_gradient("importance_sampling")
    assert value == near([-2.5, 0.5, -4.5, 0.5])
    assert gradient == near([-2.5, 0.5, -4.5, 0.5])  # of exp is itself


def test_ppo():
    value, gradient = value_and_gradient("ppo")
    # 1.25 above 1.2 with A > 0: clipped; 0.5 below 0.8 with A < 0: clipped to 0.8.
    assert value == near([-1.2 * 2, 0.8, -1.2 * 1.5, 0.5])
    assert gradient == near([0, 0, 0, 0.5])
    wide = {"clip_low_threshold": 0.1, "clip_high_threshold": 2.0}
    assert value_and_gradient("ppo", wide)[0] == near([-2.5, 0.5, -3.0, 0.5])


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    value, gradient = value_and_gradient("cispo")
    weights = [clip(r) * a for r, a in zip(R, A, strict=True)]
    assert value == near([-w * math.log(p) for w, p in zip(weights, P, strict=True)])
    assert gradient == near([-w for w in weights])


def test_dro():
    value, gradient = value_and_gradient("dro", {"beta": 0.3})
    for p, q, a, v, g in zip(P, Q, A, value, gradient, strict=True):
        assert v == near(-(math.log(p) * a - 0.15 * math.log(p / q) ** 2))
        assert g == near(-(a - 0.3 * math.log(p / q)))


def test_gspo_has_the_ratio_of_the_sequence_and_the_gradient_of_the_token():
    settings = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.3}
    # The first sequence's ratio is over two of its three tokens: sqrt(0.5 * 3) = 1.22.
    value, gradient = value_and_gradient("gspo", settings, sequence_ratio_mask=[0.0, 1.0, 1.0, 1.0])
    ratio = math.sqrt(1.5)
    assert value[1:] == near([ratio, -1.5 * ratio, 0.5])
    assert gradient[1:] == near([ratio, -1.5 * ratio, 0.5])
    narrow = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    value, gradient = value_and_gradient("gspo", narrow, sequence_ratio_mask=[0.0, 1.0, 1.0, 1.0])
    assert value[2] == near(-1.1 * 1.5)
    assert gradient[1:] == near([ratio, 0, 0.5])


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("stable_reinforce", {}, "not served here; there are cross_entropy"),
        ("ppo", {"clip_low": 0.8}, "has no 'clip_low'"),
        ("gspo", {}, "no default for clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}, "lie around 1"),
        ("dro", {"beta": float("nan")}, "number from 0"),
        ("cross_entropy", {"beta": 1.0}, "no setting"),
    ],
)
def test_what_has_no_meaning_is_refused(name, settings, words):
    with pytest.raises(RefusedRequest, match=words):
        token_loss(name, settings)


def test_every_loss_has_a_value_here():
    tested = {name[5:] for name in globals() if name.startswith("test_")}
    assert all(any(one.startswith(name) for one in tested) for name in TOKEN_LOSSES)

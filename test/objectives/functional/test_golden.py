"""Values derived by hand or given with the formulas, at the edges where mistakes are made."""

import math

import pytest
import torch

import objectives.functional as F
from objectives.functional.groups import group_mean

LOG_PROB = torch.tensor(
    [[-0.5, -1, -2, -0.1], [-1.5, -0.2, -0.7, -3], [-0.9, -0.9, -0.3, -0.4]], dtype=torch.float64
)
OLD = torch.tensor(
    [[-0.6, -0.7, -2.5, -0.1], [-1.5, -0.9, -0.7, -1], [-0.8, -1.9, -0.3, -0.4]],
    dtype=torch.float64,
)
MASK = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
ADVANTAGE = torch.tensor([[1.0], [-0.5], [2.0]], dtype=torch.float64).expand(3, 4)


@pytest.mark.parametrize(
    ("aggregation", "value"),
    [
        pytest.param("sequence_mean", -0.845867, id="grpo"),
        pytest.param("token_mean", -0.688496, id="bnpo and dapo"),
        pytest.param("fixed_length", -0.229499, id="dr_grpo"),
        pytest.param("sequence_sum", -1.835990, id="luspo"),
    ],
)
def test_reference_batch(aggregation, value):
    term = F.clipped_surrogate(F.log_ratio(LOG_PROB, OLD, MASK), ADVANTAGE, MASK)
    max_tokens = 8 if aggregation == "fixed_length" else None
    loss = F.aggregate(term.loss, MASK, aggregation=aggregation, max_tokens=max_tokens)
    # The reference numbers have six decimals.
    assert loss.item() == pytest.approx(value, abs=5e-7)


def test_reference_batch_sapo():
    term = F.sapo(F.log_ratio(LOG_PROB, OLD, MASK), ADVANTAGE, MASK)
    assert F.mean_of_sequence_means(term.loss, MASK).item() == pytest.approx(-2.144506, abs=5e-7)


def test_reference_advantages():
    reward = torch.tensor([1.0, 2.0, math.nan, 4.0])
    got = F.group_advantage(reward, torch.zeros(4, dtype=torch.int64))
    assert got.tolist() == pytest.approx([-0.872814, -0.218204, 0, 1.091018], abs=1e-6)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "grad", "flags"),
    [
        pytest.param(0.0, 2.0, -2.0, -2.0, "", id="on policy: plain policy gradient"),
        pytest.param(math.log(1.5), 1.0, -1.2, 0.0, "high", id="good, ratio too high: clipped"),
        pytest.param(math.log(0.5), 1.0, -0.5, -0.5, "", id="good, ratio low: not clipped"),
        pytest.param(math.log(0.5), -1.0, 0.8, 0.0, "low", id="bad, ratio too low: clipped"),
        pytest.param(math.log(1.5), -1.0, 1.5, 1.5, "", id="bad, ratio high: not clipped"),
        pytest.param(math.log(1.1), -0.5, 0.55, 0.55, "", id="bad, ratio within: not clipped"),
        pytest.param(math.log(0.9), 0.5, -0.45, -0.45, "", id="good, ratio within: not clipped"),
        pytest.param(math.log(0.5), 0.5, -0.25, -0.25, "", id="half good, ratio low: not clipped"),
        pytest.param(math.log(4.0), -1.0, 3.0, 0.0, "", id="bad, ratio above the cap: capped"),
        pytest.param(500.0, -1.0, 3.0, 0.0, "", id="a ratio that would overflow stays finite"),
        pytest.param(500.0, 0.0, 0.0, 0.0, "", id="no advantage: no loss, whatever the ratio"),
        pytest.param(-500.0, 1.0, 0.0, 0.0, "", id="a ratio that vanishes leaves no gradient"),
    ],
)
def test_one_token(log_ratio, advantage, loss, grad, flags):
    log_prob = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True]])
    ratio = F.log_ratio(log_prob, torch.zeros_like(log_prob), mask)
    adv = torch.full_like(ratio.detach(), advantage)
    term = F.clipped_surrogate(ratio, adv, mask, ratio_cap=3.0)
    term.loss.sum().backward()
    assert term.loss.item() == pytest.approx(loss, abs=1e-8)
    assert log_prob.grad.item() == pytest.approx(grad, abs=1e-8)
    assert (term.clipped_low.item(), term.clipped_high.item()) == (flags == "low", flags == "high")


def test_cispo_keeps_the_gradient_of_every_token():
    log_prob = torch.tensor([[0.0, math.log(3), math.log(9)]], requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    ratio = F.log_ratio(log_prob, torch.zeros(1, 3), mask)
    term = F.cispo(ratio, log_prob, torch.ones(1, 3), mask, max_ratio=5.0)
    term.loss.sum().backward()
    assert log_prob.grad.tolist()[0] == pytest.approx([-1, -3, -5])
    assert term.clipped_high.tolist() == [[False, False, True]]


def test_gmpo_clips_by_the_sign_of_the_advantage():
    log_ratio = torch.tensor([[1.0, -1.0], [1.0, -1.0]])
    advantage = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    term = F.gmpo(log_ratio, advantage, torch.ones(2, 2, dtype=torch.bool))
    assert term.loss[0].tolist() == pytest.approx([-math.exp((0.4 - 1) / 2)] * 2)
    assert term.loss[1].tolist() == pytest.approx([math.exp((1 - 0.4) / 2)] * 2)
    assert term.clipped_high.tolist() == [[True, False], [False, False]]
    assert term.clipped_low.tolist() == [[False, False], [False, True]]
    within = F.gmpo(log_ratio / 10, advantage, torch.ones(2, 2, dtype=torch.bool))
    assert not (within.clipped_low | within.clipped_high).any()


@pytest.mark.parametrize(
    ("log_ratio", "correction", "log_weight"),
    [
        pytest.param(0.5, None, 0.5, id="the ratio of the sequence"),
        pytest.param(0.5, -0.2, 0.3, id="the sampler correction belongs inside"),
        pytest.param(-40.0, None, math.log(1e-8), id="kept above 1e-8"),
        pytest.param(-1.0, -math.inf, math.log(1e-8), id="a masked token: as low as it goes"),
    ],
)
def test_vespo_weight(log_ratio, correction, log_weight):
    given = None if correction is None else torch.tensor([[correction, 0.0]])
    pair = torch.tensor([[log_ratio, 0.0]])
    mask, minus_one = torch.tensor([[True, True]]), torch.full((1, 2), -1.0)
    for advantage, (k, lam) in ((1.0, (2, 3)), (-1.0, (3, 2)), (0.0, (2, 3))):
        adv = torch.full((1, 2), advantage)
        term = F.vespo(pair, minus_one, adv, mask, sampler_log_ratio=given)
        weight = math.exp(lam + k * log_weight - lam * math.exp(log_weight))
        assert term.ratio.tolist()[0] == pytest.approx([weight] * 2, rel=1e-5)
        assert term.loss.tolist()[0] == pytest.approx([advantage * weight] * 2, rel=1e-5)


def test_the_mean_keeps_a_long_sequence_alive_where_the_sum_would_not():
    train = torch.full((1, 4096), -1.001)
    mask = torch.ones(1, 4096, dtype=torch.bool)
    result = F.sampler_correction(train, torch.full_like(train, -1.0), mask, level="sequence")
    assert result.weight[0, 0].item() == pytest.approx(0.999, abs=1e-4)


def test_effective_sample_fraction_of_huge_ratios_is_finite_and_has_no_gradient():
    log_ratio = torch.tensor([[400.0, 400.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    fraction = F.effective_sample_fraction(log_ratio, mask)
    assert fraction.item() == 1
    assert not fraction.requires_grad
    assert F.effective_sample_fraction(log_ratio, mask & False).item() == 1


def test_equal_rewards_that_are_not_exact_in_binary_give_exactly_zero():
    reward = torch.full((7,), 0.1)
    assert F.group_advantage(reward, torch.zeros(7, dtype=torch.int64)).tolist() == [0.0] * 7
    assert F.rloo_advantage(reward, torch.zeros(7, dtype=torch.int64)).tolist() == [0.0] * 7


def test_an_invalid_reward_does_not_make_an_even_group_uneven():
    for other in (5.0, -5.0, math.nan):
        reward = torch.tensor([0.1] * 7 + [other])
        valid = torch.tensor([True] * 7 + [False])
        group = torch.zeros(8, dtype=torch.int64)
        assert F.group_advantage(reward, group, valid).tolist() == [0.0] * 8


def test_the_mean_of_a_group_without_valid_members_is_0():
    index, none = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)
    values = torch.full((2,), math.nan)
    assert group_mean(values, index, none).tolist() == [0, 0]
    assert group_mean(torch.tensor([3.0, 1.0]), index, ~none).tolist() == [2, 2]
    assert group_mean(values.fill_(3.0), index, torch.tensor([True, False])).tolist() == [3, 3]


def test_no_aggregation_is_0_outside_the_mask():
    values = torch.tensor([[1.0, math.nan]])
    mask = torch.tensor([[True, False]])
    assert F.aggregate(values, mask, aggregation="none").tolist() == [[1, 0]]


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [
        pytest.param(12, 0.0, id="before the buffer: nothing"),
        pytest.param(14, -0.5, id="within it: linear"),
        pytest.param(16, -1.0, id="at the limit: all"),
        pytest.param(99, -1.0, id="beyond it: no more"),
    ],
)
def test_overlong_penalty(num_tokens, penalty):
    got = F.overlong_penalty(torch.tensor([num_tokens]), max_tokens=16, buffer_tokens=4)
    assert got.item() == penalty


def test_entropy_and_log_prob_with_a_banned_token():
    logits = torch.tensor([[0.0, math.log(3.0), -math.inf]], requires_grad=True)
    scores = F.token_log_probs(logits, torch.tensor([1]))
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert scores.log_prob.item() == pytest.approx(math.log(0.75))
    assert scores.entropy.item() == pytest.approx(entropy)
    (scores.log_prob + scores.entropy).sum().backward()
    assert logits.grad.isfinite().all()
    half = F.token_log_probs(logits.bfloat16(), torch.tensor([1]))
    assert half.log_prob.dtype == torch.float32


def test_temperature_and_chunks_of_log_probs():
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([0, 6, 2, 3, 3])
    want = (logits / 0.7).log_softmax(-1)
    for chunk_tokens in (1, 2, 5, 100):
        got = F.token_log_probs(logits, ids, temperature=0.7, chunk_tokens=chunk_tokens)
        torch.testing.assert_close(got.log_prob, want[range(5), ids])
        torch.testing.assert_close(got.entropy, -(want.exp() * want).sum(-1))


NAN, INF = math.nan, math.inf


def test_log_ratio_is_0_outside_the_mask_and_bounded_inside():
    log_prob = torch.tensor([NAN, INF, 500.0, -500.0, 0.5], requires_grad=True)
    mask = torch.tensor([False, False, True, True, True])
    ratio = F.log_ratio(log_prob, torch.zeros(5), mask)
    assert ratio.tolist() == [0, 0, 20, -20, 0.5]
    ratio.sum().backward()
    assert log_prob.grad.tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("estimator", "value"), [("k1", 1.0), ("k2", 0.5), ("k3", math.exp(-1))], ids=str
)
def test_kl_is_0_outside_the_mask_and_finite_inside(estimator, value):
    # Inside: the policy is one nat above the reference.
    log_prob = torch.tensor([NAN, -1.0, -700.0], requires_grad=True)
    reference = torch.tensor([0.0, -2.0, 0.0])
    mask = torch.tensor([False, True, True])
    ratio = torch.tensor([NAN, 0.0, 0.0])
    kl = F.kl_estimate(log_prob, reference, mask, estimator=estimator, log_ratio=ratio)
    assert kl[:2].tolist() == [0, pytest.approx(value)]
    assert kl.isfinite().all()
    plain = F.kl_estimate(log_prob, reference, mask, estimator=estimator)
    assert plain[:2].tolist() == [0, pytest.approx(value)]
    (kl.sum() + plain.sum()).backward()
    assert log_prob.grad.isfinite().all()


@pytest.mark.parametrize(
    ("log_ratio", "log_weight"),
    [
        pytest.param(-20.0, math.log(1e-8), id="far below: the floor"),
        pytest.param(20.0, 20.0, id="far above: the limit of a log-ratio"),
        pytest.param(1.5, 4.5, id="between: the sum over the sequence"),
    ],
)
def test_vespo_keeps_the_weight_of_a_sequence_within_bounds(log_ratio, log_weight):
    """With lam = 0 the weight is w^k."""
    tokens = torch.full((1, 3), log_ratio, dtype=torch.float64)
    ones, mask = torch.ones_like(tokens), torch.ones_like(tokens, dtype=torch.bool)
    got = F.vespo(tokens, -ones, ones, mask, positive=(0.01, 0.0)).ratio
    assert got[0].tolist() == pytest.approx([math.exp(0.01 * log_weight)] * 3)


def test_kl_between_any_number_of_distributions():
    p = torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.9, 0.1], [0.2, 0.8]]])
    q = torch.tensor([[[0.25, 0.75], [0.5, 0.5]], [[0.9, 0.1], [0.8, 0.2]]])
    want = [
        [0.5 * math.log(2) + 0.5 * math.log(2 / 3), math.log(2)],
        [0.0, 0.6 * math.log(4)],
    ]
    got = F.kl_between(p.log(), q.log())
    torch.testing.assert_close(got, torch.tensor(want))


def test_turn_advantage_of_a_rollout_with_a_reward_that_is_not_finite_is_0():
    reward = torch.tensor([1.0, 0.0, 3.0, 5.0, INF])
    mask = torch.ones(5, dtype=torch.bool)
    lengths, group = torch.tensor([2, 1, 2]), torch.zeros(3, dtype=torch.int64)
    got = F.turn_advantage(reward, mask, lengths, group)
    # Turns of 1 and 3: mean 2, deviation sqrt(2).
    a = 1 / (math.sqrt(2) + 1e-4)
    assert got.tolist() == pytest.approx([-a, -a, a, 0, 0])


def test_negative_log_likelihood_is_0_outside_the_mask():
    log_prob = torch.tensor([NAN, -2.0], requires_grad=True)
    loss = F.negative_log_likelihood(log_prob, torch.tensor([False, True]))
    loss.sum().backward()
    assert loss.tolist() == [0, 2]
    assert log_prob.grad.tolist() == [0, -1]


@pytest.mark.parametrize(
    ("direction", "value"), [("reverse", math.exp(-1)), ("forward", math.e - 2)], ids=str
)
def test_sampled_distillation_is_0_outside_the_mask_and_finite_inside(direction, value):
    student = torch.tensor([NAN, -1.0, -700.0, 0.0], requires_grad=True)
    teacher = torch.tensor([0.0, -2.0, 0.0, -700.0])
    mask = torch.tensor([False, True, True, True])
    kl = F.sampled_distillation(student, teacher, mask, direction=direction)
    assert kl[:2].tolist() == [0, pytest.approx(value)]
    assert kl.isfinite().all()
    kl.sum().backward()
    assert student.grad.isfinite().all()
    assert student.grad[0] == 0


def test_the_entropy_quantile_is_that_of_the_active_tokens():
    entropy = torch.tensor([9.0, 1.0, 2.0, 3.0, 9.0])
    mask = torch.tensor([False, True, True, True, False])
    assert F.entropy_threshold(entropy, mask, top_fraction=0.5).item() == 2
    keep = F.high_entropy_mask(entropy, mask, top_fraction=0.5)
    assert keep.tolist() == [False, False, True, True, False]
    assert F.entropy_threshold(entropy, mask & False, top_fraction=0.5).isnan()


def test_gdpo_of_a_rollout_without_any_reward_is_0():
    rewards = torch.tensor([[1.0, NAN], [3.0, NAN], [NAN, NAN]])
    got = F.gdpo_advantage(rewards, torch.zeros(3, dtype=torch.int64), torch.ones(2))
    assert got.tolist() == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2), 0], rel=1e-3)


def test_generalized_jsd_reaches_both_kls_at_its_ends():
    student = torch.tensor([[0.2, -1.0, 0.5]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[1.0, 0.0, -math.inf]], dtype=torch.float64)
    p, q = teacher.softmax(-1)[0].tolist(), student.detach().softmax(-1)[0].tolist()
    forward = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)
    assert F.generalized_jsd(student, teacher, weight=0.0).item() == pytest.approx(forward)
    mixed = [0.3 * a + 0.7 * b for a, b in zip(p, q, strict=True)]
    jsd = 0.3 * sum(a * math.log(a / m) for a, m in zip(p, mixed, strict=True) if a)
    jsd += 0.7 * sum(b * math.log(b / m) for b, m in zip(q, mixed, strict=True))
    loss = F.generalized_jsd(student, teacher, weight=0.3)
    assert loss.item() == pytest.approx(jsd)
    (grad,) = torch.autograd.grad(loss.sum(), student)
    assert grad.isfinite().all()
    other = torch.tensor([[1.0, 0.0, 0.3]], dtype=torch.float64)
    reverse = F.generalized_jsd(student, other, weight=1.0)
    torch.testing.assert_close(reverse, F.kl_between(student, other))


def test_what_is_never_differentiated_is_not():
    """Advantages, behaviour, reference and teacher log-probs: gradient None, not 0."""
    fixed = [(-torch.rand(2, 3)).requires_grad_() for _ in range(3)]
    old, ref, advantage = fixed
    log_prob = (-torch.rand(2, 3)).requires_grad_()
    mask = torch.ones(2, 3, dtype=torch.bool)
    ratio = F.log_ratio(log_prob, old, mask)
    losses = [
        F.clipped_surrogate(ratio, advantage, mask).loss,
        F.cispo(ratio, log_prob, advantage, mask).loss,
        F.sapo(ratio, advantage, mask).loss,
        F.vespo(ratio, log_prob, advantage, mask, sampler_log_ratio=old).loss,
        F.gmpo(ratio, advantage, mask).loss,
        F.divergence_masked(log_prob, old, advantage, mask).loss,
        F.kl_estimate(log_prob, ref, mask),
        F.sampled_distillation(log_prob, ref, mask),
        F.sampled_distillation(log_prob, ref, mask, direction="forward"),
        F.minor_sft(log_prob, ref),
        F.generalized_jsd(log_prob, ref),
    ]
    sum(loss.sum() for loss in losses).backward()
    assert log_prob.grad is not None
    assert [tensor.grad for tensor in fixed] == [None] * 3
    detached = [
        F.sampler_correction(log_prob, old, mask).weight,
        F.sampler_correction(log_prob, old, mask, level="sequence").weight,
        F.entropy_threshold(log_prob, mask, top_fraction=0.5),
        F.off_policy_gap(log_prob, old, mask),
        F.gmpo(ratio, advantage, mask).ratio,
        F.binary_divergence(log_prob, old, mask, divergence="symmetric_kl"),
        F.divergence_masked(log_prob, old, advantage, mask).ratio,
        F.distillation_advantage(log_prob, ref, mask),
    ]
    assert not any(tensor.requires_grad for tensor in detached)


def test_defaults_are_those_of_the_papers():
    big = torch.full((1, 1), 3.0)
    assert F.cispo(big, -ON.float(), ON.float(), ON).loss.item() == pytest.approx(5.0)
    assert F.sampler_correction(big, ONE, ON).weight.item() == 2.0
    assert F.sampler_correction(-big, ONE, ON).weight.item() == pytest.approx(math.exp(-3))
    sigmoid = 1 / (1 + math.exp(-0.1))
    assert F.minor_sft(ON.float()[0], ONE[0]).item() == pytest.approx(-math.log(sigmoid))
    p, q = torch.tensor([[0.3, 0.7]]).log(), torch.tensor([[0.6, 0.4]]).log()
    torch.testing.assert_close(F.generalized_jsd(p, q), F.generalized_jsd(q, p))
    assert F.kl_estimate(ONE, big, ON).item() == pytest.approx(math.exp(3) - 4)


def test_settings_at_the_edge_of_their_range_are_accepted():
    F.clipped_surrogate(ONE, ONE, ON, clip_low=1.0, clip_high=0.0, ratio_cap=1.01)
    F.clipped_surrogate(ONE, ONE, ON, clip_low=0.0, clip_high=0.2, ratio_cap=1.25)
    F.cispo(ONE, ONE, ONE, ON, max_ratio=1.0)
    F.vespo(ONE, ONE, ONE, ON, positive=(0.0, 0.0))
    F.gmpo(ONE, ONE, ON, clip_low=0.0, clip_high=0.0)
    F.sapo(ONE, ONE, ON, temperature_positive=0.5, temperature_negative=0.5)
    F.minor_sft(ONE[0], ONE[0], beta=0.5)
    F.trust_region_mask(ONE, ONE, ON, threshold=0.5)
    F.overlong_penalty(IDS, max_tokens=1, buffer_tokens=1)
    F.token_log_probs(ONE, IDS, temperature=0.5, chunk_tokens=1)
    F.sampler_correction(ONE, ONE, ON, upper=1.0, lower=1.0, max_k3=0.5)
    F.divergence_masked(ONE, ONE, ONE, ON, threshold=0.5)
    assert F.aggregate(ONE, ON, aggregation="fixed_length", max_tokens=1).item() == 0


ONE = torch.zeros(1, 1)
ON = torch.ones(1, 1, dtype=torch.bool)
IDS = torch.zeros(1, dtype=torch.int64)
BAD_CALLS = {
    "clip_low below 0": lambda: F.clipped_surrogate(ONE, ONE, ON, clip_low=-0.1),
    "clip_low above 1": lambda: F.clipped_surrogate(ONE, ONE, ON, clip_low=1.1),
    "clip_high below 0": lambda: F.clipped_surrogate(ONE, ONE, ON, clip_high=-0.1),
    "ratio_cap within the clip": lambda: F.clipped_surrogate(ONE, ONE, ON, ratio_cap=1.2),
    "max_ratio that looks like an epsilon": lambda: F.cispo(ONE, ONE, ONE, ON, max_ratio=0.2),
    "temperature 0": lambda: F.sapo(ONE, ONE, ON, temperature_negative=0.0),
    "temperature_positive 0": lambda: F.sapo(ONE, ONE, ON, temperature_positive=0.0),
    "lambda below 0": lambda: F.vespo(ONE, ONE, ONE, ON, positive=(2.0, -1.0)),
    "log clip below 0": lambda: F.gmpo(ONE, ONE, ON, clip_low=-0.1),
    "unknown level": lambda: F.leveled_log_ratio(ONE, ON, level="tokens"),
    "unknown estimator": lambda: F.kl_estimate(ONE, ONE, ON, estimator="k4"),
    "unknown aggregation": lambda: F.aggregate(ONE, ON, aggregation="mean"),
    "max_tokens missing": lambda: F.aggregate(ONE, ON, aggregation="fixed_length"),
    "max_tokens 0": lambda: F.aggregate(ONE, ON, aggregation="fixed_length", max_tokens=0),
    "unknown scale": lambda: F.group_advantage(ONE[0], IDS, scale="std"),
    "k 0": lambda: F.pass_at_k_advantage(ON[0], IDS, k=0),
    "rho 0": lambda: F.high_entropy_mask(ONE, ON, top_fraction=0.0),
    "rho above 1": lambda: F.high_entropy_mask(ONE, ON, top_fraction=1.1),
    "threshold 0": lambda: F.trust_region_mask(ONE, ONE, ON, threshold=0.0),
    "buffer longer than the limit": lambda: F.overlong_penalty(IDS, max_tokens=4, buffer_tokens=5),
    "buffer 0": lambda: F.overlong_penalty(IDS, max_tokens=4, buffer_tokens=0),
    "unknown correction": lambda: F.sampler_correction(ONE, ONE, ON, level="geometric"),
    "unknown correction mode": lambda: F.sampler_correction(ONE, ONE, ON, mode="clip"),
    "upper below 1": lambda: F.sampler_correction(ONE, ONE, ON, upper=0.5),
    "lower above 1": lambda: F.sampler_correction(ONE, ONE, ON, lower=1.5),
    "k3 without a bound": lambda: F.sampler_correction(ONE, ONE, ON, level="k3"),
    "k3 of 0": lambda: F.sampler_correction(ONE, ONE, ON, max_k3=0.0),
    "unknown divergence": lambda: F.divergence_masked(ONE, ONE, ONE, ON, divergence="js"),
    "divergence of 0": lambda: F.divergence_masked(ONE, ONE, ONE, ON, threshold=0.0),
    "beta 0": lambda: F.minor_sft(ONE[0], ONE[0], beta=0.0),
    "unknown direction": lambda: F.sampled_distillation(ONE, ONE, ON, direction="back"),
    "jsd weight above 1": lambda: F.generalized_jsd(ONE, ONE, weight=1.5),
    "softmax temperature 0": lambda: F.token_log_probs(ONE, IDS, temperature=0.0),
    "chunk of 0": lambda: F.token_log_probs(ONE, IDS, chunk_tokens=0),
    "packed values without lengths": lambda: F.sequence_sum(ONE[0], ON[0]),
    "padded values with lengths": lambda: F.sequence_sum(ONE, ON, IDS + 1),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_settings_raise(name, plain, monkeypatch):
    # Without the type checks of the tests: the functions' own checks are meant.
    monkeypatch.setitem(BAD_CALLS[name].__globals__, "F", plain)
    with pytest.raises(ValueError, match=r"\d|one of|lengths|max_tokens"):
        BAD_CALLS[name]()

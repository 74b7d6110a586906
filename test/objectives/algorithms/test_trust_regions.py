"""The losses with a trust region, the sampler's weights, and distillation, of whole batches."""

import math

import pytest
import torch
from tensordict import lazy_stack

from objectives import (
    DPPO,
    IPO,
    DivergenceSurrogate,
    GRPOLoss,
    KPop,
    PolicyDistillation,
    SamplerCorrection,
    Window,
)

PRESETS = {
    "dppo-tv": (DPPO, {}, {"kind": "tv", "threshold": 0.15, "one_sided": True}),
    "dppo-kl": (
        DPPO,
        {"surrogate": DivergenceSurrogate(divergence="kl")},
        {"kind": "kl", "threshold": 0.05, "one_sided": True},
    ),
    "ipo": (IPO, {}, {"kind": "tv", "threshold": 0.2, "one_sided": False}),
    "kpop": (KPop, {}, {"kind": "symmetric_kl", "threshold": 0.1, "one_sided": False}),
}


def columns(batch, scorer, key):
    """By row: log-probs of now, those stored at a key, advantages; as lists of floats."""
    now, stored, advantages = [], [], []
    for row in batch.unbind(0):
        mask, ids = row["masks", "all_assistant_mask"], row["tokens", "full"]
        scores = scorer.score_packed(ids, torch.tensor([len(ids)]), mask)
        now.append(scores.log_prob.tolist())
        stored.append(row[key][mask].tolist())
        advantages.append([float(row["advantage"])] * int(mask.sum()))
    return now, stored, advantages


@pytest.mark.parametrize("name", PRESETS)
def test_the_trust_regions_equal_the_slow_reference(slow, make_scorer, make_batch, name):
    preset, options, settings = PRESETS[name]
    batch, scorer = make_batch(), make_scorer()
    now, old, advantages = columns(batch, scorer, ("log_probs", "full"))
    rows = slow.divergence_masked(now, now, old, advantages, **settings)
    output = preset(scorer, **options)(batch)
    assert output.loss_objective.item() == pytest.approx(slow.token_mean(rows))
    masked = [
        r == 0 != a
        for rs, as_ in zip(rows, advantages, strict=True)
        for r, a in zip(rs, as_, strict=True)
    ]
    assert 0 < output.clip_fraction.item() < 1
    if settings["one_sided"]:
        assert output.clip_fraction.item() == pytest.approx(sum(masked) / len(masked))
    if name == "ipo":
        gaps = [(a - b) ** 2 for p in zip(now, old, strict=True) for a, b in zip(*p, strict=True)]
        # tau log^2 r with tau = 1e-3, over all trained tokens, masked ones too.
        want = 1e-3 * sum(gaps) / len(gaps)
        assert output.loss_kl_to_inference.item() == pytest.approx(want)
    else:
        assert output.total().item() == output.loss_objective.item()


def test_the_region_lies_around_the_sampler_though_it_gave_hardly_a_chance(make_scorer, make_row):
    """A token that the sampler gave e^-60 and the trainer gives 0.5 has moved by 0.5."""
    row = make_row(0, turns=((1, 0),), advantage=1.0)
    row["log_probs", "full"] = row["log_probs", "full"].nan_to_num() * 0 - 60.0
    loss = DPPO(make_scorer(), surrogate=DivergenceSurrogate(threshold=1e-3))
    output = loss(lazy_stack([row]))
    assert output.clip_fraction_high.item() == 1
    assert output.total().item() == 0


def distilled(scorer, batch, *, advantage_coeff=0.0):
    """``-sg(min(r, 5)) sg(A) log pi``, row by row."""
    terms = []
    for row in batch.unbind(0):
        mask, ids = row["masks", "all_assistant_mask"], row["tokens", "full"]
        log_prob = scorer.score_packed(ids, torch.tensor([len(ids)]), mask).log_prob
        with torch.no_grad():
            teacher = row["next", "teacher_log_probs", "full"][mask] - log_prob
            credit = teacher + advantage_coeff * float(row["advantage"])
            weight = (log_prob - row["log_probs", "full"][mask]).exp().clamp(max=5.0)
        terms.append(-weight * credit * log_prob)
    return torch.cat(terms).mean()


@pytest.mark.parametrize("advantage_coeff", [0.0, 0.7])
def test_distillation_by_policy_gradient(make_scorer, make_batch, advantage_coeff):
    batch, scorers = make_batch(), (make_scorer(), make_scorer())
    want = distilled(scorers[0], batch, advantage_coeff=advantage_coeff)
    want.backward()
    loss = PolicyDistillation(scorers[1], advantage_coeff=advantage_coeff)
    assert ("advantage" in loss.in_keys) == bool(advantage_coeff)
    given = (
        batch if advantage_coeff else lazy_stack([r.exclude("advantage") for r in batch.unbind(0)])
    )
    output = loss(given)
    output.total().backward()
    torch.testing.assert_close(output.total().detach(), want.detach())
    torch.testing.assert_close(scorers[1].table.grad, scorers[0].table.grad)
    assert output.signal_fraction.item() == 1
    assert loss.has_signal(loss.pack(given))


@pytest.mark.parametrize("old_policy", ["recomputed", "current"])
def test_weights_of_the_sampler_have_a_mean_of_1_over_the_window(
    make_scorer, make_batch, old_policy
):
    batch, correction = make_batch(), SamplerCorrection(upper=1.5, normalize=True)
    options = {"old_policy": old_policy, "surrogate": of_the_weights}
    plain = SamplerCorrection(upper=1.5)
    raw = GRPOLoss(make_scorer(), sampler_correction=plain, aggregation="none", **options)(batch)
    mean = raw.loss_objective.mean().item()
    assert 0 < mean < 1
    loss = GRPOLoss(make_scorer(), sampler_correction=correction, **options)
    assert loss(batch).loss_objective.item() == pytest.approx(1)
    packed = loss.pack(batch)
    window = loss.measure_window(packed.micro_batches(num_rows=2))
    assert window.sampler_weight_mean == pytest.approx(mean)
    parts = [loss(part, window=window).loss_objective for part in packed.micro_batches(num_rows=1)]
    assert sum(parts).item() == pytest.approx(1)
    with pytest.raises(ValueError, match=r"sampler_weight_mean.*measure_window"):
        loss(batch, window=Window(15, 6))


def of_the_weights(log_prob):
    """A surrogate whose loss is 1 on every token, so that the weights are what is left."""
    import objectives.functional as F

    none = torch.zeros_like(log_prob, dtype=torch.bool)
    return F.Surrogate(torch.ones_like(log_prob), torch.ones_like(log_prob), none, none)


def test_windows_add_up_with_the_mean_of_their_weights():
    windows = [Window(2, 1, sampler_weight_mean=0.5), Window(6, 2, sampler_weight_mean=0.9)]
    assert Window.of(windows) == Window(8, 3, None, pytest.approx((2 * 0.5 + 6 * 0.9) / 8))
    assert Window.of([windows[0], Window(1, 1)]).sampler_weight_mean is None


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"teacher_coeff": 0.0}, "teacher_coeff"),
        ({"advantage_coeff": 0.0}, "leaves no advantage"),
        ({"advantage_coeff": math.nan}, "advantage_coeff"),
        ({"surrogate": "divergence", "ratio_level": "sequence"}, "ratio of its own"),
        ({"surrogate": "divergence", "clip_epsilon": 0.2}, "no effect"),
        ({"teacher_coeff": 1.0, "skip_rows_without_signal": True}, "teacher"),
    ],
)
def test_options_that_can_take_no_effect_raise(make_scorer, options, hint):
    with pytest.raises(ValueError, match=hint):
        GRPOLoss(make_scorer(), **options)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"level": "k3"}, "needs max_k3"),
        ({"level": "k3", "max_k3": 0.01, "upper": 3.0}, "no weights to bound"),
        ({"level": "k3", "max_k3": 0.01, "mode": "mask"}, "no weights to bound"),
        ({"max_k3": 0.0}, "max_k3"),
    ],
)
def test_a_correction_checks_itself(options, hint):
    with pytest.raises(ValueError, match=hint):
        SamplerCorrection(**options)

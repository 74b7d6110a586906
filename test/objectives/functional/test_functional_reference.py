"""Every function of ``objectives.functional`` against the slow reference: value and gradient.

Each case is laid out padded and packed, with NaN and infinities wherever the mask is False.
"""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import objectives.functional as F

fast = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.differing_executors],
)
number = st.floats(-4.0, 0.0).map(lambda x: round(x, 3))
advantage_value = st.sampled_from([-2.5, -1.0, -0.3, 0.0, 0.4, 1.0, 3.0])


class Batch(NamedTuple):
    """Rows of trained tokens, and where they lie among the untrained."""

    lp: list
    old: list
    other: list
    adv: list
    layout: list
    """Per row, bools: is this position trained?"""


@st.composite
def batches(draw, *, dense_advantage=True):
    rows = draw(st.integers(1, 4))
    layout = [draw(st.lists(st.booleans(), max_size=6)) for _ in range(rows)]

    def values(strategy, row):
        return [draw(strategy) for active in row if active]

    lp, old, other = ([values(number, row) for row in layout] for _ in range(3))
    if dense_advantage:
        adv = [values(advantage_value, row) for row in layout]
    else:
        adv = [[draw(advantage_value)] * sum(row) for row in layout]
    return Batch(lp, old, other, adv, layout)


class Layout:
    """Turns rows into tensors and back, in one of the two layouts."""

    def __init__(self, layout, kind):
        self.layout, self.kind = layout, kind
        self.lengths = torch.tensor([len(row) for row in layout]) if kind == "packed" else None
        self.mask = self._build([list(row) for row in layout], False, torch.bool)

    def _build(self, rows, fill, dtype):
        if self.kind == "packed":
            return torch.tensor([x for row in rows for x in row], dtype=dtype)
        width = max(map(len, rows)) + 1
        return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=dtype)

    def tensor(self, rows, poison=math.nan):
        """Trained values in place, poison everywhere else."""
        full = []
        for row, layout in zip(rows, self.layout, strict=True):
            values = iter(row)
            full.append([next(values) if active else poison for active in layout])
        return self._build(full, poison, torch.float64)

    def flat(self, tensor):
        return tensor[self.mask]


KINDS = ("padded", "packed")
POISON = (math.nan, math.inf, -math.inf)


def bumped(rows, i, j, h):
    copy = [list(row) for row in rows]
    copy[i][j] += h
    return copy


def finite_difference(function, rows, h=1e-6):
    """Gradient of a number in every token of the rows, flat."""
    return [
        (function(bumped(rows, i, j, h)) - function(bumped(rows, i, j, -h))) / (2 * h)
        for i, row in enumerate(rows)
        for j in range(len(row))
    ]


def check_value_and_gradient(batch, torch_loss, slow_loss):
    """``torch_loss(log_prob, layout)`` and ``slow_loss(lp)`` agree, in both layouts.

    Finite differences of float64 are good to about 1e-9 here, hence the tolerance of 1e-6.
    """
    expected = slow_loss(batch.lp)
    gradient = finite_difference(slow_loss, batch.lp)
    for kind in KINDS:
        layout = Layout(batch.layout, kind)
        log_prob = layout.tensor(batch.lp, POISON[len(batch.lp) % 3]).requires_grad_()
        loss = torch_loss(log_prob, layout)
        assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-9)
        (grad,) = torch.autograd.grad(loss, log_prob)
        want = torch.tensor(gradient, dtype=torch.float64)
        torch.testing.assert_close(layout.flat(grad), want, rtol=1e-6, atol=1e-6)
        assert grad[~layout.mask].eq(0).all(), "a token outside the mask has a gradient"


def away_from(batch, *bounds):
    """No token ratio, and no sequence ratio, lies on a kink."""
    values = []
    for row, old in zip(batch.lp, batch.old, strict=True):
        logs = [a - b for a, b in zip(row, old, strict=True)]
        values += logs + ([sum(logs) / len(logs)] if logs else [])
    assume(all(abs(x - bound) > 1e-4 for x in values for bound in bounds))


DIVERGENCES = {
    "dppo-tv": {"divergence": "tv"},
    "dppo-kl": {"divergence": "kl", "one_sided": True},
    "ipo": {"divergence": "tv", "one_sided": False, "threshold": 0.2},
    "kpop": {"divergence": "symmetric_kl", "one_sided": False},
}
POLICY = {
    "clipped": (
        lambda lr, _, a, x: F.clipped_surrogate(lr, a, x.mask, clip_high=0.28),
        lambda slow, *args: slow.clipped(*args, high=0.28),
    ),
    "dual clip": (
        lambda lr, _, a, x: F.clipped_surrogate(lr, a, x.mask, ratio_cap=3.0),
        lambda slow, *args: slow.clipped(*args, cap=3.0),
    ),
    "gspo": (
        lambda lr, _, a, x: F.clipped_surrogate(
            F.leveled_log_ratio(lr, x.mask, x.lengths, level="sequence"), a, x.mask
        ),
        lambda slow, *args: slow.gspo(*args),
    ),
    "gspo-token": (
        lambda lr, _, a, x: F.clipped_surrogate(
            F.leveled_log_ratio(lr, x.mask, x.lengths, level="sequence_token"), a, x.mask
        ),
        lambda slow, *args: slow.gspo_token(*args),
    ),
    "cispo": (
        lambda lr, lp, a, x: F.cispo(lr, lp, a, x.mask, max_ratio=2.0),
        lambda slow, *args: slow.cispo(*args, bound=2.0),
    ),
    "sapo": (
        lambda lr, _, a, x: F.sapo(lr, a, x.mask),
        lambda slow, *args: slow.sapo(*args),
    ),
    "vespo": (
        lambda lr, lp, a, x: F.vespo(lr, lp, a, x.mask, x.lengths),
        lambda slow, *args: slow.vespo(*args),
    ),
    **{
        name: (
            lambda lr, lp, a, x, s=settings: F.divergence_masked(
                lp, lp.detach() - lr.detach(), a, x.mask, **s
            ),
            lambda slow, *args, s=settings: slow.divergence_masked(
                *args,
                kind=s["divergence"],
                threshold=s.get("threshold", {"tv": 0.15, "kl": 0.05}.get(s["divergence"], 0.1)),
                one_sided=s.get("one_sided", True),
            ),
        )
        for name, settings in DIVERGENCES.items()
    },
    "gmpo": (
        lambda lr, _, a, x: F.gmpo(lr, a, x.mask, x.lengths),
        lambda slow, *args: slow.gmpo(*args),
    ),
}


@pytest.mark.parametrize(
    ("token_log_ratio", "k", "lam", "expected"),
    [
        pytest.param(-10.0, 0.1, 1.0, math.exp(1.0 + 0.1 * math.log(1e-8) - 1e-8), id="low"),
        pytest.param(15.0, 1.0, 0.0, math.exp(20.0), id="high"),
    ],
)
def test_vespo_bounds_the_weight_of_a_sequence(token_log_ratio, k, lam, expected):
    """Four tokens: exp(-40) and exp(60) without bounds."""
    log_ratio = torch.full((1, 4), token_log_ratio, dtype=torch.float64)
    mask, one = torch.ones(1, 4, dtype=torch.bool), torch.ones_like(log_ratio)
    result = F.vespo(log_ratio, -one, one, mask, positive=(k, lam))
    torch.testing.assert_close(result.ratio, expected * one)


@pytest.mark.parametrize("name", POLICY)
@fast
@given(batch=batches())
def test_policy_term(name, slow, batch):
    away_from(batch, *(math.log(x) for x in (0.8, 1.2, 1.28, 2.0, 3.0)), 0.4, -0.4)
    if name in DIVERGENCES:
        kind = DIVERGENCES[name]["divergence"]
        pairs = [
            p for rows in zip(batch.lp, batch.old, strict=True) for p in zip(*rows, strict=True)
        ]
        moves = [slow.binary_divergence(math.exp(x), math.exp(y), kind) for x, y in pairs]
        assume(all(abs(d - t) > 1e-4 for d in moves for t in (0.05, 0.1, 0.15, 0.2)))
    ours, theirs = POLICY[name]

    def torch_loss(log_prob, layout):
        old, adv = layout.tensor(batch.old, math.inf), layout.tensor(batch.adv)
        log_ratio = F.log_ratio(log_prob, old, layout.mask)
        result = ours(log_ratio, log_prob, adv, layout)
        assert result.loss[~layout.mask].eq(0).all()
        assert result.ratio[~layout.mask].eq(1).all()
        assert not result.ratio.requires_grad
        return F.token_mean(result.loss, layout.mask)

    def slow_loss(lp):
        return slow.token_mean(theirs(slow, lp, batch.lp, batch.old, batch.adv))

    check_value_and_gradient(batch, torch_loss, slow_loss)


AGGREGATIONS = {
    "token_mean": lambda slow, rows, counts: slow.token_mean(rows, counts and counts[0]),
    "sequence_mean": lambda slow, rows, counts: slow.sequence_mean(rows, counts and counts[1]),
    "sequence_sum": lambda slow, rows, counts: slow.sequence_sum(rows, counts and counts[1]),
    "fixed_length": lambda slow, rows, counts: slow.fixed_length(rows, 8, counts and counts[1]),
}


@pytest.mark.parametrize("counts", [None, (37, 11)], ids=["own counts", "counts of a window"])
@pytest.mark.parametrize("name", AGGREGATIONS)
@fast
@given(batch=batches())
def test_aggregation(name, counts, slow, batch):
    def torch_loss(values, layout):
        return F.aggregate(
            values,
            layout.mask,
            layout.lengths,
            aggregation=name,
            max_tokens=8 if name == "fixed_length" else None,
            num_active_tokens=counts and counts[0],
            num_sequences=counts and counts[1],
        )

    check_value_and_gradient(batch, torch_loss, lambda rows: AGGREGATIONS[name](slow, rows, counts))


@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "times the ratio"])
@pytest.mark.parametrize("estimator", F.KL_ESTIMATORS)
@fast
@given(batch=batches())
def test_kl(estimator, corrected, slow, batch):
    def torch_loss(log_prob, layout):
        old, ref = layout.tensor(batch.old), layout.tensor(batch.other, math.inf)
        log_ratio = F.log_ratio(log_prob, old, layout.mask) if corrected else None
        kl = F.kl_estimate(log_prob, ref, layout.mask, estimator=estimator, log_ratio=log_ratio)
        return F.mean_of_sequence_sums(kl, layout.mask, layout.lengths)

    def slow_loss(lp):
        rows = slow.kl(lp, batch.other, estimator)
        if corrected:
            rows = [
                [k * r for k, r in zip(*pair, strict=True)]
                for pair in zip(rows, slow.ratios(lp, batch.old), strict=True)
            ]
        return slow.sequence_sum(rows)

    check_value_and_gradient(batch, torch_loss, slow_loss)


@fast
@given(batch=batches(), direction=st.sampled_from(F.KL_DIRECTIONS))
def test_sampled_distillation(slow, batch, direction):
    def slow_loss(lp):
        pair = (lp, batch.other) if direction == "reverse" else (batch.other, lp)
        return slow.token_mean(slow.kl(*pair, "k3"))

    def torch_loss(log_prob, layout):
        teacher = layout.tensor(batch.other, math.inf)
        kl = F.sampled_distillation(log_prob, teacher, layout.mask, direction=direction)
        return F.token_mean(kl, layout.mask)

    check_value_and_gradient(batch, torch_loss, slow_loss)


@fast
@given(batch=batches(), beta=st.sampled_from([0.1, 1.0]))
def test_supervised(slow, batch, beta):
    def slow_loss(lp):
        rows = [beta * (sum(a) - sum(b)) for a, b in zip(lp, batch.other, strict=True)]
        minor = sum(math.log1p(math.exp(-x)) for x in rows)
        return minor - slow.token_mean(lp)

    def torch_loss(log_prob, layout):
        sums = F.sequence_sum(log_prob, layout.mask, layout.lengths)
        ref = F.sequence_sum(layout.tensor(batch.other), layout.mask, layout.lengths)
        nll = F.token_mean(F.negative_log_likelihood(log_prob, layout.mask), layout.mask)
        return F.minor_sft(sums, ref, beta=beta).sum() + nll

    check_value_and_gradient(batch, torch_loss, slow_loss)


@pytest.mark.parametrize("mode", F.CORRECTION_MODES)
@pytest.mark.parametrize("level", F.CORRECTION_LEVELS)
@fast
@given(batch=batches(), max_k3=st.sampled_from([0.05, 0.5, None]))
def test_sampler_correction(level, mode, slow, batch, max_k3):
    max_k3 = 0.1 if level == "k3" and max_k3 is None else max_k3
    bound = math.inf if max_k3 is None else max_k3
    want = slow.correction(batch.old, batch.other, level, mode, 2.0, 0.5, bound)
    flat = torch.tensor([w for row in want for w in row], dtype=torch.float64)
    for kind in KINDS:
        layout = Layout(batch.layout, kind)
        train, sampler = layout.tensor(batch.old), layout.tensor(batch.other, math.inf)
        result = F.sampler_correction(
            train,
            sampler,
            layout.mask,
            layout.lengths,
            level=level,
            mode=mode,
            upper=2.0,
            lower=0.5,
            max_k3=max_k3,
        )
        torch.testing.assert_close(layout.flat(result.weight), flat)
        outside = result.weight[~layout.mask]
        assert outside.eq(1).all()
        changed = flat.eq(0) if mode == "mask" else flat.eq(2.0) | flat.eq(0.5) | flat.eq(0)
        assert layout.flat(result.changed).equal(changed)
        gap = [
            abs(a - b)
            for p in zip(batch.old, batch.other, strict=True)
            for a, b in zip(*p, strict=True)
        ]
        assert F.off_policy_gap(train, sampler, layout.mask).item() == pytest.approx(slow.mean(gap))


@fast
@given(
    batch=batches(),
    threshold=st.sampled_from([0.0, 0.3, 1.0]),
    rho=st.sampled_from([0.2, 0.5, 1.0]),
)
def test_filters(slow, batch, threshold, rho):
    keep = slow.off_policy_keep(batch.lp, batch.other, batch.adv, threshold)
    flat = torch.tensor([k for row in keep for k in row], dtype=torch.bool)
    entropy = [-x for row in batch.lp for x in row]
    bound = slow.quantile(entropy, 1 - rho) if entropy else 0.0
    near = [
        (a - b) ** 2 / 2 <= threshold + 0.1
        for pair in zip(batch.lp, batch.old, strict=True)
        for a, b in zip(*pair, strict=True)
    ]
    for kind in KINDS:
        layout = Layout(batch.layout, kind)
        lp, adv = layout.tensor(batch.lp), layout.tensor(batch.adv)
        mask = F.off_policy_sequence_mask(
            lp, layout.tensor(batch.other), adv, layout.mask, layout.lengths, threshold=threshold
        )
        assert layout.flat(mask).equal(flat)
        high = F.high_entropy_mask(-lp, layout.mask, top_fraction=rho)
        want = torch.tensor([x >= bound - 1e-12 for x in entropy], dtype=torch.bool)
        assert layout.flat(high).equal(want)
        close = F.trust_region_mask(
            lp, layout.tensor(batch.old), layout.mask, threshold=threshold + 0.1
        )
        assert layout.flat(close).equal(torch.tensor(near, dtype=torch.bool))
        cut = torch.tensor([i % 2 == 0 for i in range(len(batch.lp))])
        whole = F.overlong_mask(cut, layout.mask, layout.lengths)
        want = [i % 2 == 1 for i, row in enumerate(batch.lp) for _ in row]
        assert layout.flat(whole).equal(torch.tensor(want, dtype=torch.bool))
        for result in (mask, high, close, whole):
            assert not result[~layout.mask].any()


@fast
@given(batch=batches())
def test_diagnostics(slow, batch):
    for kind in KINDS:
        layout = Layout(batch.layout, kind)
        log_ratio = F.log_ratio(layout.tensor(batch.lp), layout.tensor(batch.old), layout.mask)
        ess = F.effective_sample_fraction(log_ratio, layout.mask)
        assert ess.item() == pytest.approx(slow.effective_fraction(batch.lp, batch.old))
        flags = layout.tensor(batch.adv) > 0
        want = slow.token_mean([[float(a > 0) for a in row] for row in batch.adv])
        assert F.flag_fraction(flags, layout.mask).item() == pytest.approx(want)


logit = st.floats(-5.0, 5.0).map(lambda x: round(x, 3))


@fast
@given(data=st.data(), temperature=st.sampled_from([0.5, 1.0, 1.7]))
def test_log_probs_kl_and_jsd_over_a_vocabulary(slow, data, temperature):
    """Value and gradient of what is computed from logits; every row has its own weight in the sum.

    Finite differences are good to about 1e-9 here, hence the tolerance of 1e-6.
    """
    vocab = data.draw(st.integers(2, 5))
    tables = st.lists(st.lists(logit, min_size=vocab, max_size=vocab), min_size=2, max_size=2)
    rows, other = data.draw(tables), data.draw(tables)
    ids = data.draw(st.lists(st.integers(0, vocab - 1), min_size=2, max_size=2))
    weight = data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    target = torch.tensor(other, dtype=torch.float64)

    def scores(x):
        return F.token_log_probs(x, torch.tensor(ids), temperature=temperature, chunk_tokens=1)

    def picked(row, i):
        return slow.log_softmax(row, temperature)[ids[i]]

    cases = {
        "log_prob": (lambda x: scores(x).log_prob, picked),
        "entropy": (lambda x: scores(x).entropy, lambda row, _: slow.entropy(row, temperature)),
        "kl from": (
            lambda x: F.kl_between(x, target),
            lambda row, i: slow.kl_of_logits(row, other[i]),
        ),
        "kl to": (
            lambda x: F.kl_between(target, x),
            lambda row, i: slow.kl_of_logits(other[i], row),
        ),
        "jsd": (
            lambda x: F.generalized_jsd(x, target, weight=weight),
            lambda row, i: slow.jsd_of_logits(row, other[i], weight),
        ),
    }
    for name, (ours, theirs) in cases.items():

        def total(table, theirs=theirs):
            return sum((i + 1) * theirs(row, i) for i, row in enumerate(table))

        logits = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
        values = ours(logits)
        for i, row in enumerate(rows):
            assert values[i].item() == pytest.approx(theirs(row, i), rel=1e-6, abs=1e-9), name
        (grad,) = torch.autograd.grad(values @ torch.tensor([1.0, 2.0]).double(), logits)
        want = torch.tensor(finite_difference(total, rows), dtype=torch.float64)
        torch.testing.assert_close(grad.flatten(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_float32(dtype):
    """exp(20), the largest ratio there is, has no place in float16."""
    log_prob = torch.tensor([[-1.0, -31.0]], dtype=dtype, requires_grad=True)
    other = torch.tensor([[-31.0, -1.0]], dtype=dtype)
    mask = torch.tensor([[True, True]])
    ratio = F.log_ratio(log_prob, other, mask)
    terms = {
        "clipped": F.clipped_surrogate(ratio, -torch.ones(1, 2), mask).loss,
        "k3": F.kl_estimate(log_prob, other, mask),
        "forward": F.sampled_distillation(log_prob, other, mask, direction="forward"),
    }
    big = math.exp(20)
    want = {"clipped": [big, 0.8], "k3": [29.0, big - 31], "forward": [big - 31, 29.0]}
    for name, term in terms.items():
        assert term.dtype == torch.float32
        assert term[0].tolist() == pytest.approx(want[name]), name
    sum(term.sum() for term in terms.values()).backward()
    assert log_prob.grad.isfinite().all()


@pytest.mark.parametrize("lengths", [[2, 3], [1, 2]], ids=["too many", "too few"])
def test_lengths_that_do_not_sum_to_the_tokens_raise(lengths):
    values, mask = torch.ones(4), torch.ones(4, dtype=torch.bool)
    lengths = torch.tensor(lengths)
    for function in (F.sequence_mean, F.mean_of_sequence_sums, F.turn_index):
        arguments = (mask,) if function is F.turn_index else (values, mask)
        with pytest.raises(ValueError, match="must sum to the 4 tokens"):
            function(*arguments, lengths)
    with pytest.raises(ValueError, match="must sum to the 4 tokens"):
        F.fixed_length_mean(values, mask, lengths, max_tokens=4)

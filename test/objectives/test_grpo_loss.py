"""``GRPOLoss``: equals its functions, and nothing else about a batch matters."""

import math

import pytest
import torch
from tensordict import lazy_stack

import objectives
import objectives.functional as F
from objectives import (
    GRPOLoss,
    GRPOLossKeys,
    GRPOLossOutput,
    SamplerCorrection,
    TokenFilters,
    Window,
)
from torchrl_data.missing_entry import MissingEntryError

EVERYTHING = {
    "kl_to_ref_coeff": 0.1,
    "kl_bias_correction": True,
    "kl_to_inference_coeff": 0.05,
    "entropy_bonus": True,
    "entropy_coeff": 0.02,
    "old_policy": "recomputed",
    "sampler_correction": SamplerCorrection(level="sequence", upper=1.5),
    "filters": TokenFilters(trust_region=2.0, off_policy_threshold=0.3, drop_truncated=True),
}
OPTIONS = {
    "defaults": {},
    "everything": EVERYTHING,
    "grpo": {"aggregation": "sequence_mean", "ratio_level": "sequence"},
    "dr_grpo": {"aggregation": "fixed_length", "max_tokens": 8},
    "luspo": {"aggregation": "sequence_sum"},
    "cispo": {"surrogate": "cispo"},
    "sapo": {"surrogate": "sapo"},
    "vespo": {
        "surrogate": "vespo",
        "old_policy": "recomputed",
        "sampler_correction": SamplerCorrection(),
    },
    "gmpo": {"surrogate": "gmpo", "masking_strategy": "response"},
    "all tokens": {"masking_strategy": "all", "old_policy": "current"},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


TOKEN_ENTRIES = (
    ("tokens", "full"),
    ("masks", "all_assistant_mask"),
    ("masks", "all_attention_mask"),
    ("log_probs", "full"),
    ("old_log_probs", "full"),
    ("next", "ref_log_probs", "full"),
)


def map_tokens(row, change):
    """A copy of a row in which every entry that is aligned with the tokens was changed."""
    row = row.select(*TOKEN_ENTRIES, "advantage", "truncated").clone()
    for key in TOKEN_ENTRIES:
        row[key] = change(row[key])
    return row


def to_padded(rows, *, side):
    """The dense form of rows; padding holds NaN, token 1 and True in the assistant mask."""
    width = max(len(row["tokens", "full"]) for row in rows) + 2

    def pad(value):
        fill = torch.nan if value.is_floating_point() else 1
        gap = value.new_full((width - len(value),), fill)
        return torch.cat([value, gap] if side == "right" else [gap, value])

    padded = []
    for row in rows:
        length = len(row["tokens", "full"])
        real = torch.arange(width) < length
        row = map_tokens(row, pad)
        row["masks", "all_attention_mask"] = real if side == "right" else real.flip(0)
        padded.append(row)
    return torch.stack(padded)


def run(make_scorer, batch, options, **kwargs):
    """Terms, metrics and gradient by name."""
    scorer = make_scorer()
    output = GRPOLoss(scorer, **options)(batch, **kwargs)
    output.total().backward()
    found = {key: value.detach() for key, value in output.items() if value is not None}
    return found | {"gradient": scorer.table.grad}


def check_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(
            got[name].double(), value.double(), msg=lambda m, n=name: f"{n}: {m}"
        )


def test_equals_its_functions(make_scorer, make_batch):
    batch, scorer = make_batch(), make_scorer()
    terms = []
    for row in batch.unbind(0):
        mask = row["masks", "all_assistant_mask"]
        ids = row["tokens", "full"]
        score = scorer.score_packed(ids, torch.tensor([len(ids)]), mask, temperature=0.7)
        ones = torch.ones_like(score.log_prob, dtype=torch.bool)
        ratio = F.log_ratio(score.log_prob, row["log_probs", "full"][mask], ones)
        adv = row["advantage"].view(-1).expand_as(ratio)
        terms.append(F.clipped_surrogate(ratio, adv, ones, clip_low=0.1, clip_high=0.3).loss)
    want = torch.cat(terms).mean()
    loss = GRPOLoss(scorer, clip_epsilon=(0.1, 0.3), temperature=0.7)
    before = [row.clone() for row in batch.unbind(0)]
    torch.testing.assert_close(loss(batch).loss_objective, want)
    for row, old in zip(batch.unbind(0), before, strict=True):
        assert set(row.keys(True, True)) == set(old.keys(True, True)), "the input is not written to"


@every_option
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_on_either_side_equals_ragged(make_scorer, make_batch, options, side):
    batch = make_batch()
    padded = to_padded(batch.unbind(0), side=side)
    check_same(run(make_scorer, padded, options), run(make_scorer, batch, options))


@every_option
def test_row_order_does_not_matter(make_scorer, make_batch, options):
    rows = make_batch().unbind(0)
    shuffled = lazy_stack([rows[i] for i in (3, 5, 0, 4, 2, 1)])
    check_same(run(make_scorer, shuffled, options), run(make_scorer, lazy_stack(rows), options))


@pytest.mark.parametrize(
    "options", [OPTIONS["defaults"], EVERYTHING], ids=["defaults", "everything"]
)
def test_prompt_length_does_not_matter(make_scorer, make_batch, options):
    rows = make_batch().unbind(0)

    def lengthen(value):
        # At the front, so that what the first sampled token depends on stays.
        return torch.cat([value[:1].expand(9), value])

    long = lazy_stack([map_tokens(row, lengthen) for row in rows])
    check_same(run(make_scorer, long, options), run(make_scorer, lazy_stack(rows), options))


@every_option
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 5), (4, 1, 1)], ids=str)
def test_micro_batches_add_up_to_the_window(make_scorer, make_batch, options, sizes):
    batch, scorer = make_batch(), make_scorer()
    loss = GRPOLoss(scorer, **options)
    window = loss.measure_window(batch)
    outputs = []
    for part in batch.split(list(sizes)):
        outputs.append(loss(part, window=window))
        outputs[-1].total().backward()
    whole = GRPOLossOutput.combine(outputs)
    got = {key: value for key, value in whole.items() if value is not None}
    check_same(got | {"gradient": scorer.table.grad}, run(make_scorer, batch, options))


@every_option
def test_what_lies_outside_the_mask_cannot_poison(make_scorer, make_batch, options):
    batch = make_batch()
    worse = batch.clone()
    for row in worse.unbind(0):
        outside = ~row["masks", "all_assistant_mask"]
        row["log_probs", "full"][outside] = -torch.inf
    got, want = (run(make_scorer, rows, options) for rows in (worse, batch))
    assert all(value.isfinite().all() for value in got.values())
    check_same(got, want)


@pytest.mark.parametrize(
    "options", [OPTIONS["defaults"], EVERYTHING], ids=["defaults", "everything"]
)
def test_a_batch_without_trained_tokens_has_loss_0_and_finite_figures(
    make_scorer, make_row, options
):
    scorer = make_scorer()
    rows = lazy_stack([make_row(i, turns=(), advantage=1.0) for i in range(2)])
    output = GRPOLoss(scorer, **options)(rows)
    output.total().backward()
    assert output.total().item() == 0
    assert all(value.isfinite().all() for value in output.values() if value is not None)
    assert scorer.table.grad is None
    assert scorer.scored_rows == []


def test_no_signal_gives_exactly_0(make_scorer, make_batch):
    got = run(make_scorer, make_batch(advantages=[0.0] * 6), {})
    assert got["loss_objective"].item() == 0
    assert got["gradient"].eq(0).all()


def test_on_policy_every_figure_is_at_rest(make_scorer, make_batch):
    batch, scorer = make_batch(), make_scorer()
    for row in batch.unbind(0):
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        score = scorer.score_packed(ids, torch.tensor([len(ids)]), mask)
        row["log_probs", "full"][mask] = score.log_prob.detach()
    output = GRPOLoss(scorer)(batch)
    for name, value in {"ESS": 1, "ratio_mean": 1, "kl_approx": 0, "clip_fraction": 0}.items():
        assert output.get(name).item() == pytest.approx(value, abs=1e-12)


def test_only_loss_entries_are_summed_and_only_they_have_a_gradient(make_scorer, make_batch):
    output = GRPOLoss(make_scorer(), **EVERYTHING)(make_batch())
    losses = {key: value for key, value in output.items() if key.startswith("loss_")}
    assert losses.keys() == {
        "loss_objective",
        "loss_entropy",
        "loss_kl_to_ref",
        "loss_kl_to_inference",
    }
    torch.testing.assert_close(output.total(), sum(losses.values()))
    for key, value in output.items():
        if value is not None and key not in losses:
            assert not value.requires_grad, key


def test_masking_strategies_choose_these_tokens(make_scorer, make_row):
    row = make_row(0, prompt=3, turns=((2, 2), (1, 1)), advantage=1.0)
    batch = lazy_stack([row])
    counts = {
        name: GRPOLoss(make_scorer(), masking_strategy=name).measure_window(batch)
        for name in ("assistant", "response", "all", "rlhf", "sft", "generic")
    }
    assert counts["assistant"] == counts["rlhf"] == Window(3, 1)
    assert counts["response"] == counts["sft"] == Window(6, 1)
    assert counts["all"] == counts["generic"] == Window(8, 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_advantages_per_token_lie_at_their_tokens(make_scorer, make_batch, side):
    """Each token has its own; padding holds others, so a shift of one would show."""
    rows = [row.clone() for row in make_batch().unbind(0)]
    for row in rows:
        row["advantage"] = torch.linspace(-1, 1, len(row["tokens", "full"])).double()[:, None]
    width = max(len(row["tokens", "full"]) for row in rows) + 2
    padded = to_padded(
        [row.exclude("advantage").set("advantage", torch.zeros(1, 1)) for row in rows], side=side
    )
    dense = torch.full((len(rows), width, 1), 7.0, dtype=torch.float64)
    for index, row in enumerate(rows):
        length = len(row["advantage"])
        dense[index, slice(0, length) if side == "right" else slice(width - length, None)] = row[
            "advantage"
        ]
    padded["advantage"] = dense
    for options in ({}, {"masking_strategy": "response", "old_policy": "current"}):
        check_same(run(make_scorer, padded, options), run(make_scorer, lazy_stack(rows), options))


def test_per_token_advantages(make_scorer, make_batch):
    rows = make_batch().unbind(0)
    for row in rows:
        length = len(row["tokens", "full"])
        row["advantage"] = row["advantage"].expand(length, 1).clone()
        row["advantage"][~row["masks", "all_assistant_mask"]] = torch.nan
    check_same(run(make_scorer, lazy_stack(rows), {}), run(make_scorer, make_batch(), {}))


def test_rows_without_signal_are_not_scored(make_scorer, make_batch):
    batch, scorer = make_batch(advantages=(1.0, 0.0, -1.0, 0.0, 0.0, 0.0)), make_scorer()
    skipping = GRPOLoss(scorer, skip_rows_without_signal=True)(batch)
    skipping.total().backward()
    want = run(make_scorer, batch, {})
    torch.testing.assert_close(skipping.loss_objective.detach(), want["loss_objective"])
    torch.testing.assert_close(scorer.table.grad, want["gradient"])
    assert scorer.scored_rows == [2]


def test_entropy_filter_takes_the_threshold_of_the_window(make_scorer, make_batch):
    batch, scorer = make_batch(), make_scorer()
    loss = GRPOLoss(scorer, filters=TokenFilters(top_entropy_fraction=0.5))
    entropies = []
    for row in batch.unbind(0):
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        entropies.append(scorer.score_packed(ids, torch.tensor([len(ids)]), mask, entropy=True)[1])
    ordered = torch.cat(entropies).detach().sort().values
    window = loss.measure_window(batch)
    # 24 tokens, so the upper half is the 12 of the highest entropy.
    assert window[:2] == (24, 6)
    assert window.entropy_threshold == pytest.approx(ordered[11:13].mean().item())
    assert (
        loss(batch).kept_fraction.item() == loss(batch, window=window).kept_fraction.item() == 0.5
    )
    with pytest.raises(ValueError, match="measure_window"):
        loss(batch, window=Window(24, 6))
    assert GRPOLoss(scorer).measure_window(batch).entropy_threshold is None
    everything = GRPOLoss(scorer, filters=TokenFilters(top_entropy_fraction=1.0))
    assert everything.measure_window(batch).entropy_threshold == -torch.inf


def test_windows_add_up():
    assert Window.of([Window(3, 1, 0.5), Window(4, 2, 0.5)]) == Window(7, 3, 0.5)
    assert Window.of([Window(3, 1, 0.5), Window(4, 2, 0.6)]) == Window(7, 3)


@pytest.mark.parametrize("window", [Window(0, 6), Window(24, 0), Window(float("nan"), 6)], ids=str)
def test_a_window_of_other_rows_is_refused(make_scorer, make_batch, window):
    with pytest.raises(ValueError, match=r"GRPOLoss: the window has num_.*measure_window"):
        GRPOLoss(make_scorer())(make_batch(), window=window)


def test_no_aggregation_gives_the_trained_tokens(make_scorer, make_batch):
    batch = make_batch()
    each = GRPOLoss(make_scorer(), aggregation="none")(batch)
    mean = GRPOLoss(make_scorer())(batch)
    torch.testing.assert_close(each.loss_objective.mean(), mean.loss_objective)
    assert each.loss_objective.shape == (int(mean.num_active_tokens),)


PRESETS = {
    "GRPO": {},
    "OriginalGRPO": {"aggregation": "sequence_mean"},
    "BNPO": {"aggregation": "token_mean"},
    "DAPO": {"aggregation": "token_mean", "clip_epsilon": (0.2, 0.28)},
    "DrGRPO": {"aggregation": "fixed_length"},
    "LUSPO": {"aggregation": "sequence_sum"},
    "GSPO": {
        "aggregation": "sequence_mean",
        "ratio_level": "sequence",
        "clip_epsilon": (3e-4, 4e-4),
    },
    "CISPO": {"surrogate": "cispo"},
    "SAPO": {"aggregation": "sequence_mean", "surrogate": "sapo"},
    "VESPO": {"surrogate": "vespo"},
    "GMPO": {"aggregation": "sequence_mean", "surrogate": "gmpo"},
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_loss_with_these_options(make_scorer, make_batch, name):
    more = {"max_tokens": 9} if name == "DrGRPO" else {}
    preset = getattr(objectives, name)(make_scorer(), **more)(make_batch())
    plain = GRPOLoss(make_scorer(), **PRESETS[name], **more)(make_batch())
    torch.testing.assert_close(preset.loss_objective, plain.loss_objective)


def test_torchrls_name_of_cispo_is_the_same():
    assert objectives.CISPOLoss is objectives.CISPO


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("loss", [objectives.SFTLoss, objectives.DistillationLoss])
def test_losses_without_a_sampler_need_a_temperature(make_scorer, loss):
    with pytest.raises(ValueError, match="temperature must be a positive number, got None"):
        loss(make_scorer(), temperature=None)


def test_entries_can_be_renamed(make_scorer, make_batch):
    batch = make_batch()
    renamed = batch.clone().rename_key_("advantage", "credit")
    loss = GRPOLoss(make_scorer(), read=GRPOLossKeys(advantage="credit"))
    torch.testing.assert_close(loss(renamed).total(), GRPOLoss(make_scorer())(batch).total())
    with pytest.raises(MissingEntryError, match=r"GRPOLoss reads \['credit'\].*'advantage'"):
        loss(batch)


BAD_OPTIONS = {
    "misspelt aggregation": ({"aggregation": "token_meen"}, "sequence_mean"),
    "misspelt surrogate": ({"surrogate": "ppo"}, "cispo"),
    "misspelt masking strategy": ({"masking_strategy": "assistent"}, "response"),
    "misspelt ratio level": ({"ratio_level": "seq"}, "sequence_token"),
    "misspelt estimator": ({"kl_estimator": "k4"}, "k3"),
    "misspelt old policy": ({"old_policy": "old"}, "recomputed"),
    "negative clip": ({"clip_epsilon": -0.1}, "clip_low"),
    "negative coefficient": ({"kl_to_ref_coeff": -1.0}, "kl_to_ref_coeff"),
    "temperature 0": ({"temperature": 0.0}, "temperature"),
    "clip that cispo would ignore": ({"surrogate": "cispo", "clip_epsilon": 0.2}, "no effect"),
    "clip given twice": (
        {"surrogate": objectives.ClippedSurrogate(clip_low=0.1), "clip_epsilon": 0.2},
        r"clip_epsilon=0.2 and ClippedSurrogate\(clip_low=0.1.* once",
    ),
    "max_tokens without its aggregation": ({"max_tokens": 9}, "fixed_length"),
    "fixed_length without max_tokens": ({"aggregation": "fixed_length"}, "max_tokens"),
    "max_tokens 0": ({"aggregation": "fixed_length", "max_tokens": 0}, "at least 1"),
    "sequence ratio for gmpo": ({"surrogate": "gmpo", "ratio_level": "sequence"}, "token"),
    "correction of nothing": ({"sampler_correction": SamplerCorrection()}, "old_policy"),
    "KL correction of nothing": ({"kl_bias_correction": True}, "kl_to_ref_coeff"),
    "skipping rows that a KL would move": (
        {"skip_rows_without_signal": True, "kl_to_ref_coeff": 0.1},
        "KL",
    ),
    "skipping rows whose entropy counts": (
        {
            "skip_rows_without_signal": True,
            "filters": TokenFilters(top_entropy_fraction=0.5),
        },
        "top_entropy_fraction",
    ),
    "entropy weight without its bonus": (
        {"entropy_bonus": False, "entropy_coeff": 0.5},
        "entropy_bonus=False",
    ),
    "infinite entropy weight": ({"entropy_bonus": True, "entropy_coeff": math.inf}, "finite"),
    "estimator of no KL": ({"kl_estimator": "k1"}, "kl_to_ref_coeff"),
    "NaN temperature": ({"temperature": math.nan}, "temperature must be a finite"),
    "half a clip pair": ({"clip_epsilon": (0.2,)}, r"clip_epsilon takes a pair.*\(0.2,\)"),
    "clip by text": ({"clip_epsilon": "0.2"}, "clip_epsilon takes a pair"),
    "half a token": ({"aggregation": "fixed_length", "max_tokens": 2.5}, "max_tokens.*whole"),
    "filters as a dictionary": ({"filters": {"trust_region": 0.1}}, r"filters takes TokenFilters"),
    "correction as a dictionary": (
        {"sampler_correction": {"upper": 2.0}, "old_policy": "current"},
        r"sampler_correction takes SamplerCorrection",
    ),
    "names as a dictionary": ({"read": {"advantage": "credit"}}, "read takes GRPOLossKeys"),
    "surrogate of another kind": ({"surrogate": 3}, "surrogate takes one of .*got 3"),
    "NaN bound of gmpo": ({"surrogate": "gmpo", "clip_epsilon": math.nan}, "clip_low"),
    "trust region given twice": (
        {"kl_mask_threshold": 0.1, "filters": TokenFilters(trust_region=0.2)},
        "one option",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_raise_at_construction(make_scorer, name):
    options, hint = BAD_OPTIONS[name]
    with pytest.raises((ValueError, TypeError), match=hint):
        GRPOLoss(make_scorer(), **options)


@pytest.mark.usefixtures("unchecked")
def test_bad_parts_raise_at_construction():
    for bad in (
        {"trust_region": 0.0},
        {"trust_region": math.inf},
        {"top_entropy_fraction": 1.5},
        {"top_entropy_fraction": 0},
        {"off_policy_threshold": math.nan},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            TokenFilters(**bad)
    with pytest.raises(ValueError, match="lower"):
        SamplerCorrection(upper=0.5)
    for kind, bad in (
        (objectives.SapoSurrogate, {"temperature_positive": math.inf}),
        (objectives.VespoSurrogate, {"positive": (math.nan, 3.0)}),
        (objectives.CispoSurrogate, {"max_ratio": 0.2}),
        (objectives.ClippedSurrogate, {"ratio_cap": 1.1}),
        (objectives.GmpoSurrogate, {"clip_low": -0.1}),
        (objectives.DivergenceSurrogate, {"divergence": "js"}),
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            kind(**bad)
    with pytest.raises(TypeError, match=r"DAPO has no setting 'clip_eps'. Did you mean 'clip_ep"):
        objectives.DAPO(None, clip_eps=0.2)


def test_entries_that_are_not_aligned_are_named(make_scorer, make_batch):
    rows = make_batch().unbind(0)
    rows[2]["log_probs", "full"] = torch.zeros(99)
    with pytest.raises(ValueError, match=r"log_probs.*99 values in row 2"):
        GRPOLoss(make_scorer())(lazy_stack(rows))
    del rows[2]["log_probs", "full"]
    with pytest.raises(MissingEntryError, match=r"log_probs.*row 2 of the batch lacks"):
        GRPOLoss(make_scorer())(lazy_stack(rows))
    rows = make_batch().unbind(0)
    rows[1]["advantage"] = torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"'advantage' has 2 values in row 1; it needs one, or"):
        GRPOLoss(make_scorer())(lazy_stack(rows))
    with pytest.raises(ValueError, match=r"batch \[B\]"):
        GRPOLoss(make_scorer())(rows[0])


def test_parameters_and_device_are_the_actors(make_scorer, make_batch):
    scorer = make_scorer(dtype=torch.float32)
    loss = GRPOLoss(scorer)
    assert [p is scorer.table for p in loss.parameters()] == [True]
    output = loss(make_batch())
    assert output.total().dtype == torch.float32
    assert ("tokens", "full") in loss.in_keys
    assert "loss_objective" in loss.out_keys


@pytest.mark.parametrize(
    ("own", "given", "used"),
    [
        pytest.param(0.7, None, 0.7, id="the actor's own"),
        pytest.param(0.7, 1.3, 1.3, id="what is given wins"),
        pytest.param(0.0, None, 1.0, id="greedy sampling has the scores of temperature 1"),
    ],
)
def test_the_temperature_is_that_of_the_sampling(make_scorer, make_batch, own, given, used):
    sampler = make_scorer()
    sampler.temperature = own
    got = GRPOLoss(sampler, temperature=given)(make_batch())
    want = GRPOLoss(make_scorer(), temperature=used)(make_batch())
    torch.testing.assert_close(got.loss_objective, want.loss_objective)
    other = GRPOLoss(make_scorer(), temperature=used + 0.1)(make_batch())
    assert not torch.isclose(got.loss_objective, other.loss_objective)

"""The options of ``GRPOLoss``: one record that checks itself, and how a loss is told them."""

import dataclasses
import inspect
import typing
from functools import partial

import pytest
import torch

import objectives
import objectives.functional as F
from objectives import DAPO, GSPO, ClippedSurrogate, GRPOLoss, GRPOOptions, SamplerCorrection
from objectives.losses.options import GRPOSettings

FIELDS = {field.name for field in dataclasses.fields(GRPOOptions)}


def test_keyword_arguments_are_the_fields_of_the_record():
    hints = typing.get_type_hints(GRPOSettings)
    assert hints == {name: typing.get_type_hints(GRPOOptions)[name] for name in FIELDS}
    shown = inspect.signature(GRPOLoss).parameters
    assert shown.keys() == {"actor_network", "options", "read"} | FIELDS
    assert shown["surrogate"].default == "clipped"
    assert inspect.signature(DAPO).parameters["clip_epsilon"].default == (0.2, 0.28)


def test_a_subclass_with_a_constructor_of_its_own_shows_that():
    class Mine(objectives.GSPO):
        def __init__(self, actor, strength):
            super().__init__(actor)
            self.strength = strength

    assert list(inspect.signature(Mine).parameters) == ["actor", "strength"]


@pytest.mark.usefixtures("unchecked")
def test_options_as_a_record_and_by_name_are_the_same(make_scorer, make_batch):
    options = GRPOOptions(clip_epsilon=0.1, aggregation="sequence_mean", kl_to_ref_coeff=0.1)
    batch = make_batch()
    want = GRPOLoss(
        make_scorer(), clip_epsilon=0.1, aggregation="sequence_mean", kl_to_ref_coeff=0.3
    )(batch)
    got = GRPOLoss(make_scorer(), options=options, kl_to_ref_coeff=0.3)(batch)
    torch.testing.assert_close(got.total(), want.total())
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.clip_epsilon = 0.3
    with pytest.raises(ValueError, match="DAPO is GRPOLoss with options of its own"):
        DAPO(make_scorer(), options=options)
    with pytest.raises(TypeError, match=r"GRPOLoss: options takes GRPOOptions"):
        GRPOLoss(make_scorer(), options=SamplerCorrection())


@pytest.mark.parametrize(
    ("preset", "settings", "bounds"),
    [
        pytest.param(DAPO, {}, (0.2, 0.28), id="the preset's"),
        pytest.param(DAPO, {"clip_epsilon": 0.3}, (0.3, 0.3), id="an option wins"),
        pytest.param(
            DAPO, {"surrogate": ClippedSurrogate(ratio_cap=1.5)}, (0.2, 0.28), id="left open"
        ),
        pytest.param(
            GSPO, {"surrogate": ClippedSurrogate(ratio_cap=1.5)}, (3e-4, 4e-4), id="open in GSPO"
        ),
        pytest.param(
            DAPO, {"surrogate": ClippedSurrogate(clip_low=0.1)}, (0.1, None), id="settings win"
        ),
        pytest.param(DAPO, {"surrogate": "gmpo"}, (None, None), id="another kind has its own"),
        pytest.param(DAPO, {"surrogate": "gmpo", "clip_epsilon": 0.3}, (0.3, 0.3), id="its bounds"),
    ],
)
def test_bounds_of_a_preset_give_way_to_what_is_given(make_scorer, preset, settings, bounds):
    function = preset(make_scorer(), **settings).options.surrogate_function()
    assert tuple(function.keywords.get(name) for name in ("clip_low", "clip_high")) == bounds


def test_the_bounds_of_dapo_with_a_cap_are_what_is_computed(make_scorer, make_batch):
    batch = make_batch()
    for row in batch.unbind(0):
        row["log_probs", "full"] -= 2  # ratios that run away, on bad tokens too
    capped = ClippedSurrogate(clip_low=0.2, clip_high=0.28, ratio_cap=1.5)
    want = GRPOLoss(make_scorer(), surrogate=capped)(batch)
    got = DAPO(make_scorer(), surrogate=ClippedSurrogate(ratio_cap=1.5))(batch)
    torch.testing.assert_close(got.loss_objective, want.loss_objective)
    uncapped = DAPO(make_scorer())(batch)
    assert not torch.isclose(got.loss_objective, uncapped.loss_objective)


@pytest.mark.usefixtures("unchecked")
def test_a_surrogate_of_your_own(make_scorer, make_batch):
    def reinforce(log_prob, advantage, *, scale=1.0):
        none = torch.zeros_like(advantage, dtype=torch.bool)
        return F.Surrogate(-scale * advantage * log_prob, torch.ones_like(advantage), none, none)

    batch, scorer = make_batch(), make_scorer()
    rows = []
    for row in batch.unbind(0):
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        log_prob = scorer.score_packed(ids, torch.tensor([len(ids)]), mask).log_prob
        rows.append(-2 * row["advantage"].item() * log_prob)
    got = GRPOLoss(scorer, surrogate=partial(reinforce, scale=2.0))(batch)
    torch.testing.assert_close(got.loss_objective, torch.cat(rows).mean())
    with pytest.raises(TypeError, match=r"needs 'teacher_logits'.*log_ratio"):
        GRPOLoss(scorer, surrogate=partial(F.generalized_jsd, torch.zeros(1, 3)))
    own_ratio = F.gmpo
    with pytest.raises(ValueError, match="ratio of its own"):
        GRPOLoss(scorer, surrogate=own_ratio, ratio_level="sequence")


def test_every_named_surrogate_is_its_function():
    from objectives.losses.options import SURROGATES, surrogate_inputs

    found = {name: kind.function for name, kind in SURROGATES.items()}
    assert found == {
        "clipped": F.clipped_surrogate,
        "cispo": F.cispo,
        "sapo": F.sapo,
        "vespo": F.vespo,
        "gmpo": F.gmpo,
        "divergence": F.divergence_masked,
    }
    takes = {name: surrogate_inputs(function) for name, function in found.items()}
    assert {name for name, inputs in takes.items() if "lengths" in inputs} == {"vespo", "gmpo"}
    assert {name for name, inputs in takes.items() if "sampler_log_ratio" in inputs} == {"vespo"}

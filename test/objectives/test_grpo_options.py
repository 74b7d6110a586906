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
from torchrl_data.missing_entry import MissingEntryError

FIELDS = {field.name for field in dataclasses.fields(GRPOOptions)}


def test_keyword_arguments_are_the_fields_of_the_record():
    shown = inspect.signature(GRPOLoss).parameters
    assert shown.keys() == {"actor_network", "options", "read"} | FIELDS
    assert shown["surrogate"].default == "clipped"
    assert inspect.signature(DAPO).parameters["clip_epsilon"].default == (0.2, 0.28)


def test_a_subclass_presets_options_of_any_loss(make_scorer):
    class Minor(objectives.SFTLoss):
        preset: typing.ClassVar = {"loss_function": "minor_sft"}

    assert Minor(make_scorer()).options == objectives.SFTOptions(loss_function="minor_sft")
    assert Minor(make_scorer(), loss_function="sft").loss_function == "sft"
    assert inspect.signature(Minor).parameters["loss_function"].default == "minor_sft"
    record = objectives.SFTOptions(beta=0.3, loss_function="minor_sft")
    assert objectives.SFTLoss(make_scorer(), options=record, beta=0.4).beta == 0.4
    with pytest.raises(ValueError, match="Minor has options of its own"):
        Minor(make_scorer(), options=record)
    with pytest.raises(
        TypeError, match=r"SFTLoss has no setting .lossfunction.\. Did you mean .loss_function"
    ):
        objectives.SFTLoss(make_scorer(), lossfunction="sft")


@pytest.mark.usefixtures("unchecked")
def test_a_coefficient_is_enough_for_the_entropy_bonus(make_scorer, make_batch):
    batch = make_batch()
    want = GRPOLoss(make_scorer(), entropy_bonus=True, entropy_coeff=0.02)(batch)
    got = GRPOLoss(make_scorer(), entropy_coeff=0.02)(batch)
    torch.testing.assert_close(got.loss_entropy, want.loss_entropy)
    assert got.loss_entropy.abs() > 0
    assert not GRPOLoss(make_scorer(), entropy_coeff=0.0).wants_entropy


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
    with pytest.raises(ValueError, match="DAPO has options of its own"):
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


# Options that are set after construction.

CHANGES = {
    "aggregation": ({}, "sequence_mean"),
    "max_tokens": ({"aggregation": "fixed_length", "max_tokens": 9}, 5),
    "masking_strategy": ({}, "response"),
    "temperature": ({}, 2.0),
    "clip_epsilon": ({}, (0.05, 0.3)),
    "surrogate": ({"clip_epsilon": 0.1}, "gmpo"),
    "ratio_level": ({}, "sequence"),
    "kl_to_ref_coeff": ({"kl_to_ref_coeff": 0.5}, 0.0),
    "kl_to_inference_coeff": ({}, 0.3),
    "kl_estimator": ({"kl_to_ref_coeff": 0.5}, "k1"),
    "kl_bias_correction": ({"kl_to_ref_coeff": 0.5}, True),
    "entropy_bonus": ({}, True),
    "entropy_coeff": ({}, 0.7),
    "filters": ({}, objectives.TokenFilters(trust_region=0.5, drop_truncated=True)),
    "kl_mask_threshold": ({}, 0.5),
    "old_policy": ({}, "recomputed"),
    "sampler_correction": ({"old_policy": "current"}, SamplerCorrection(upper=1.2)),
    "skip_rows_without_signal": ({}, True),
    "teacher_coeff": ({}, 0.4),
    "advantage_coeff": ({}, 3.0),
}
SFT_CHANGES = {
    "aggregation": ({}, "sequence_sum"),
    "max_tokens": ({"aggregation": "fixed_length", "max_tokens": 9}, 5),
    "masking_strategy": ({}, "response"),
    "temperature": ({}, 2.0),
    "loss_function": ({}, "minor_sft"),
    "kl_to_ref_coeff": ({}, 0.3),
    "beta": ({"loss_function": "minor_sft"}, 0.7),
}
DISTILLATION_CHANGES = {
    "aggregation": ({}, "sequence_sum"),
    "max_tokens": ({"aggregation": "fixed_length", "max_tokens": 9}, 5),
    "masking_strategy": ({}, "response"),
    "temperature": ({}, 2.0),
    "kl_direction": ({}, "forward"),
}
LOSSES = {GRPOLoss: CHANGES, objectives.SFTLoss: SFT_CHANGES}
LOSSES[objectives.DistillationLoss] = DISTILLATION_CHANGES
ALL_CHANGES = [(kind, name) for kind, changes in LOSSES.items() for name in changes]


def trained(loss, batch):
    """The value of a loss, and its gradient."""
    loss.zero_grad(set_to_none=True)
    total = loss(batch).total()
    total.backward()
    return total.detach(), loss.actor_network.table.grad.clone()


def test_every_option_of_a_loss_is_tried():
    for kind, changes in LOSSES.items():
        assert changes.keys() == {field.name for field in dataclasses.fields(kind.option_type)}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kind", "name"), ALL_CHANGES)
def test_an_option_set_later_is_what_a_new_loss_has(make_scorer, make_batch, kind, name):
    context, value = LOSSES[kind][name]
    batch = make_batch()
    if name == "masking_strategy":  # tokens of others, too, have a log-prob then
        for row in batch.unbind(0):
            for key in (("next", "teacher_log_probs", "full"), ("log_probs", "full")):
                row[key] = row[key].nan_to_num(-1.0)
    loss = kind(make_scorer(), **context)
    before = trained(loss, batch)
    setattr(loss, name, value)
    got, want = (
        trained(loss, batch),
        trained(kind(make_scorer(), **{**context, name: value}), batch),
    )
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    if name != "skip_rows_without_signal":  # which leaves the loss as it is
        assert not torch.equal(got[1], before[1])
    assert loss.options == kind(make_scorer(), **{**context, name: value}).options
    assert loss.in_keys == kind(make_scorer(), **{**context, name: value}).in_keys
    loss.options = kind(make_scorer(), **context).options
    torch.testing.assert_close(trained(loss, batch), before, rtol=0, atol=0)


def test_a_preset_gives_way_to_an_option_that_is_set_later(make_scorer):
    loss = DAPO(make_scorer())
    loss.surrogate = "gmpo"
    assert loss.options == DAPO(make_scorer(), surrogate="gmpo").options
    assert loss.clip_epsilon is None


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("kl_to_ref_coeff", -1.0, "kl_to_ref_coeff must be a finite number in"),
        ("clip_epsilon", (0.2,), "clip_epsilon takes a pair"),
        ("max_tokens", 9, "max_tokens goes with aggregation 'fixed_length'"),
        ("entropy_coeff", -0.1, "must be a finite number in"),
        ("options", {"clip_epsilon": 0.2}, r"options takes GRPOOptions"),
        ("read", {"advantage": "credit"}, r"read takes GRPOLossKeys"),
        ("actor_network", torch.nn.Linear(1, 1), "score_packed"),
    ],
)
def test_a_bad_option_that_is_set_later_is_refused_and_changes_nothing(
    make_scorer, make_batch, name, value, hint
):
    loss, batch = GRPOLoss(make_scorer()), make_batch()
    before, options = trained(loss, batch), loss.options
    with pytest.raises((ValueError, TypeError), match=hint):
        setattr(loss, name, value)
    assert loss.options == options
    torch.testing.assert_close(trained(loss, batch), before)


def test_an_attribute_that_no_loss_has_is_refused(make_scorer):
    for loss, name, hint in (
        (GRPOLoss(make_scorer()), "kl_to_ref_coef", "Did you mean 'kl_to_ref_coeff'"),
        (objectives.SFTLoss(make_scorer()), "entropy_coeff", "SFTLoss has no attribute"),
        (objectives.DistillationLoss(make_scorer()), "share_prefixes", "has no attribute"),
        (objectives.MixedLoss({"rl": GRPOLoss(make_scorer())}), "weights", "no attribute"),
    ):
        with pytest.raises(AttributeError, match=hint):
            setattr(loss, name, 0.1)
    mixed = objectives.MixedLoss({"rl": GRPOLoss(make_scorer())})
    with pytest.raises(AttributeError, match="MixedLoss: streams is fixed when it is made"):
        mixed.streams = {}


def test_a_subclass_of_a_users_has_attributes_of_its_own(make_scorer):
    class Mine(GRPOLoss):
        def __init__(self, actor, strength):
            super().__init__(actor)
            self.strength = strength

    loss = Mine(make_scorer(), 2.0)
    loss.strength, loss.last = 3.0, 1.0
    loss.kl_to_ref_coeff = 0.5
    assert (loss.strength, loss.options.kl_to_ref_coeff) == (3.0, 0.5)


@pytest.mark.usefixtures("unchecked")
def test_rows_that_were_packed_for_other_options_are_refused(make_scorer, make_batch):
    loss = GRPOLoss(make_scorer())
    packed = loss.pack(make_batch())
    loss.kl_to_ref_coeff = 0.1
    with pytest.raises(MissingEntryError, match=r"needs \['ref_log_probs'\].*Pack the rows again"):
        loss(packed)


@pytest.mark.usefixtures("unchecked")
def test_streams_that_no_longer_fit_together_are_refused(make_scorer, make_batch):
    scorer, batch = make_scorer(), make_batch()
    objectives.write_streams(batch, rl="assistant", ce="assistant")
    mixed = objectives.MixedLoss({"rl": GRPOLoss(scorer), "ce": objectives.SFTLoss(scorer)})
    mixed.streams["rl"].kl_to_ref_coeff = 0.5
    assert ("next", "ref_log_probs", "full") in mixed.in_keys
    assert mixed(batch).streams["rl"].loss_kl_to_ref is not None
    mixed.streams["ce"].temperature = 2.0
    with pytest.raises(ValueError, match="differ in temperature"):
        mixed(batch)


@pytest.mark.usefixtures("unchecked")
def test_a_temperature_that_is_the_actors_follows_it(make_scorer, make_batch):
    scorer, batch = make_scorer(), make_batch()
    scorer.temperature = 1.0
    loss = GRPOLoss(scorer)
    scorer.temperature = 2.0
    want = GRPOLoss(make_scorer(), temperature=2.0)(batch).total()
    torch.testing.assert_close(loss(batch).total(), want)

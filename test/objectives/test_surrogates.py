"""What holds of every surrogate that is in the table, and of one of a user's own."""

from functools import partial

import pytest
import torch
from tensordict import lazy_stack

import objectives
import objectives.functional as F
from objectives import DAPO, GRPOLoss, reads
from objectives.losses.surrogates import SURROGATES, batch_entries, surrogate_inputs, takes_clip
from torchrl_data.missing_entry import MissingEntryError

LENGTHS = torch.tensor([4, 0, 5])


def arguments_of(name, *, mask, packed=True):
    """Random tokens for a surrogate: its arguments, and all tensors by name."""
    generator = torch.Generator().manual_seed(1)

    def noise():
        shape = (9,) if packed else (3, 5)
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    tokens = {
        "log_prob": -2 * noise(),
        "advantage": noise() - 0.5,
        "behavior_log_prob": -2 * noise(),
        "sampler_log_ratio": noise() - 0.5,
    }
    tokens = {name: value.requires_grad_() for name, value in tokens.items()}
    if mask == "random":
        mask = torch.rand((9,) if packed else (3, 5), generator=generator) > 0.3
    elif mask == "ones":
        mask = torch.ones((9,) if packed else (3, 5), dtype=torch.bool)
    ratio = F.log_ratio(tokens["log_prob"], tokens["behavior_log_prob"], mask)
    function = SURROGATES[name].function
    entries = {entry: noise() + 0.5 for entry in batch_entries(function)}
    known = {**tokens, **entries, "log_ratio": ratio, "lengths": LENGTHS if packed else None}
    inputs = surrogate_inputs(function)
    return {"mask": mask, **{n: known[n] for n in inputs}}, tokens


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", SURROGATES)
def test_no_mask_is_a_mask_of_ones(name, packed):
    results = []
    for mask in (None, "ones"):
        given, tokens = arguments_of(name, mask=mask, packed=packed)
        found = SURROGATES[name].function(**given)
        (gradient,) = torch.autograd.grad(found.loss.sum(), tokens["log_prob"])
        results.append((*found, gradient))
    for without, ones in zip(*results, strict=True):
        torch.testing.assert_close(without, ones)


@pytest.mark.parametrize("name", SURROGATES)
def test_outside_the_mask_nothing_counts_and_only_the_policy_is_differentiated(name):
    given, tokens = arguments_of(name, mask="random")
    mask = given["mask"]
    assert 0 < mask.sum() < len(mask)
    found = SURROGATES[name].function(**given)
    assert found.loss[~mask].eq(0).all()
    assert found.ratio[~mask].eq(1).all()
    assert not (found.clipped_low | found.clipped_high)[~mask].any()
    assert not found.ratio.requires_grad
    found.loss.sum().backward()
    gradient = tokens.pop("log_prob").grad
    assert gradient[mask].abs().max() > 0
    assert gradient[~mask].eq(0).all()
    assert {n: value.grad for n, value in tokens.items()} == dict.fromkeys(tokens)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", SURROGATES)
def test_a_surrogate_is_one_graph(name, packed, plain):
    function = getattr(plain, SURROGATES[name].function.__name__)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for call in (function, compiled):
        given, _ = arguments_of(name, mask="random", packed=packed)
        leaves = {n: x.detach() for n, x in given.items() if n in ("log_prob", "log_ratio")}
        inputs = [leaf.requires_grad_() for leaf in leaves.values()]
        found = call(**given | leaves)
        gradients = torch.autograd.grad(found.loss.sum(), inputs, materialize_grads=True)
        results.append((*found, *gradients))
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager)


@reads(patience=("next", "patience"), bonus="bonus")
def patient(log_ratio, advantage, patience, bonus, *, clip_low=0.2, clip_high=0.2):
    return F.clipped_surrogate(
        log_ratio / patience, advantage + bonus, clip_low=clip_low, clip_high=clip_high
    )


def with_own_entries(batch):
    """Rows with a patience of their own, and a bonus for each token."""
    rows = batch.unbind(0)
    for number, row in enumerate(rows):
        row["next", "patience"] = torch.full((1,), 1.0 + number)
        row["bonus"] = torch.arange(len(row["tokens", "full"]), dtype=torch.float32)
    return lazy_stack(list(rows))


@pytest.mark.usefixtures("unchecked")
def test_a_surrogate_reads_entries_of_its_own(make_scorer, make_batch):
    """By row and by token: the mean of what each token has by hand, whole and in parts."""
    batch, scorer = with_own_entries(make_batch()), make_scorer()
    expected = []
    for row in batch.unbind(0):
        mask = row["masks", "all_assistant_mask"]
        ids = row["tokens", "full"]
        log_prob = scorer.score_packed(ids, torch.tensor([len(ids)]), mask).log_prob
        ratio = ((log_prob - row["log_probs", "full"][mask]) / row["next", "patience"]).exp()
        advantage = row["advantage"].item() + row["bonus"][mask]
        expected.append(-torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.3) * advantage))
    loss = GRPOLoss(scorer, surrogate=patient, clip_epsilon=(0.1, 0.3))
    want = torch.cat(expected).mean()
    torch.testing.assert_close(loss(batch).loss_objective, want)
    packed = loss.pack(batch)
    window = loss.measure_window(packed)
    parts = [loss(part, window=window).loss_objective for part in packed.micro_batches(num_rows=1)]
    assert len(parts) > 1
    torch.testing.assert_close(sum(parts), want)
    with pytest.raises(MissingEntryError, match="bonus"):
        loss(make_batch())


def test_a_surrogate_of_ones_own_is_tried_when_the_loss_is_made(make_scorer):
    made = []

    def make(function, **options):
        return GRPOLoss(make_scorer(), surrogate=function, **options)

    make(partial(patient, clip_low=0.1))
    with pytest.raises(ValueError, match="both give the clip bounds"):
        make(partial(patient, clip_low=0.1), clip_epsilon=0.2)
    with pytest.raises(TypeError, match="must give a Surrogate"):
        make(lambda log_ratio: log_ratio)
    with pytest.raises(TypeError, match="must give a Surrogate"):
        make(lambda log_ratio: F.Surrogate(*[log_ratio.sum()] * 4))
    with pytest.raises(ValueError, match="no effect on surrogate"):
        make(lambda log_ratio: made.append(log_ratio), clip_epsilon=0.1)
    assert made == []
    with pytest.raises(TypeError, match=r"reads \['weight'\] and has no such parameter"):
        make(reads(weight="weight")(lambda log_ratio: log_ratio))
    with pytest.raises(TypeError, match=r"needs 'weight'.*@objectives.reads\(weight=key\)"):
        make(lambda log_ratio, weight: log_ratio * weight)
    with pytest.raises(ValueError, match=r"\['advantage'\] are what every surrogate may take"):
        reads(advantage="mine")


def test_clip_bounds_go_to_whatever_surrogate_has_both(make_scorer):
    have = {n: {"clip_low", "clip_high"} & vars(kind()).keys() for n, kind in SURROGATES.items()}
    assert {n for n, kind in SURROGATES.items() if takes_clip(kind)} == {n for n in have if have[n]}
    assert have["clipped"] == have["gmpo"] == {"clip_low", "clip_high"}
    function = DAPO(make_scorer(), surrogate=patient).options.surrogate_function()
    assert function is patient  # bounds of a preset are those of its own surrogate
    function = DAPO(make_scorer(), surrogate=patient, clip_epsilon=0.3).options
    assert function.surrogate_function().keywords == {"clip_low": 0.3, "clip_high": 0.3}
    assert objectives.reads is reads

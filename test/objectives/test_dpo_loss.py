"""``DPOLoss`` against sums written out pair by pair, and how pairs stay together."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import lazy_stack

from objectives import DPOLoss, DPOLossOutput, DPOOptions, MixedLoss, PackedBatch
from objectives import functional as F
from objectives.batching.equal_shares import equal_shares, smallest_bound
from torchrl_data import preference_rows
from torchrl_modules import TransformersWrapper

TURNS = (((5, 0),), ((1, 2), (3, 1)), ((2, 0),), ((4, 3), (1, 1)), ((6, 2),), ((1, 0),))


@pytest.fixture
def pairs(make_row):
    """Three pairs of answers of unequal lengths, some in several turns."""
    rows = []
    for number, turns in enumerate(TURNS):
        row = make_row(number, turns=turns)
        row["pair_id"] = torch.tensor([7 + number // 2])
        row["chosen"] = torch.tensor([number % 2 == 0])
        rows.append(row)
    return lazy_stack(rows)


def scores_of(scorer, batch, answer):
    """Of each row the log-prob of its answer, and that under the reference."""
    for row in batch.unbind(0):
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        own = scorer.score_packed(ids, torch.tensor([len(ids)]), mask).log_prob
        yield answer(own), answer(row["next", "ref_log_probs", "full"][mask])


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"beta": 0.5}, torch.sum),
        ({"beta": 0.5, "aggregation": "sequence_mean"}, torch.mean),
        ({"loss_function": "ipo", "beta": 0.3}, torch.mean),
        ({"loss_function": "hinge", "beta": 0.3}, torch.sum),
    ],
)
def test_the_loss_is_that_of_each_pair(make_scorer, pairs, options, answer):
    scorer = make_scorer()
    output = DPOLoss(scorer, **options)(pairs)
    own = [policy - reference for policy, reference in scores_of(scorer, pairs, answer)]
    chosen, rejected = torch.stack(own[::2]), torch.stack(own[1::2])
    rest = {name: value for name, value in options.items() if name != "aggregation"}
    expected = F.preference_loss(chosen, rejected, **rest).mean()
    torch.testing.assert_close(output.total(), expected)
    beta = options["beta"]
    torch.testing.assert_close(output.chosen_reward, beta * chosen.mean().detach())
    torch.testing.assert_close(output.rejected_reward, beta * rejected.mean().detach())
    assert output.accuracy.item() == pytest.approx((chosen > rejected).double().mean().item())
    assert (output.num_pairs, output.num_sequences) == (3, 6)


def test_without_a_reference_and_with_the_likelihood_of_the_better_answer(make_scorer, pairs):
    scorer = make_scorer()
    simpo = {"reference_free": True, "beta": 2.0, "margin": 1.0}
    without = pairs.exclude(("next", "ref_log_probs"))
    output = DPOLoss(scorer, **simpo, sft_coeff=0.5)(without)
    means = [own for own, _ in scores_of(scorer, pairs, torch.mean)]
    chosen, rejected = torch.stack(means[::2]), torch.stack(means[1::2])
    expected = -torch.nn.functional.logsigmoid(2 * (chosen - rejected) - 1).mean()
    torch.testing.assert_close(output.loss_dpo, expected)
    torch.testing.assert_close(output.loss_nll, -0.5 * chosen.mean())
    torch.testing.assert_close(output.nll, -chosen.mean().detach())
    torch.testing.assert_close(output.chosen_log_prob, chosen.mean().detach())


def test_a_policy_that_is_its_reference_begins_at_log_2(make_scorer, pairs):
    scorer, rows = make_scorer(), []
    for row in pairs.unbind(0):
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        own = scorer.score_packed(ids, torch.tensor([len(ids)]), mask).log_prob.detach()
        row = row.clone()
        row["next", "ref_log_probs", "full"] = torch.zeros(len(ids)).double()
        row["next", "ref_log_probs", "full"][mask] = own
        rows.append(row)
    output = DPOLoss(scorer)(lazy_stack(rows))
    assert output.total().item() == pytest.approx(math.log(2))
    assert output.accuracy.item() == 0.5


@pytest.mark.parametrize("split", [{"num_rows": 1}, {"num_rows": 4}, {"max_tokens": 20}])
def test_micro_batches_hold_whole_pairs_and_their_gradients_add_up(make_scorer, pairs, split):
    scorer = make_scorer()
    loss = DPOLoss(scorer, sft_coeff=0.3)
    whole = loss(pairs)
    whole.total().backward()
    due, scorer.table.grad = scorer.table.grad.clone(), None
    packed = loss.pack(pairs)
    window, outputs = loss.measure_window(packed), []
    for part in packed.micro_batches(**split):
        assert part.num_rows % 2 == 0
        outputs.append(loss(part, window=window))
        outputs[-1].total().backward()
    assert len(outputs) > 1
    torch.testing.assert_close(scorer.table.grad, due)
    combined = DPOLossOutput.combine(outputs)
    for name, value in whole.items():
        torch.testing.assert_close(combined.get(name), value.detach())
    empty = packed.run(0, 0)
    assert loss(empty, window=window).total().item() == 0


sizes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8)


def packed_pairs(lengths):
    rows = torch.tensor([length for pair in lengths for length in pair])
    first = torch.zeros(int(rows.sum()), dtype=torch.bool)
    first[rows.cumsum(0) - rows] = True
    return PackedBatch(
        ids=torch.arange(len(first)) % 3,
        lengths=rows,
        target_mask=first,
        target_lengths=torch.ones_like(rows),
        sampled=torch.ones(len(rows), dtype=torch.bool),
        entries={},
        left_out=torch.zeros(len(rows), dtype=torch.bool),
        rows_together=2,
    )


@settings(deadline=None)
@given(sizes, st.integers(1, 40), st.integers(1, 3), st.booleans())
def test_no_pair_is_parted(lengths, limit, size, count_shared_once):
    packed = packed_pairs(lengths)
    sides = [length for pair in lengths for length in pair]
    parts = list(packed.micro_batches(max_tokens=limit, count_shared_once=count_shared_once))
    assert [length for part in parts for length in part.lengths.tolist()] == sides
    assert all(part.num_rows % 2 == 0 for part in parts)
    if not count_shared_once:
        assert all(len(part.ids) <= limit or part.num_rows == 2 for part in parts)
    shares = equal_shares(packed, size, max_tokens=limit)
    assert len({len(share) for share in shares}) == 1
    dealt = [part for share in shares for part in share]
    assert sorted(length for part in dealt for length in part.lengths.tolist()) == sorted(sides)
    assert all(part.num_rows % 2 == 0 for part in dealt)
    assert all(len(part.ids) <= limit or part.num_rows == 2 for part in dealt)
    of_pairs = smallest_bound([sum(pair) for pair in lengths], size)
    assert smallest_bound(sides, size, 2) == of_pairs


REFUSED = {
    "an odd number": (lambda b: b[:5], "pairs, two rows each, and got 5 rows"),
    "rows that were shuffled": (lambda b: b[[0, 3, 2, 1, 4, 5]], "rows 0 and 1 are no pair"),
    "the better answer last": (lambda b: b[[0, 1, 3, 2]], "rows 2 and 3 .*chosen False and True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_are_no_pairs(make_scorer, pairs, name):
    change, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        DPOLoss(make_scorer())(lazy_stack(change(pairs).unbind(0)))


def test_an_answer_without_a_token(make_scorer, pairs):
    rows = list(pairs.unbind(0))
    rows[3]["masks", "all_assistant_mask"] = torch.zeros_like(
        rows[3]["masks", "all_assistant_mask"]
    )
    with pytest.raises(ValueError, match=r"row 3 has no trained token, so that its pair can't"):
        DPOLoss(make_scorer())(lazy_stack(rows))


def test_options(make_scorer):
    assert DPOOptions().named_aggregation == "sequence_sum"
    assert DPOOptions(reference_free=True).named_aggregation == "sequence_mean"
    with pytest.raises(ValueError, match=r"aggregation must be .*sequence_sum.*, got 'token_mean'"):
        DPOOptions(aggregation="token_mean")
    with pytest.raises(ValueError, match=r"margin=1\.0 goes with loss_function 'sigmoid'"):
        DPOLoss(make_scorer(), margin=1.0, loss_function="ipo")
    loss = DPOLoss(make_scorer())
    with pytest.raises(ValueError, match=r"MixedLoss: stream 'ce': preferences go by pairs"):
        MixedLoss({"ce": loss})


def test_the_prompt_of_a_pair_is_read_once(chatml_tokenizer, make_tiny_model):
    policy = TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer)
    pair = {"prompt": "say " * 30, "chosen": "b" * 20, "rejected": "c" * 10}
    rows = preference_rows(policy.encoder, [pair])
    read = []
    layer = policy.model.get_submodule("model.layers.0")
    layer.register_forward_hook(lambda _, given, __: read.append(given[0].shape[:2].numel()))
    DPOLoss(policy, reference_free=True)(lazy_stack(rows)).total().backward()
    trained = [row["masks", "all_assistant_mask"].nonzero().flatten().tolist() for row in rows]
    prompt = trained[0][0]
    assert prompt > 40
    # Of each row what comes before its last trained token.
    assert read == [sum(own[-1] for own in trained) - prompt]


def test_orpo_has_no_reference_and_comes_with_a_likelihood(make_scorer, pairs):
    scorer = make_scorer()
    output = DPOLoss(scorer, loss_function="orpo", beta=0.3)(pairs.exclude(("next",)))
    means = [own for own, _ in scores_of(scorer, pairs, torch.mean)]
    chosen, rejected = torch.stack(means[::2]), torch.stack(means[1::2])
    odds = [(p.exp() / (1 - p.exp())).log() for p in (chosen, rejected)]
    expected = -0.3 * torch.nn.functional.logsigmoid(odds[0] - odds[1]).mean()
    torch.testing.assert_close(output.loss_dpo, expected)
    torch.testing.assert_close(output.loss_nll, -chosen.mean())
    bare = DPOLoss(scorer, loss_function="orpo", sft_coeff=0.0)(pairs)
    assert bare.loss_nll is None
    for wrong in ({"reference_free": False}, {"aggregation": "sequence_sum"}):
        with pytest.raises(ValueError, match=r"'orpo' goes by the mean .*leave both out"):
            DPOLoss(scorer, loss_function="orpo", **wrong)
    with pytest.raises(ValueError, match="'apo_zero' compares each answer with the reference"):
        DPOLoss(scorer, loss_function="apo_zero", reference_free=True)

"""One row that cannot be trained marks itself: it costs neither the batch nor the run."""

import logging
import math

import pytest
import torch
from tensordict import lazy_stack

from objectives import GRPOLoss, GRPOLossOutput, MCAdvantage, SamplerCorrection, TokenFilters


def spoil(batch, row, value):
    """One sampled token of a row gets a log-prob that nothing can have been sampled with."""
    row = batch.unbind(0)[row]
    at = row["masks", "all_assistant_mask"].nonzero()[0]
    row["log_probs", "full"][at] = value


def gradient(scorer, batch, **options):
    output = GRPOLoss(scorer, **options)(batch)
    output.total().backward()
    return output, scorer.table.grad


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5], ids=str)
def test_a_row_that_no_policy_can_have_sampled_is_left_out(make_scorer, make_batch, value, caplog):
    """The others are trained as if it had no token; it is logged, and counted."""
    batch, clean = make_batch(), make_batch()
    spoil(batch, 3, value)
    for row in (1, 5):
        at = batch.unbind(0)[row]["masks", "all_assistant_mask"]
        batch.unbind(0)[row]["log_probs", "full"][~at] = value  # outside the mask nothing counts
    clean.unbind(0)[3]["masks", "all_assistant_mask"][:] = False
    with caplog.at_level(logging.WARNING):
        got, got_gradient = gradient(make_scorer(), batch)
    want, want_gradient = gradient(make_scorer(), clean)
    assert got.num_rows_left_out == 1
    assert "1 of 6 rows" in caplog.text
    assert "rows [3]" in caplog.text
    for key, value in want.items():
        if value is not None and key != "num_rows_left_out":
            torch.testing.assert_close(got.get(key), value, msg=key)
    torch.testing.assert_close(got_gradient, want_gradient)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_a_row_without_a_finite_advantage_is_left_out(make_scorer, make_batch, value, caplog):
    """The loss is that of the other rows; an advantage that no trained token has counts nothing."""
    batch, clean = make_batch(), make_batch()
    batch.unbind(0)[1]["advantage"].fill_(value)
    batch.unbind(0)[4]["advantage"].fill_(value)  # has no sampled token
    clean.unbind(0)[1]["masks", "all_assistant_mask"][:] = False
    for old_policy in ("sampler", "current"):
        caplog.clear()
        got, got_gradient = gradient(make_scorer(), batch, old_policy=old_policy)
        want, want_gradient = gradient(make_scorer(), clean, old_policy=old_policy)
        assert got.num_rows_left_out == 1
        assert "1 of 6 rows hold 'advantage'" in caplog.text
        torch.testing.assert_close(got.total(), want.total())
        torch.testing.assert_close(got_gradient, want_gradient)


def test_parts_of_a_window_leave_it_out_as_well(make_scorer, make_batch):
    batch = make_batch()
    spoil(batch, 0, math.nan)
    whole, want = gradient(make_scorer(), batch)
    scorer = make_scorer()
    loss = GRPOLoss(scorer)
    packed = loss.pack(batch)
    window = loss.measure_window(packed)
    assert window == loss.measure_window(batch)
    assert window[:2] == (24 - 5, 6)
    shuffled = packed.take_rows(torch.tensor([5, 0, 3, 1, 4, 2]))
    outputs = [loss(part, window=window) for part in shuffled.micro_batches(num_rows=2)]
    sum(output.total() for output in outputs).backward()
    torch.testing.assert_close(scorer.table.grad, want)
    assert GRPOLossOutput.combine(outputs).num_rows_left_out == whole.num_rows_left_out == 1


@pytest.mark.parametrize(
    ("options", "num_left_out"),
    [
        ({"old_policy": "current"}, 0),
        ({"old_policy": "recomputed"}, 0),
        ({"old_policy": "recomputed", "sampler_correction": SamplerCorrection()}, 1),
        ({"old_policy": "current", "kl_to_inference_coeff": 0.1}, 1),
        ({"old_policy": "current", "filters": TokenFilters(trust_region=0.5)}, 1),
        ({"old_policy": "current", "filters": TokenFilters(off_policy_threshold=0.5)}, 1),
    ],
    ids=str,
)
def test_only_where_a_term_goes_by_it(make_scorer, make_batch, options, num_left_out):
    batch = make_batch()
    spoil(batch, 1, math.nan)
    output, grad = gradient(make_scorer(), batch, **options)
    assert output.num_rows_left_out == num_left_out
    assert output.total().isfinite()
    assert grad.isfinite().all()


def test_a_batch_of_which_nothing_is_left_has_loss_0(make_scorer, make_batch):
    batch = make_batch()
    for row in (0, 1, 2, 3, 5):
        spoil(batch, row, math.nan)
    output = GRPOLoss(make_scorer())(batch)
    assert (output.total(), output.num_rows_left_out, output.num_sequences) == (0, 5, 6)


@pytest.mark.parametrize("estimator", ["group", "rloo", "gdpo"])
def test_rewards_at_the_end_of_float32_have_finite_advantages(make_row, estimator):
    """Their sum and squares do not fit: of 3e38, 3e38, 0 the mean is 2e38."""
    rows = [make_row(i, reward=reward) for i, reward in enumerate((3e38, 3e38, 0.0))]
    for row in rows:
        row["rewards", "only"] = row["reward"].clone()
    released = MCAdvantage(3, estimator=estimator).inv(lazy_stack(rows))
    found = released["advantage"].view(-1)
    if estimator == "rloo":
        torch.testing.assert_close(found, torch.tensor([1.5e38, 1.5e38, -3e38]))
    else:
        # GDPO divides by the standard deviation of the batch as well, 1, and 1e-4.
        divisor = math.sqrt(3) * (1.0001 if estimator == "gdpo" else 1)
        torch.testing.assert_close(found, torch.tensor([1.0, 1.0, -2.0]) / divisor)

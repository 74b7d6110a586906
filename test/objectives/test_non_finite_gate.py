"""FAULTS L01: what is not finite never reaches a parameter."""

import copy
import dataclasses
import json
import math
from inspect import unwrap

import pytest
import torch
from safetensors import safe_open

from objectives import GRPOLoss, NonFiniteGate, NonFiniteStepError, TokenFilters
from torchrl_data import SamplingMasks


class Loss:
    """A loss of a given value and gradient."""

    def __init__(self, total):
        self.value = total

    def total(self):
        return self.value

    def items(self):
        return [("loss_objective", self.value)]


def make_gate(**options):
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, betas=(0.9, 0.95))
    gate = NonFiniteGate(optimizer, **options)
    gate.backward(Loss((parameter * torch.tensor([3.0, 4.0])).sum()))
    assert gate.step().grad_norm == 5
    return gate, parameter, optimizer


def with_gradient(parameter, value):
    """A finite loss whose gradient is ``value`` in one entry."""
    total = parameter.sum()
    total.register_hook(lambda grad: grad * value)
    return Loss(total)


def state_of(parameter, optimizer):
    return parameter.detach().clone(), copy.deepcopy(optimizer.state_dict())


def assert_same_state(parameter, optimizer, before):
    assert torch.equal(parameter, before[0])
    now = optimizer.state_dict()
    for key, value in before[1]["state"][0].items():
        assert torch.equal(now["state"][0][key], value), key


def test_a_bare_tensor_is_refused_by_name():
    gate, parameter, _ = make_gate()
    with pytest.raises(TypeError, match=r"NonFiniteGate: backward takes LossOutput.*got tensor"):
        unwrap(NonFiniteGate.backward)(gate, parameter.sum())  # as without the types' own checks


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_L01_a_step_that_is_not_finite_changes_nothing(where, value):
    gate, parameter, optimizer = make_gate()
    before = state_of(parameter, optimizer)
    good = Loss(parameter.sum())
    gate.backward(good)
    gate.backward(
        Loss(parameter.sum() * value) if where == "loss" else with_gradient(parameter, value)
    )
    outcome = gate.step()
    assert where in outcome.skipped
    assert math.isnan(outcome.grad_norm)
    assert_same_state(parameter, optimizer, before)
    assert parameter.grad is None
    assert (gate.num_steps, gate.num_not_finite) == (2, 1)
    # The next one is a step as if nothing had been.
    gate.backward(Loss(parameter.sum()))
    assert gate.step().skipped == ""
    assert not torch.equal(parameter, before[0])


def test_L01_ends_the_run_only_when_it_keeps_happening(tmp_path):
    gate, parameter, _ = make_gate(max_skipped_in_a_row=2)

    def bad():
        gate.backward(Loss(parameter.sum() * math.nan))
        return gate.step()

    for _ in range(3):  # never three in a row
        bad(), bad()
        gate.backward(Loss(parameter.sum()))
        gate.step()
    bad(), bad()
    with pytest.raises(NonFiniteStepError, match=r"3 optimizer steps.*loss_objective nan"):
        bad()


def test_L01_the_batch_is_kept_to_look_at(make_scorer, make_batch, tmp_path):
    scorer = make_scorer()
    loss = GRPOLoss(scorer, kl_to_ref_coeff=0.1)
    optimizer = torch.optim.SGD(scorer.parameters(), lr=0.1)
    gate = NonFiniteGate(optimizer, dump_dir=tmp_path / "bad")
    batch = make_batch()
    for row in batch.unbind(0):
        row["next", "ref_log_probs", "full"].fill_(math.nan)
    packed = loss.pack(batch)
    before = scorer.table.detach().clone()
    for part in packed.micro_batches(num_rows=4):
        gate.backward(loss(part), part)
    outcome = gate.step()
    assert torch.equal(scorer.table, before)
    assert outcome.dump == tmp_path / "bad" / "step_1.safetensors"
    with safe_open(outcome.dump, "pt") as file:
        assert "loss_kl_to_ref" in file.metadata()["reason"]
        ids = torch.cat([file.get_tensor(f"{i}.ids") for i in range(2)])
        assert torch.equal(ids, packed.ids)
        assert file.get_tensor("0.entries.ref_log_probs").isnan().all()


def test_a_batch_with_images_and_recorded_sets_is_kept_too(make_scorer, make_batch, tmp_path):
    scorer = make_scorer()
    packed = GRPOLoss(scorer).pack(make_batch())
    sets = SamplingMasks.from_ids([[1, 3]] * packed.num_targets, vocab_size=8)
    images = [["aGk="], *[[] for _ in range(packed.num_rows - 1)]]
    packed = dataclasses.replace(packed, sampling_masks=sets, images=images)
    gate = NonFiniteGate(torch.optim.SGD(scorer.parameters(), lr=0.1), dump_dir=tmp_path)
    gate.backward(Loss(scorer.table.sum() * math.nan), packed)
    with safe_open(gate.step().dump, "pt") as file:
        lengths, data = (file.get_tensor(f"0.sampling_masks.{x}") for x in ("lengths", "data"))
        assert SamplingMasks(data, lengths).kept(8)[:, [1, 3]].all()
        assert json.loads(bytes(file.get_tensor("0.images").tolist())) == images


def test_L02_a_step_without_a_gradient_leaves_the_momentum_alone():
    gate, parameter, optimizer = make_gate()
    before = state_of(parameter, optimizer)
    gate.backward(Loss(torch.zeros((), requires_grad=True)))
    assert gate.step().skipped == "no gradient"
    assert_same_state(parameter, optimizer, before)
    assert gate.num_not_finite == 0


def test_gradients_are_clipped_to_the_norm():
    parameter = torch.nn.Parameter(torch.zeros(2))
    gate = NonFiniteGate(torch.optim.SGD([parameter], lr=1.0), max_grad_norm=0.5)
    gate.backward(Loss((parameter * torch.tensor([3.0, 4.0])).sum()))
    assert gate.step().grad_norm == 5
    torch.testing.assert_close(parameter.detach(), torch.tensor([-0.3, -0.4]))


@pytest.mark.parametrize(
    ("options", "hint"),
    [({"max_grad_norm": 0.0}, "max_grad_norm"), ({"max_skipped_in_a_row": -1}, "in_a_row")],
    ids=["norm 0", "negative count"],
)
def test_settings_out_of_range_raise(options, hint):
    with pytest.raises(ValueError, match=hint):
        NonFiniteGate(torch.optim.SGD([torch.zeros(1)], lr=1.0), **options)


def test_a_step_of_which_every_gradient_is_0_changes_nothing(make_scorer, make_batch):
    """No row has an advantage: momentum and weight decay alone would move the parameters."""
    scorer = make_scorer()
    loss = GRPOLoss(scorer)
    optimizer = torch.optim.AdamW(scorer.parameters(), lr=0.1, weight_decay=0.1)
    gate = NonFiniteGate(optimizer)
    gate.backward(loss(make_batch()))
    assert gate.step().skipped == ""
    before = state_of(scorer.table, optimizer)
    for _ in range(4):
        flat = loss(make_batch(advantages=[0.0] * 6))
        gate.backward(flat)
        outcome = gate.step()
        assert (outcome.skipped, outcome.grad_norm) == ("every gradient is 0", 0)
        assert flat.signal_fraction == 0
    assert_same_state(scorer.table, optimizer, before)
    gate.backward(loss(make_batch()))
    assert gate.step().skipped == ""
    assert not torch.equal(scorer.table, before[0])


def test_gradients_from_before_are_no_part_of_the_first_step():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    (3 * parameter).sum().backward()
    with pytest.raises(ValueError, match="1 parameters have gradients of an earlier training"):
        NonFiniteGate(optimizer)
    optimizer.zero_grad(set_to_none=False)
    NonFiniteGate(optimizer)


def test_a_step_without_a_token_says_so(make_scorer, make_batch, caplog):
    scorer, batch = make_scorer(), make_batch()
    batch = batch[[0, 3]]  # those that were cut, by the seed of their rows
    assert bool(batch["truncated"].all())
    gate = NonFiniteGate(torch.optim.SGD(scorer.parameters(), lr=0.1))
    loss = GRPOLoss(scorer, filters=TokenFilters(drop_truncated=True))
    before = scorer.table.detach().clone()
    for number in range(3):
        packed = loss.pack(batch)
        window = None if number == 0 else loss.measure_window(packed)
        for part in [packed] if window is None else packed.micro_batches(num_rows=1):
            gate.backward(loss(part, window=window), part)
        assert gate.step().skipped == "a filter of the loss left no token (kept_fraction is 0)"
    assert torch.equal(scorer.table, before)
    assert caplog.text.count("no signal in 1 window(s): TokenFilters(") == 1

    for row in batch.unbind(0):
        row["masks", "all_assistant_mask"] = row["masks", "all_assistant_mask"] & False
    plain = GRPOLoss(scorer)
    for _ in range(3):
        packed = plain.pack(batch)
        gate.backward(plain(packed, window=plain.measure_window(packed)), packed)
        assert gate.step().skipped == "no token was trained"
    assert caplog.text.count("no token of the 2 rows of the window is trained") == 2  # 1st and 2nd

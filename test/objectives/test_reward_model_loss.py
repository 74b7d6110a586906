"""``RewardModelLoss``: values by hand, against TRL's formula, over micro-batches, and refusals."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from objectives import MixedLoss, RewardModelLoss, RewardModelLossOutput
from objectives.losses.window import Window
from torchrl_data.missing_entry import MissingEntryError

TURNS = (((5, 0),), ((1, 2), (3, 1)), ((2, 0),), ((4, 3), (1, 1)), ((6, 2),), ((1, 0),))


class LastToken(torch.nn.Module):
    """A real, small reward model: a number for the last token, and one for the first."""

    def __init__(self, table=None):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(11, 2, generator=generator, dtype=torch.float64)
        self.table = torch.nn.Parameter(drawn if table is None else table)

    def reward_packed(self, ids, lengths):
        ends = lengths.cumsum(0)
        return self.table[ids[ends - 1], 0] + self.table[ids[ends - lengths], 1]


@pytest.fixture
def pairs(make_row):
    rows = []
    for number, turns in enumerate(TURNS):
        row = make_row(number, turns=turns)
        row["pair_id"] = torch.tensor([7 + number // 2])
        row["chosen"] = torch.tensor([number % 2 == 0])
        rows.append(row)
    return lazy_stack(rows)


def with_rewards(pairs, rewards):
    """The batch, and a model that gives its rows these rewards."""
    table = torch.zeros(11, 2, dtype=torch.float64)
    table[: len(rewards), 0] = torch.tensor(rewards, dtype=torch.float64)
    rows = [row.clone() for row in pairs[: len(rewards)].unbind(0)]
    for number, row in enumerate(rows):
        row["tokens", "full"][-1] = number
    return lazy_stack(rows), LastToken(table)


def test_values_by_hand(pairs):
    rows, model = with_rewards(pairs, [2.0, 1.0, -1.0, 1.0, 0.5, 0.5])
    output = RewardModelLoss(model, center_coeff=0.01)(rows)
    # Differences 1, -2 and 0; sums 3, 0 and 1.
    softplus = [math.log(1 + math.exp(-x)) for x in (1, -2, 0)]
    assert output.loss_reward.item() == pytest.approx(sum(softplus) / 3)
    assert output.loss_center.item() == pytest.approx(0.01 * (9 + 0 + 1) / 3)
    assert output.total().item() == pytest.approx(sum(softplus) / 3 + 0.1 / 3)
    assert output.accuracy.item() == pytest.approx((1 + 0 + 0.5) / 3)
    assert output.chosen_reward.item() == pytest.approx(0.5)
    assert output.rejected_reward.item() == pytest.approx(2.5 / 3)
    assert (output.num_pairs, output.num_sequences) == (3, 6)
    RewardModelLoss(model)(rows).total().backward()
    slopes = [-1 / (1 + math.exp(x)) / 3 for x in (1, -2, 0)]
    due = [slope * sign for slope in slopes for sign in (1, -1)]
    assert model.table.grad[:6, 0].tolist() == pytest.approx(due)


def test_margin_and_smoothing(pairs):
    rows, model = with_rewards(pairs, [2.0, 1.0])
    by_margin = RewardModelLoss(model, margin=3.0)(rows)  # -log sigmoid(1 - 3)
    assert by_margin.total().item() == pytest.approx(math.log(1 + math.exp(2)))
    smooth = RewardModelLoss(model, label_smoothing=0.1)(rows)
    right, wrong = math.log(1 + math.exp(-1)), math.log(1 + math.exp(1))
    assert smooth.total().item() == pytest.approx(0.9 * right + 0.1 * wrong)
    assert smooth.loss_center is None


def test_each_pair_may_have_a_margin_of_its_own(pairs):
    rows, model = with_rewards(pairs, [2.0, 1.0, -1.0, 1.0, 0.5, 0.5])
    for number, row in enumerate(rows.unbind(0)):
        row["margin"] = torch.tensor([(0.0, 1.5, 2.0)[number // 2]])
    output = RewardModelLoss(model, margin=0.5)(rows)
    # Differences 1, -2 and 0, less 0.5, 2 and 2.5.
    due = sum(math.log(1 + math.exp(-x)) for x in (0.5, -4, -2.5)) / 3
    assert output.total().item() == pytest.approx(due)
    assert output.accuracy.item() == pytest.approx((1 + 0 + 0.5) / 3)  # of rewards as they are
    assert output.chosen_reward.item() == pytest.approx(0.5)


@settings(deadline=None)
@given(st.integers(1, 60), st.booleans(), st.floats(0, 1))
def test_micro_batches_hold_whole_pairs_and_add_up(limit, shared, center):
    pairs = lazy_stack(four_pairs())
    model = LastToken()
    loss = RewardModelLoss(model, center_coeff=center)
    whole = loss(pairs)
    whole.total().backward()
    due, model.table.grad = model.table.grad.clone(), None
    packed, outputs = loss.pack(pairs), []
    window = loss.measure_window(packed)
    for part in packed.micro_batches(max_tokens=limit, count_shared_once=shared):
        assert part.num_rows % 2 == 0
        outputs.append(loss(part, window=window))
        outputs[-1].total().backward()
    torch.testing.assert_close(model.table.grad, due)
    combined = RewardModelLossOutput.combine(outputs)
    for name, value in whole.items():
        torch.testing.assert_close(combined.get(name), value.detach())
    assert loss(packed.run(0, 0), window=window).total().item() == 0


def four_pairs():
    generator, rows = torch.Generator().manual_seed(1), []
    for number in range(8):
        size = 3 + 2 * (number % 3)
        ids = torch.randint(11, (size,), generator=generator)
        mask = torch.arange(size) > 1
        row = TensorDict({"tokens": {"full": ids}, "masks": {"all_assistant_mask": mask}})
        row["pair_id"] = torch.tensor([number // 2])
        row["chosen"] = torch.tensor([number % 2 == 0])
        row["margin"] = torch.tensor([number // 2 / 2])
        rows.append(row)
    return rows


def test_a_scorer_of_tokens_gives_no_rewards(make_scorer, unchecked):
    with pytest.raises(TypeError, match=r"RewardModelLoss needs a model with a reward_packed"):
        RewardModelLoss(make_scorer())


def test_what_is_refused(pairs):
    loss = RewardModelLoss(LastToken())
    with pytest.raises(ValueError, match=r"RewardModelLoss takes pairs, two rows each, .* 5 rows"):
        loss(lazy_stack(pairs[:5].unbind(0)))
    with pytest.raises(ValueError, match=r"rows 2 and 3 .*chosen False and True"):
        loss(lazy_stack(pairs[[0, 1, 3, 2]].unbind(0)))
    with pytest.raises(MissingEntryError, match="pair_id"):
        loss(pairs.exclude("pair_id"))
    for name, value in {"margin": -1.0, "center_coeff": -1.0, "label_smoothing": 0.5}.items():
        with pytest.raises(ValueError, match=name):
            RewardModelLoss(LastToken(), **{name: value})
    # What has no effect on a reward does not exist.
    with pytest.raises(TypeError, match="no setting 'masking_strategy'"):
        RewardModelLoss(LastToken(), masking_strategy="all")
    with pytest.raises(TypeError, match="a RewardModelLoss, which trains a model of its own"):
        MixedLoss({"ce": loss})
    loss.margin = 2.0
    assert loss.options.margin == 2.0
    assert loss.of_rewards(loss.pack(pairs), torch.zeros(6), Window(1, 6)).accuracy == 0.5

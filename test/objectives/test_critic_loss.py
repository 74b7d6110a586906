"""A critic's part: advantages by its values, its loss, and the batch that it shares."""

import math

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from objectives import GAE, CriticLoss, CriticLossOutput, GRPOLoss, MixedLoss, SFTLoss
from torchrl_data.missing_entry import MissingEntryError

TOKENS, MASK = ("tokens", "full"), ("masks", "all_assistant_mask")
LOG_PROBS = ("log_probs", "full")


class Ladder(torch.nn.Module):
    """A critic by hand: a slope times the number of tokens before the one that is sampled."""

    def __init__(self):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor(0.25))

    def value_packed(self, ids, lengths, target_mask):
        place = torch.cat([torch.arange(n) for n in lengths.tolist()])
        return self.slope * place[target_mask]


def row(mask, reward, **more):
    return TensorDict(
        {
            TOKENS: torch.arange(1, len(mask) + 1) % 7,
            MASK: torch.tensor(mask).bool(),
            "reward": torch.as_tensor(reward).float().reshape(-1, 1),
            LOG_PROBS: torch.full((len(mask),), -1.0),
            **more,
        }
    )


def valued(*rows):
    batch = lazy_stack(list(rows))
    for each in batch.unbind(0):
        count = len(each[TOKENS])
        each["state_value"] = 0.25 * torch.arange(count).float()[:, None]
    return batch


def test_a_row_has_its_reward_at_its_last_sampled_token():
    batch = GAE(lmbda=1.0)(valued(row([0, 1, 0, 1, 0], 1.0), row([0, 0, 1], 0.5)))
    advantage, target = (
        [row[key].flatten().tolist() for row in batch.unbind(0)]
        for key in ("advantage", "value_target")
    )
    assert advantage == [[0, 0.75, 0, 0.25, 0], [0, 0, 0]]
    assert target == [[0, 1, 0, 1, 0], [0, 0, 0.5]]


def test_the_critic_learns_by_a_lambda_of_its_own():
    batch = GAE(lmbda=0.0, value_lmbda=1.0)(valued(row([0, 1, 1], 1.0)))
    assert batch["advantage"].flatten().tolist() == [0, 0.25, 0.5]
    assert batch["value_target"].flatten().tolist() == [0, 1, 1]


def test_dense_rewards_count_where_they_are_given():
    """The second is a tool's answer, which belongs to the token before it."""
    batch = GAE(lmbda=1.0, gamma=0.5)(valued(row([0, 1, 0, 1], [0.0, 0.0, 2.0, 4.0])))
    assert batch["advantage"].flatten().tolist() == [0, 2 + 0.5 * 4 - 0.25, 0, 4 - 0.75]


def test_a_row_without_a_reward_teaches_neither():
    lost = row([0, 1, 1], math.nan)
    told = row([0, 1, 1], 1.0, scorable=torch.tensor([False]))
    batch = GAE(average_gae=True)(valued(row([0, 1, 1], 1.0), lost, told))
    for bad in batch.unbind(0)[1:]:
        assert not bad["advantage"].any()
        assert bad["value_target"].flatten().isnan().tolist() == [False, True, True]
    # The two tokens of the first row alone have mean 0 and deviation 1.
    assert batch[0]["advantage"].flatten()[1:].sum() == pytest.approx(0, abs=1e-6)
    assert batch[0]["advantage"].flatten()[1:].std() == pytest.approx(1)
    critic = Ladder()
    CriticLoss(critic)(batch[1:]).total().backward()
    assert critic.slope.grad == 0


def test_padded_rows_have_the_numbers_of_ragged_ones():
    ragged = valued(row([0, 1, 0, 1, 0], 1.0), row([0, 0, 1], 0.5))
    columns = {}
    for key in (TOKENS, MASK, "state_value", LOG_PROBS):
        parts = [each[key] for each in ragged.unbind(0)]
        columns[key] = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    columns["masks", "all_attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    columns["reward"] = torch.tensor([1.0, 0.5]).view(2, 1, 1)
    padded = TensorDict(columns, batch_size=[2])
    gae = GAE(lmbda=0.5, average_gae=True)
    ragged, padded = gae(ragged), gae(padded)
    for i, n in enumerate((5, 3)):
        torch.testing.assert_close(padded[i]["advantage"][:n], ragged[i]["advantage"])
    losses = [CriticLoss(Ladder())(batch).total() for batch in (ragged, padded)]
    torch.testing.assert_close(*losses)


def test_what_can_not_be_judged_is_refused(unchecked):
    batch = valued(row([0, 1, 1], 1.0))
    with pytest.raises(ValueError, match=r"GAE: lmbda must .*\[0, 1\], got 1.5"):
        GAE(lmbda=1.5)
    with pytest.raises(ValueError, match=r"batch \[B\] of one row per trajectory"):
        GAE()(batch[0])
    with pytest.raises(MissingEntryError, match="Give GAE the critic, value_network="):
        GAE()(lazy_stack([row([0, 1], 1.0)]))
    with pytest.raises(ValueError, match=r"'reward' has 2 values in row 0, whose .* has 3"):
        GAE()(valued(row([0, 1, 1], [1.0, 0.0])))
    several = row([0, 1, 1], [0.0, 0.0, 1.0], num_segments=torch.tensor(2))
    with pytest.raises(ValueError, match="dense in an episode of several rows"):
        GAE()(valued(several))
    with pytest.raises(TypeError, match="needs a model with a value_packed method"):
        CriticLoss(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"temperature=0\.5 divides logits"):
        CriticLoss(Ladder(), temperature=0.5)
    with pytest.raises(TypeError, match="is a CriticLoss, which trains a model of its own"):
        MixedLoss({"critic": CriticLoss(Ladder())})


def test_the_loss_is_the_same_in_any_parts_and_beside_the_policys(make_scorer):
    """Value and gradient by hand: errors 1 - slope * place over the four sampled tokens."""
    rows = [row([0, 1, 1], 1.0), row([0, 0, 1, 1], 0.0)]
    batch = GAE(lmbda=1.0)(valued(*rows))
    critic, scorer = Ladder(), make_scorer()
    loss, policy = CriticLoss(critic, loss_critic_type="l2", clip_value=9.0), GRPOLoss(scorer)
    packed = policy.pack(batch, also=[loss])
    assert packed.entries.keys() >= {"advantage", "value_target", "state_value"}
    window = loss.measure_window(packed)
    outputs = [loss(part, window=window) for part in packed.micro_batches(num_rows=1)]
    whole = CriticLossOutput.combine(outputs)
    for output in outputs:
        output.total().backward()
    errors = [0.25 * 1 - 1, 0.25 * 2 - 1, 0.25 * 2, 0.25 * 3]
    places = [1, 2, 2, 3]
    assert whole.loss_critic == pytest.approx(sum(e * e / 2 for e in errors) / 4)
    slope = sum(e * p for e, p in zip(errors, places, strict=True)) / 4
    assert float(critic.slope.grad) == pytest.approx(slope)
    # Targets 1, 1, 0, 0 have variance 1/4.
    mean_square = sum(e * e for e in errors) / 4
    assert whole.explained_variance == pytest.approx(1 - mean_square / 0.25)
    assert bool(CriticLoss(Ladder())(batch[:1]).explained_variance.isnan())
    with pytest.raises(ValueError, match="masking_strategy='all', not 'assistant'"):
        policy.pack(batch, also=[SFTLoss(scorer, masking_strategy="all")])
    with pytest.raises(MissingEntryError, match="value_target"):
        loss(policy.pack(batch))

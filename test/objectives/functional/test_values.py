"""Advantages by a critic's values, beside TorchRL's, and the critic's loss."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrl.objectives.value.functional import generalized_advantage_estimate

import objectives.functional as F

ROWS = st.lists(
    st.lists(st.tuples(st.booleans(), st.floats(-2, 2), st.floats(-2, 2)), max_size=12),
    min_size=1,
    max_size=4,
)


def of_sampled_tokens(row, gamma, lmbda):
    """TorchRL's, over the sampled tokens of one row; rewards between go to the one before."""
    at = [i for i, (sampled, _, _) in enumerate(row) if sampled]
    if not at:
        return []
    reward = torch.zeros(1, len(at), 1, dtype=torch.float64)
    for i, (_, given_here, _) in enumerate(row):
        reward[0, max(sum(place <= i for place in at) - 1, 0)] += given_here
    value = torch.tensor([row[i][2] for i in at], dtype=torch.float64).view(1, -1, 1)
    later = torch.cat([value[:, 1:], torch.zeros(1, 1, 1, dtype=torch.float64)], 1)
    done = torch.zeros(1, len(at), 1, dtype=torch.bool)
    done[:, -1] = True
    found, _ = generalized_advantage_estimate(gamma, lmbda, value, later, reward, done, done)
    return found.flatten().tolist()


@given(rows=ROWS, gamma=st.floats(0, 1), lmbda=st.floats(0, 1), padded=st.booleans())
def test_it_is_torchrls_over_the_sampled_tokens_of_each_row(rows, gamma, lmbda, padded):
    lengths = torch.tensor([len(row) for row in rows])
    width = max(int(lengths.max()), 1)
    # What is not sampled has no value, and padding nothing at all.
    table = [
        [(s, r, v if s else math.nan) for s, r, v in row]
        + [(False, 0.0, math.nan)] * (width - len(row) if padded else 0)
        for row in rows
    ]
    flat = [each for row in table for each in row]
    shape = (len(rows), width) if padded else (len(flat),)
    mask = torch.tensor([each[0] for each in flat], dtype=torch.bool).view(shape)
    reward, value = (
        torch.tensor([each[i] for each in flat], dtype=torch.float64).view(shape) for i in (1, 2)
    )
    found = F.generalized_advantage(
        reward, value, mask, None if padded else lengths, gamma=gamma, lmbda=lmbda
    )
    assert not found[~mask].any()
    expected = [x for row in rows for x in of_sampled_tokens(row, gamma, lmbda)]
    # TorchRL's discounts are float32.
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found[mask], expected, rtol=1e-5, atol=1e-6)


def test_an_answer_of_a_tool_is_no_step():
    """Two turns of one token, gamma 1/2: V = 4 and 6, reward 8 between them and 2 at the end."""
    mask = torch.tensor([False, True, False, False, True, False])
    reward = torch.tensor([0.0, 0.0, 8.0, 0.0, 0.0, 2.0])
    value = torch.tensor([9.0, 4.0, 9.0, 9.0, 6.0, 9.0])
    lengths = torch.tensor([6])
    one = F.generalized_advantage(reward, value, mask, lengths, gamma=0.5, lmbda=0.0)
    assert one.tolist() == [0, 8 + 0.5 * 6 - 4, 0, 0, 2 - 6, 0]
    whole = F.generalized_advantage(reward, value, mask, lengths, gamma=0.5, lmbda=1.0)
    assert whole.tolist() == [0, 8 + 0.5 * 2 - 4, 0, 0, 2 - 6, 0]


@pytest.mark.parametrize(
    ("kind", "clip", "expected"),
    [
        ("l2", None, [4.5, 0.125]),
        ("l1", None, [3.0, 0.5]),
        ("smooth_l1", None, [2.5, 0.125]),
        # Within 0.25 of the old values 0 and 1: 0.25 and 0.75, of which the first is worse.
        ("l2", 0.25, [0.5 * 3.75**2, 0.125]),
    ],
)
def test_the_loss_of_each_kind(kind, clip, expected):
    value, target = torch.tensor([1.0, 0.5]), torch.tensor([4.0, 1.0])
    old = torch.tensor([0.0, 1.0])
    found = F.value_loss(value, target, old, clip_value=clip, loss_type=kind)
    assert found.tolist() == expected


def test_a_clipped_value_has_no_gradient_towards_its_target():
    """The first was moved up by 1 and has to go on up, the second has to come back."""
    value = torch.tensor([1.0, 1.0], requires_grad=True)
    old = torch.zeros(2)
    F.value_loss(
        value, torch.tensor([2.0, -2.0]), old, clip_value=0.2, loss_type="l2"
    ).sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [0.0, 3.0]
    with pytest.raises(ValueError, match="clip_value needs old_value"):
        F.value_loss(value, value, clip_value=0.2)

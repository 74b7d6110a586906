"""Every advantage of ``objectives.functional`` against the slow reference."""

import math

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import objectives.functional as F

fast = settings(deadline=None, derandomize=True)
rewards = st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, -3.0]))


@st.composite
def rollouts(draw):
    size = draw(st.integers(1, 9))
    groups = [draw(st.sampled_from([7, -2, 40])) for _ in range(size)]
    return [draw(rewards) for _ in groups], groups


def as_tensors(values, groups):
    missing = [math.nan, math.inf, -math.inf]
    filled = [missing[i % 3] if v is None else v for i, v in enumerate(values)]
    return torch.tensor(filled, dtype=torch.float64), torch.tensor(groups)


@fast
@given(case=rollouts(), order=st.randoms(use_true_random=False))
def test_advantages_any_order(slow, case, order):
    values, groups = case
    reward, group = as_tensors(values, groups)
    shuffled = list(range(len(values)))
    order.shuffle(shuffled)
    expected = {
        "group": slow.group_advantage(values, groups),
        "batch": slow.group_advantage(values, groups, "batch"),
        "none": slow.group_advantage(values, groups, "none"),
    }
    for scale, want in expected.items():
        want = torch.tensor(want, dtype=torch.float64)
        torch.testing.assert_close(F.group_advantage(reward, group, scale=scale), want)
        mixed = F.group_advantage(reward[shuffled], group[shuffled], scale=scale)
        torch.testing.assert_close(mixed, want[shuffled])
    rloo = F.rloo_advantage(reward, group)
    torch.testing.assert_close(rloo, torch.tensor(slow.rloo(values, groups), dtype=torch.float64))
    valid = torch.tensor([v is not None for v in values])
    finite = reward.nan_to_num(5.0, 5.0, 5.0)
    torch.testing.assert_close(
        F.group_advantage(finite, group, valid), F.group_advantage(reward, group)
    )


@fast
@given(case=rollouts(), data=st.data())
def test_maxrl_and_relative_length(slow, case, data):
    values, groups = case
    values = [None if v is None else abs(v) for v in values]
    reward, group = as_tensors(values, groups)
    want = torch.tensor(slow.maxrl(values, groups), dtype=torch.float64)
    torch.testing.assert_close(F.maxrl_advantage(reward, group), want)
    valid = torch.tensor([v is not None for v in values])
    finite = reward.nan_to_num(5.0, 5.0, 5.0)
    torch.testing.assert_close(F.maxrl_advantage(finite, group, valid), want)
    lengths = [data.draw(st.integers(0, 5)) for _ in groups]
    share = F.relative_length(torch.tensor(lengths), group)
    torch.testing.assert_close(share, torch.tensor(slow.relative_length(lengths, groups)))


def test_maxrl_weighs_a_success_by_its_rarity():
    """One of four: (1 - 1/4) / (1/4) = 3, and -1 for each failure; without a success 0."""
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    reward = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert F.maxrl_advantage(reward, group).tolist() == [3, -1, -1, -1, 0, 0]
    assert F.maxrl_advantage(-reward, group).tolist() == [0] * 6


@fast
@given(case=rollouts(), data=st.data())
def test_gdpo(slow, case, data):
    values, groups = case
    second = [data.draw(rewards) for _ in groups]
    columns = [as_tensors(column, groups)[0] for column in (values, second)]
    weights = torch.tensor([0.3, 2.0], dtype=torch.float64)
    got = F.gdpo_advantage(torch.stack(columns, 1), torch.tensor(groups), weights)
    want = slow.gdpo([values, second], groups, weights.tolist())
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))


@fast
@given(success=st.lists(st.booleans(), min_size=1, max_size=8), k=st.integers(1, 4), data=st.data())
def test_pass_at_k_equals_enumeration(slow, success, k, data):
    groups = [data.draw(st.sampled_from([1, 2])) for _ in success]
    got = F.pass_at_k_advantage(torch.tensor(success), torch.tensor(groups), k=k)
    want = torch.tensor(slow.pass_at_k(success, groups, k), dtype=torch.float64)
    # The function computes in float64 and gives float32.
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


masks_of_rows = st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=4)


@fast
@given(masks=masks_of_rows)
@example(masks=[[True, False, True], [False, True, True, False, True], [], [False]])
def test_turn_index(masks):
    number, want = -1, []
    for mask in masks:
        turns_begun = 0
        for i, now in enumerate(mask):
            begins = now and (i == 0 or not mask[i - 1])
            turns_begun += begins
            # The first turn of a row reaches back to the row's beginning.
            number += i == 0 or (begins and turns_begun > 1)
            want.append(number)
    flat = torch.tensor([now for mask in masks for now in mask], dtype=torch.bool)
    got = F.turn_index(flat, torch.tensor([len(mask) for mask in masks]))
    assert got.tolist() == want


@fast
@given(data=st.data())
def test_turn_advantage(slow, data):
    rows, masks, groups = [], [], []
    for _ in range(data.draw(st.integers(1, 4))):
        mask = data.draw(st.lists(st.booleans(), max_size=6))
        masks.append(mask)
        groups.append(data.draw(st.sampled_from([3, 5])))
        scored = data.draw(st.sampled_from([True, True, False]))
        rows.append(
            [data.draw(st.sampled_from([0.0, 1.0, -0.5])) for _ in mask] if scored else None
        )
    dense = [
        x for row, mask in zip(rows, masks, strict=True) for x in row or [math.nan] * len(mask)
    ]
    got = F.turn_advantage(
        torch.tensor(dense, dtype=torch.float64),
        torch.tensor([m for mask in masks for m in mask], dtype=torch.bool),
        torch.tensor([len(mask) for mask in masks]),
        torch.tensor(groups),
        torch.tensor([row is not None for row in rows]),
    )
    want = [x for row in slow.turn_advantage(rows, masks, groups) for x in row]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))


def test_turns_that_are_worth_the_same_have_advantage_exactly_0():
    """Though the mean of seven 0.1 is not 0.1 in float32."""
    lengths, reward = torch.ones(7, dtype=torch.int64), torch.full((7,), 0.1)
    group = torch.zeros_like(lengths)
    assert (torch.zeros(1).index_add(0, group, reward) / 7).item() != reward[0].item()
    got = F.turn_advantage(reward, torch.ones(7, dtype=torch.bool), lengths, group)
    assert got.tolist() == [0] * 7


def test_no_rollouts_have_no_advantages():
    none, group = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    for scale in F.SCALES:
        assert F.group_advantage(none, group, scale=scale).shape == (0,)
    assert F.gdpo_advantage(torch.zeros(0, 2), group, torch.ones(2)).shape == (0,)
    assert F.rloo_advantage(none, group).shape == (0,)
    assert F.pass_at_k_advantage(none > 0, group, k=2).shape == (0,)
    assert F.turn_advantage(none, none > 0, group, group).shape == (0,)

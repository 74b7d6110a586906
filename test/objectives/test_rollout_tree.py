"""Credit over a tree of rollouts, by hand and against a reading of every path."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from objectives import (
    BatchMean,
    FunctionCredit,
    GroupMean,
    LeaveOneOut,
    LengthPenalty,
    MCAdvantage,
    RolloutTreeCredit,
)
from torchrl_data.missing_entry import MissingEntryError


def row(number, parent, num_tokens, length, reward):
    """A rollout of a group that left another one after so many tokens."""
    return TensorDict(
        {
            "reward": torch.tensor([[float(reward)]]),
            "scorable": torch.tensor([not math.isnan(reward)]),
            "group_id": torch.tensor(0),
            "episode_id": torch.tensor(number),
            "branched_from": torch.tensor(parent),
            "branched_tokens": torch.tensor(num_tokens),
            "tokens": TensorDict({"full": torch.arange(length)}),
        }
    )


def advantages(rows, **options):
    options = {"estimator": GroupMean(scale="none"), **options}
    given = MCAdvantage(len(rows), estimator=RolloutTreeCredit(**options)).inv(lazy_stack(rows))
    assert given is not None
    return [each["advantage"].flatten().tolist() for each in given.unbind(0)]


ROWS = [
    (10, -1, 0, 10, 1),
    (11, -1, 0, 6, 0),
    (12, 10, 4, 9, 1),
    (13, 10, 7, 9, 0),
    (14, 12, 6, 8, 0),
]
"""Two roots; 12 and 13 leave 10, and 14 leaves 12. The mean is 0.4: better is 0.6, worse -0.4."""


def test_a_token_has_the_sum_of_the_rollouts_that_it_is_a_part_of():
    found = advantages([row(*each) for each in ROWS])
    expected = [
        [0.4] * 4 + [0.2] * 3 + [0.6] * 3,  # 10, 12, 13 and 14; then 10 and 13; then 10
        [-0.4] * 6,
        [0.0] * 4 + [0.2] * 2 + [0.6] * 3,  # 12 and 14; then 12
        [0.0] * 7 + [-0.4] * 2,
        [0.0] * 6 + [-0.4] * 2,
    ]
    for own, wanted in zip(found, expected, strict=True):
        assert own == pytest.approx(wanted, abs=1e-6)


def test_siblings_say_what_else_becomes_of_the_episode():
    found = advantages([row(*each) for each in ROWS], baseline="siblings")
    expected = [
        # All but 11, whose advantage is -0.4: 2 * 1.0; 10 and 13 beside 12 and 14; 10 beside 13.
        [2.0] * 4 + [0.0] * 3 + [1.0] * 3,
        [-0.5] * 6,  # beside the four others, of mean 0.1
        [0.0] * 4 + [0.0] * 2 + [1.0] * 3,
        [0.0] * 7 + [-1.0] * 2,
        [0.0] * 6 + [-1.0] * 2,
    ]
    for own, wanted in zip(found, expected, strict=True):
        assert own == pytest.approx(wanted, abs=1e-6)


def a_tree(seed, size):
    """Rollouts of a group, each with the tokens of its path as (who drew it, place)."""
    rng, rows, paths = random.Random(seed), [], []
    for number in range(size):
        parent = rng.randrange(number) if number and rng.random() < 0.7 else -1
        first = 0 if parent < 0 else rows[parent][2]
        room = [] if parent < 0 else range(first + 1, len(paths[parent]))
        if not room:
            parent, start = -1, 0
        else:
            start = rng.choice(room)
        length = start + rng.randint(1, 6)
        reward = rng.choice([0.0, 0.25, 1.0, math.nan])
        rows.append((number, parent, start, length, reward))
        before = paths[parent][:start] if parent >= 0 else []
        paths.append([*before, *((number, place) for place in range(start, length))])
    return rows, paths


@given(
    seed=st.integers(0, 10**6),
    size=st.integers(2, 9),
    baseline=st.sampled_from(["group", "siblings"]),
    estimator=st.sampled_from([GroupMean(scale="none"), GroupMean(), LeaveOneOut()]),
)
def test_it_is_what_a_reading_of_all_paths_gives(seed, size, baseline, estimator):
    rows, paths = a_tree(seed, size)
    made = [row(*each) for each in rows]
    plain = MCAdvantage(size, estimator=estimator).inv(lazy_stack(made))
    assert plain is not None
    worth = [float(each["advantage"]) for each in plain.unbind(0)]
    scored = {number for number, *_, reward in rows if not math.isnan(reward)}
    found = advantages(made, baseline=baseline, estimator=estimator)
    for number, _, start, length, _ in rows:
        through = [{n for n in range(size) if token in paths[n]} for token in paths[number]]
        for place in range(start, length):
            begin = place  # of the branch: nobody leaves it on the way
            while begin > start and through[begin - 1] == through[place]:
                begin -= 1
            there = {n for n in range(size) if paths[n][:begin] == paths[number][:begin]}
            others = (there - through[place]) & scored
            base = 0.0
            if baseline == "siblings" and others:
                base = sum(worth[n] for n in others) / len(others)
            wanted = sum(worth[n] - base for n in through[place] & scored)
            assert found[number][place] == pytest.approx(wanted, abs=1e-5)


def test_a_group_without_a_signal_is_left_out():
    rows = [row(0, -1, 0, 4, 1), row(1, 0, 2, 4, 1)]
    part = MCAdvantage(2, credit="tree", zero_variance="drop")
    assert part.inv(lazy_stack(rows)) is None


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: RolloutTreeCredit(estimator=BatchMean()), "adds up advantages of returns"),
        (lambda: RolloutTreeCredit(baseline="none"), "baseline"),
        (lambda: LengthPenalty(coeff=0.1, estimator=RolloutTreeCredit()), "RolloutTreeCredit"),
        (
            lambda: FunctionCredit(function=lambda *_: [], estimator=RolloutTreeCredit()),
            "use another estimator",
        ),
        (lambda: MCAdvantage(2, credit="tree", estimator="gdpo"), "DecoupledSources"),
    ],
)
def test_what_can_not_take_effect_is_refused(build, said):
    with pytest.raises((ValueError, TypeError), match=said):
        build()


def test_rows_have_to_say_which_one_they_left():
    rows = [row(0, -1, 0, 4, 1).exclude("branched_from"), row(1, 0, 2, 4, 0)]
    with pytest.raises(MissingEntryError, match="branched_from"):
        advantages(rows)

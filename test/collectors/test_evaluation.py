"""Estimates of an evaluation: against all subsets, all ways to break a tie, all resamples."""

import math
from collections import Counter
from itertools import combinations, product
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from collectors import (
    bootstrap_interval,
    evaluation_estimates,
    majority_at_n,
    mean_at_n,
    pass_at_k,
    pass_hat_k,
)

fast = settings(deadline=None, derandomize=True)
samples = st.tuples(st.booleans(), st.integers(-1, 3), st.booleans())  # correct, answer, valid
prompts = st.integers(1, 7).flatmap(
    lambda n: st.lists(st.lists(samples, min_size=n, max_size=n), min_size=1, max_size=3)
)


def as_tensors(rows):
    return torch.tensor(rows).unbind(-1)


def check(found, expected):
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found, wanted, equal_nan=True)


@fast
@given(rows=prompts, k=st.integers(1, 8))
def test_pass_estimates_are_means_over_all_subsets(rows, k):
    correct, _, valid = as_tensors([[(int(c), a, int(v)) for c, a, v in row] for row in rows])
    kept = [[c for c, _, v in row if v] for row in rows]
    subsets = [list(combinations(row, k)) for row in kept]
    any_of = [fmean(map(any, each)) if each else math.nan for each in subsets]
    all_of = [fmean(map(all, each)) if each else math.nan for each in subsets]
    check(pass_at_k(correct.bool(), valid.bool(), k=k), any_of)
    check(pass_hat_k(correct.bool(), valid.bool(), k=k), all_of)
    means = [fmean(row) if row else math.nan for row in kept]
    check(mean_at_n(correct.bool(), valid.bool()), means)
    check(pass_at_k(correct.bool(), valid.bool(), k=1), means)


def test_many_samples_lose_no_precision():
    correct = torch.zeros(1, 2000, dtype=torch.bool)
    correct[0, :3] = True
    expected = 1 - math.comb(1997, 1000) / math.comb(2000, 1000)
    assert pass_at_k(correct, k=1000).item() == pytest.approx(expected, rel=1e-12)


@fast
@given(rows=prompts)
def test_a_vote_is_the_mean_over_all_ways_to_break_its_tie(rows):
    """Answers are drawn as a voter would: any of the most frequent, then any of its samples."""
    correct, answer, valid = as_tensors([[(int(c), a, int(v)) for c, a, v in row] for row in rows])
    expected = []
    for row in rows:
        votes = Counter(a for _, a, v in row if v and a >= 0)
        winners = [a for a in votes if votes[a] == max(votes.values())]
        ways = [c for w in winners for c, a, v in row if v and a == w]
        anyone = any(v for _, _, v in row)
        expected.append((fmean(ways) if ways else 0.0) if anyone else math.nan)
    check(majority_at_n(correct.bool(), answer, valid.bool()), expected)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        pytest.param("aab", 1.0, id="most say the right one"),
        pytest.param("abb", 0.0, id="most say a wrong one"),
        pytest.param("ab", 0.5, id="a tie of two"),
        pytest.param("aabbccd", 1 / 3, id="a tie of three"),
        pytest.param("a--", 1.0, id="who has no answer has no vote"),
        pytest.param("--", 0.0, id="nobody has an answer"),
    ],
)
def test_majority_by_hand(answers, expected):
    """The answer a is right."""
    correct = torch.tensor([[each == "a" for each in answers]])
    answer = torch.tensor([["abcd".find(each) for each in answers]])
    assert majority_at_n(correct, answer).item() == pytest.approx(expected)


def test_the_interval_is_that_of_all_resamples():
    values = torch.tensor([0.0, 0.25, 0.5, 1.0])
    every = torch.tensor([fmean(each) for each in product(values.tolist(), repeat=4)])
    low, high = bootstrap_interval(values, level=0.8, num_resamples=40_000)
    # The exact distribution has steps of 1/16.
    assert low == pytest.approx(every.quantile(0.1).item(), abs=1 / 16)
    assert high == pytest.approx(every.quantile(0.9).item(), abs=1 / 16)
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval(torch.ones(3)) == (1.0, 1.0)


def row(group, reward, answer, *, scorable=True, episode=None, segment=0):
    entries = {
        "group_id": torch.tensor(group),
        "reward": torch.tensor([[reward]]),
        "scorable": torch.tensor([scorable]),
        "segment": torch.tensor(segment),
        "answer": torch.tensor(answer),
    }
    if episode is not None:
        entries["episode_id"] = torch.tensor(episode)
    return TensorDict(entries)


def test_estimates_of_rollouts():
    rows = [
        row(5, 1.0, 3, episode=7),  # its helper's answer, which is not that of the episode
        row(9, 0.1, 3),
        row(5, 0.1, 2),
        row(5, 1.0, 1),
        row(5, 1.0, 1, episode=7, segment=1),
        row(9, 1.0, 1, episode=7),  # an episode of another process, with an id of its own
        row(9, 0.0, 3, scorable=False),
    ]
    found = evaluation_estimates(
        lazy_stack(rows), ks=(1, 2, 3), answer_of=lambda row: str(int(row["answer"]))
    )
    values = {name: (estimate.value, estimate.num_prompts) for name, estimate in found.items()}
    assert values == {
        "reward": (pytest.approx((0.7 + 0.55) / 2), 2),
        "mean@3": (pytest.approx((2 / 3 + 1 / 2) / 2), 2),
        "pass@1": (pytest.approx((2 / 3 + 1 / 2) / 2), 2),
        "pass@2": (1.0, 2),
        "pass@3": (1.0, 1),
        "pass^1": (pytest.approx((2 / 3 + 1 / 2) / 2), 2),
        "pass^2": (pytest.approx((1 / 3 + 0) / 2), 2),
        "pass^3": (0.0, 1),
        "maj@3": (pytest.approx((1 + 0.5) / 2), 2),
    }
    assert all(each.low <= each.value <= each.high for each in found.values())
    more = evaluation_estimates(lazy_stack(rows), ks=(1, 4))
    assert more["pass@1"] == found["pass@1"]
    assert more["pass@4"].num_prompts == 0  # no prompt has enough samples
    assert math.isnan(more["pass@4"].value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: pass_at_k(x, k=0), "k must be at least 1, got 0"),
        (lambda x: pass_hat_k(x, x[:1], k=1), r"got \[2, 3\] with valid \[1, 3\]"),
        (lambda x: majority_at_n(x, x[0].long()), r"answer is \[3\]"),
        (lambda _: bootstrap_interval(torch.tensor([math.nan])), "all finite"),
        (lambda _: bootstrap_interval(torch.ones(2), level=95), "level must be in"),
    ],
)
def test_what_makes_no_sense_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.ones(2, 3, dtype=torch.bool))


def rewarded(group, total, **rewards):
    """A rollout of several rewards that are added; NaN of one that does not apply."""
    named = {name: torch.tensor([[value]]) for name, value in rewards.items()}
    return row(group, total, 0).update({"rewards": TensorDict(named)})


SUMMED = [
    rewarded(1, 1.0, valid=1.0, right=0.0),  # valid, but all wrong
    rewarded(1, 2.0, valid=1.0, right=1.0),
    rewarded(2, 0.5, valid=math.nan, right=0.5),
    rewarded(2, 1.0, valid=1.0, right=math.nan),
]


@pytest.mark.parametrize(
    ("solved_by", "mean"),
    [
        ("right", (1 / 2 + 0 / 1) / 2),  # of the second prompt one rollout has no verdict
        ("valid", (2 / 2 + 1 / 1) / 2),
        (["valid", "right"], (1 / 2 + 1 / 2) / 2),  # each that applies
        ("reward", (2 / 2 + 1 / 2) / 2),  # the sum, asked for
    ],
)
def test_solved_is_asked_of_the_reward_that_is_named(solved_by, mean):
    found = evaluation_estimates(lazy_stack(SUMMED), ks=(1,), solved_by=solved_by)
    assert found["mean@2"].value == found["pass@1"].value == pytest.approx(mean)
    assert found["reward"].value == pytest.approx((1.5 + 0.75) / 2)


def test_a_sum_of_rewards_without_a_name_is_refused():
    words = r"the rewards \['right', 'valid'\] are added.* Set solved_by to the reward"
    with pytest.raises(ValueError, match=words):
        evaluation_estimates(lazy_stack(SUMMED), ks=(1,))
    with pytest.raises(
        ValueError, match=r"no rollout has the reward 'rigth'.*\['right', 'valid'\]"
    ):
        evaluation_estimates(lazy_stack(SUMMED), ks=(1,), solved_by="rigth")
    single = [rewarded(1, 0.5, own=1.0), rewarded(1, 0.0, own=0.0)]  # with a weight of a half
    assert evaluation_estimates(lazy_stack(single), ks=(1,))["mean@2"].value == 0.5

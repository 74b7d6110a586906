"""Ways to turn a group into advantages, through a replay buffer's transform."""

import math

import pytest
import torch
from tensordict import TensorDict, lazy_stack

import objectives.functional as F
from objectives import DecoupledSources, MCAdvantage, PassAtK
from torchrl_data.missing_entry import MissingEntryError


def make_row(group, sources, *, scorable=True):
    """Rewards by source; the row's reward is their sum."""
    known = [value for value in sources.values() if value is not None]
    return TensorDict(
        {
            "reward": torch.tensor([[float(sum(known))]]),
            "rewards": {
                name: torch.tensor([[math.nan if value is None else float(value)]])
                for name, value in sources.items()
            },
            "group_id": torch.tensor(group),
            "scorable": torch.tensor([scorable]),
        },
        batch_size=[],
    )


def released(transform, rows):
    out = transform.inv(lazy_stack(rows))
    return [] if out is None else [row["advantage"].item() for row in out.unbind(0)]


TABLE = [
    ("a", {"right": 1, "style": 0.02}),
    ("a", {"right": 0, "style": 0.04}),
    ("b", {"right": 0, "style": 0.03}),
    ("b", {"right": 1, "style": None}),
    ("a", {"right": 0, "style": 0.03}),
    ("b", {"right": 1, "style": 0.01}),
]


def test_gdpo_reads_the_sources_and_equals_its_function_in_any_order():
    rows = [make_row(ord(group), sources) for group, sources in TABLE]
    weights = {"style": 2.0, "right": 0.5}
    got = released(MCAdvantage(3, estimator=DecoupledSources(weights=weights)), rows)
    order = [0, 1, 4, 2, 3, 5]  # group a is complete first
    rewards = torch.tensor(
        [
            [math.nan if TABLE[i][1][name] is None else TABLE[i][1][name] for name in weights]
            for i in order
        ]
    )
    group = torch.tensor([ord(TABLE[i][0]) for i in order])
    want = F.gdpo_advantage(rewards, group, torch.tensor(list(weights.values())))
    assert got == pytest.approx(want.tolist(), rel=1e-6)


def test_gdpo_sees_a_signal_that_the_sum_hides():
    rows = [make_row(1, {"x": 1, "y": 0}), make_row(1, {"x": 0, "y": 1})]
    assert released(MCAdvantage(2, zero_variance="drop"), rows) == []
    weighted = MCAdvantage(
        2, estimator=DecoupledSources(weights={"x": 3.0, "y": 1.0}), zero_variance="drop"
    )
    first, second = released(weighted, rows)
    # One group is the batch: +-(3 - 1) / sqrt(2), divided by their standard deviation.
    assert first == pytest.approx(-second, rel=1e-5)
    assert first == pytest.approx(1 / math.sqrt(2), rel=1e-3)
    flat = [make_row(1, {"x": 1, "y": None}) for _ in range(2)]
    assert released(MCAdvantage(2, estimator="gdpo", zero_variance="drop"), flat) == []


def test_a_row_without_a_verdict_counts_in_no_source():
    rows = [make_row(1, {"x": value}) for value in (0, 1, 3)]
    rows.append(make_row(1, {"x": 100}, scorable=False))
    got = released(MCAdvantage(4, estimator="gdpo"), rows)
    want = F.gdpo_advantage(
        torch.tensor([[0.0], [1.0], [3.0]]), torch.zeros(3, dtype=torch.int64), torch.ones(1)
    )
    assert got == pytest.approx([*want.tolist(), 0.0], rel=1e-6)


def test_pass_at_k_rewards_the_only_success_more_than_grpo_does():
    rows = [make_row(1, {"x": value}) for value in (1, 0, 0, 0)]
    got = released(MCAdvantage(4, estimator=PassAtK(k=2)), rows)
    # Of the 6 pairs 3 hold the success: mean 1/2, deviation 1/2. The success is in 3 pairs that
    # all pass: (1 - 1/2) / (1/2) = 1. A failure passes in 1 of its 3: (1/3 - 1/2) / (1/2) = -1/3.
    assert got == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3], rel=1e-6)


@pytest.mark.parametrize(
    ("values", "dropped"),
    [
        pytest.param((1, 1, 1, 0), True, id="every pair holds a success"),
        pytest.param((0, 0, 0, 0), True, id="no pair holds one"),
        pytest.param((5, 4, 3, 2), True, id="unlike returns, all of them successes"),
        pytest.param((1, 1, 0, 0), False, id="some pairs fail"),
    ],
)
def test_pass_at_k_knows_which_groups_have_no_signal(values, dropped):
    transform = MCAdvantage(4, estimator=PassAtK(k=2), zero_variance="drop")
    assert (released(transform, [make_row(1, {"x": v}) for v in values]) == []) is dropped
    assert transform.stats.groups_zero_variance == int(dropped)


def test_the_threshold_says_what_a_success_is():
    rows = [make_row(1, {"x": value}) for value in (1.0, 0.1, 0.1, 0.1)]
    got = released(MCAdvantage(4, estimator=PassAtK(k=2, success_threshold=0.5)), rows)
    assert got == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3], rel=1e-6)


def test_sources_that_are_missing_or_unknown_are_named():
    row = make_row(1, {"x": 1})
    with pytest.raises(ValueError, match=r"\['x'\].*\['y'\]"):
        released(MCAdvantage(1, estimator=DecoupledSources(weights={"y": 1.0})), [row])
    with pytest.raises(MissingEntryError, match="by source"):
        released(MCAdvantage(1, estimator="gdpo"), [row.exclude("rewards")])
    dense = row.clone()
    dense["rewards", "x"] = torch.zeros(3, 1)
    with pytest.raises(ValueError, match="'x' has 3 values"):
        released(MCAdvantage(1, estimator="gdpo"), [dense])


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        pytest.param({"estimator": "pass_at_k"}, "gdpo", id="a name that needs settings"),
        pytest.param({"estimator": PassAtK(k=5)}, "group has 4", id="k above the group's size"),
        pytest.param({"estimator": "gdpo", "scale": "none"}, "scale", id="scale without effect"),
        pytest.param({"estimator": "gdpo", "credit": "turn"}, "turn", id="credit by turn"),
    ],
)
def test_settings_that_cannot_work_raise(options, hint):
    with pytest.raises(ValueError, match=hint):
        MCAdvantage(4, **options)


def test_settings_of_the_estimators_are_checked():
    with pytest.raises(ValueError, match="k must be"):
        PassAtK(k=0)
    with pytest.raises(ValueError, match="no source"):
        DecoupledSources(weights={})

"""Advantages that remember (a baseline of each role), and a price for length."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from objectives import LengthPenalty, MaxRL, MCAdvantage, PassAtK, RoleBaseline
from torchrl_data.missing_entry import MissingEntryError


def make_row(reward, *, agent=0, game="poker", group=0, sampled=3, segments=None):
    mask = torch.tensor([False] * 2 + [True] * sampled)
    row = TensorDict(
        {
            "reward": torch.tensor([[float(reward)]]),
            "group_id": torch.tensor(group),
            "agent": torch.tensor(agent),
            "game": game,
            "masks": {"all_assistant_mask": mask},
        },
        batch_size=[],
    )
    if segments is not None:
        episode, segment, count = segments
        row["episode_id"], row["segment"] = torch.tensor(episode), torch.tensor(segment)
        row["num_segments"] = torch.tensor(count)
    return row


def released(transform, rows):
    out = transform.inv(lazy_stack(rows))
    return [] if out is None else [row["advantage"].item() for row in out.unbind(0)]


plays = st.lists(
    st.tuples(
        st.sampled_from([0, 1]),
        st.sampled_from(["poker", "nim"]),
        st.sampled_from([-1.0, 0.0, 1.0, math.nan]),
    ),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, derandomize=True)
@given(plays=plays, decay=st.sampled_from([0.0, 0.5, 0.95]), split=st.integers(1, 5))
def test_each_role_has_its_own_running_mean(through_files, plays, decay, split):
    """The slow reference: one number a role, read before the row, moved after it."""
    baselines, want = {}, []
    for agent, game, reward in plays:
        if math.isnan(reward):
            want.append(0.0)
            continue
        before = baselines.get((game, agent), 0.0)
        want.append(reward - before)
        baselines[game, agent] = decay * before + (1 - decay) * reward
    rows = [make_row(r, agent=a, game=g, group=i) for i, (a, g, r) in enumerate(plays)]
    got = []
    state = None
    # A run that is saved and resumed after every few rows, at whatever row.
    for start in range(0, len(rows), split):
        transform = MCAdvantage(1, estimator=RoleBaseline(by=("game", "agent"), decay=decay))
        if state is not None:
            transform.load_state_dict(through_files(state))
        got += released(transform, rows[start : start + split])
        state = transform.state_dict()
    assert got == pytest.approx(want)
    assert transform.estimator.baselines == pytest.approx(baselines)


def test_an_extend_that_raises_moves_no_baseline():
    transform = MCAdvantage(1, estimator=RoleBaseline())
    released(transform, [make_row(1.0, agent=1)])
    before = dict(transform.estimator.baselines)
    bad = make_row(1.0, group=2)
    del bad["agent"]
    with pytest.raises(MissingEntryError, match=r"'agent'.*holds.*'game'.*by="):
        transform.inv(lazy_stack([make_row(-1.0, agent=1, group=1), bad]))
    assert transform.estimator.baselines == before == {(1,): pytest.approx(0.05)}


def test_the_state_of_another_estimator_is_refused():
    saved = MCAdvantage(1, estimator=RoleBaseline()).state_dict()
    with pytest.raises(ValueError, match=r"GroupMean remembers nothing.*'baselines'"):
        MCAdvantage(1).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"by \['agent'\], these by \['game', \['next', 'x'\]\]"):
        MCAdvantage(1, estimator=RoleBaseline(by=("game", ("next", "x")))).load_state_dict(saved)
    with pytest.raises(ValueError, match="by None"):
        MCAdvantage(1, estimator=RoleBaseline()).load_state_dict(MCAdvantage(1).state_dict())


def test_rows_of_one_role_carry_a_signal_alone():
    """Two winners of one group differ from what their roles were worth, though not from another."""
    rows = [make_row(1.0, agent=i) for i in (0, 1)]
    transform = MCAdvantage(2, estimator=RoleBaseline(), zero_variance="drop")
    assert released(transform, rows) == [1.0, 1.0]
    nothing = [make_row(math.nan, group=1) for _ in range(2)]
    assert released(transform, nothing) == []


def test_the_longest_output_pays_the_whole_price_and_others_their_share():
    """Returns 1 - 0.2 * (2, 4, 8, 8) / 8 = 0.95, 0.9, 0.8, and a failure that pays too."""
    rows = [make_row(r, sampled=n) for r, n in ((1, 2), (1, 4), (1, 8), (0, 8))]
    plain = LengthPenalty(coeff=0.2, estimator=RoleBaseline(decay=0.0))
    # A baseline without memory is the return before it, which shows the returns themselves.
    first = released(MCAdvantage(4, estimator=plain), rows)
    assert first == pytest.approx([0.95, 0.9 - 0.95, 0.8 - 0.9, -0.2 - 0.8])
    only = LengthPenalty(coeff=0.2, success_threshold=0.5, estimator=RoleBaseline(decay=0.0))
    assert released(MCAdvantage(4, estimator=only), rows)[-1] == pytest.approx(-0.8)


def test_a_group_of_equal_rewards_learns_to_be_short(slow):
    rows = [make_row(1.0, sampled=n) for n in (1, 2, 4)]
    assert released(MCAdvantage(3, zero_variance="drop"), rows) == []
    penalty = MCAdvantage(3, estimator=LengthPenalty(coeff=0.1), zero_variance="drop")
    returns = [1 - 0.1 * share for share in (0.25, 0.5, 1.0)]
    want = slow.group_advantage(returns, [0, 0, 0])
    assert released(penalty, rows) == pytest.approx(want, rel=1e-4)
    same = [make_row(1.0, sampled=2, group=1) for _ in range(3)]
    assert released(penalty, same) == []
    unscored = [make_row(r, sampled=n, group=2) for r, n in ((1, 9), (1, 3), (math.nan, 9))]
    first, second, third = released(penalty, unscored)
    assert third == 0
    assert first < 0 < second


def test_an_episode_of_several_rows_is_as_long_as_all_of_them():
    """3 + 5 sampled tokens in two rows, beside one of 4: shares 1 and 1/2."""
    long = [make_row(1.0, sampled=n, segments=(7, i, 2)) for i, n in enumerate((3, 5))]
    short = make_row(1.0, sampled=4, segments=(8, 0, 1))
    penalty = LengthPenalty(coeff=0.5, estimator=RoleBaseline(decay=0.0))
    got = released(MCAdvantage(2, estimator=penalty), [*long, short])
    assert got == pytest.approx([0.5, 0.5, 0.75 - 0.5])


def test_maxrl_through_a_buffer(slow):
    rewards, groups = [1.0, 0.0, 0.0, 0.0], [5, 5, 5, 5]
    rows = [make_row(r, group=g) for r, g in zip(rewards, groups, strict=True)]
    assert released(MCAdvantage(4, estimator="maxrl"), rows) == slow.maxrl(rewards, groups)
    with pytest.raises(ValueError, match=r"group 6 has the return -1.0"):
        MCAdvantage(2, estimator=MaxRL()).inv(
            lazy_stack([make_row(-1.0, group=6), make_row(1.0, group=6)])
        )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: RoleBaseline(decay=1.0), "decay"),
        (lambda: RoleBaseline(by=()), "by takes"),
        (lambda: RoleBaseline(by="agent"), "by takes"),
        (lambda: LengthPenalty(coeff=0.0), "coeff"),
        (lambda: LengthPenalty(coeff=0.1, success_threshold=math.nan), "success_threshold"),
        (lambda: LengthPenalty(coeff=0.1, estimator=PassAtK(k=2)), "PassAtK does not go"),
        (lambda: LengthPenalty(coeff=0.1, estimator=MaxRL()), "success_threshold to 0.1"),
    ],
)
def test_settings_that_can_take_no_effect_raise(make, hint):
    with pytest.raises((ValueError, TypeError), match=hint):
        make()
    LengthPenalty(coeff=0.1, estimator=MaxRL(), success_threshold=0.1)

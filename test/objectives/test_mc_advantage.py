"""Group advantages in a replay buffer: complete groups only, whatever the order of arrival."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from objectives import GroupRefill, MCAdvantage, PairSelector, PassAtK, TopKRewardSelector
from torchrl_data.keys import ASSISTANT_MASK
from torchrl_data.missing_entry import MissingEntryError


def make_row(group, reward, *, name=0, tokens=2, scorable=None):
    row = TensorDict(
        {
            "tokens": {"full": torch.arange(tokens)},
            "reward": torch.tensor([[reward]], dtype=torch.float64),
            "group_id": torch.tensor(group),
            "name": torch.tensor(name),
            "query": "the same text for all",
            "conversation": NonTensorData({"turns": [1, 2]}),
        },
        batch_size=[],
    )
    if scorable is not None:
        row["scorable"] = torch.tensor([scorable])
    return row


def make_buffer(transform):
    return ReplayBuffer(storage=LazyStackStorage(1000), transform=transform, batch_size=2)


def stored(buffer):
    """Name to advantage of all rows in a buffer."""
    rows = buffer[:].unbind(0) if len(buffer) else []
    return {int(row["name"]): row["advantage"].view(-1).tolist() for row in rows}


def test_D08_groups_are_released_when_complete_and_by_id_not_by_text():
    rb = make_buffer(MCAdvantage(2))
    rows = [make_row(g, r, name=i) for i, (g, r) in enumerate([(5, 1.0), (9, 0.0), (5, 3.0)])]
    assert len(rb.extend(lazy_stack(rows[:2]))) == 0
    assert len(rb.extend(lazy_stack(rows[2:]))) == 2
    a = 1 / (math.sqrt(2) + 1e-4)
    assert stored(rb) == {0: [pytest.approx(-a)], 2: [pytest.approx(a)]}
    assert "advantage" not in rows[0], "rows that come in are not written to"
    assert rb[:]["advantage"].shape == (2, 1, 1)
    rb.extend(lazy_stack([make_row(9, 1.0, name=3)]))
    assert stored(rb).keys() == {0, 1, 2, 3}
    assert rb.sample(2).batch_size == (2,)


reward_value = st.sampled_from([0.0, 0.1, 1.0, 2.0, math.nan, math.inf])


@settings(deadline=None, derandomize=True)
@given(data=st.data())
def test_any_order_and_any_partition_gives_the_reference(slow, data):
    size = data.draw(st.integers(1, 3), label="group size")
    # Groups of unequal completeness: the last may lack members.
    groups = [data.draw(st.lists(reward_value, min_size=size, max_size=size)) for _ in range(3)]
    rows = [(g, r) for g, rewards in enumerate(groups) for r in rewards]
    rows = rows[: len(rows) - data.draw(st.integers(0, size - 1), label="missing")]
    order = data.draw(st.permutations(range(len(rows))))
    cuts = data.draw(st.lists(st.integers(1, 4), min_size=len(rows), max_size=len(rows)))
    transform = MCAdvantage(size)
    got, queue = {}, list(order)
    for cut in cuts:
        part, queue = queue[:cut], queue[cut:]
        if part:
            out = transform.inv(lazy_stack([make_row(*rows[i], name=i) for i in part]))
            for row in out.unbind(0) if out is not None else ():
                got[int(row["name"])] = row["advantage"].item()
    want = {}
    for g in range(3):
        mine = [i for i, (group, _) in enumerate(rows) if group == g]
        if len(mine) == size:
            rewards = [rows[i][1] if math.isfinite(rows[i][1]) else None for i in mine]
            want |= dict(zip(mine, slow.group_advantage(rewards, [0] * size), strict=True))
    assert got.keys() == want.keys()
    for name, advantage in want.items():
        # The transform works in float32.
        assert got[name] == pytest.approx(advantage, rel=1e-5, abs=1e-6)
    assert transform.stats.ledger(transform.queue.num_rows)


def run(transform, *rows):
    """Names of the rows released, with their advantages."""
    out = transform.inv(lazy_stack([make_row(g, r, name=i) for i, (g, r) in enumerate(rows)]))
    released = out.unbind(0) if out is not None else ()
    assert transform.stats.ledger(transform.queue.num_rows)
    return {int(row["name"]): row["advantage"].item() for row in released}


FLAT = [(1, 0.1), (1, 0.1), (1, 0.1), (2, 0.0), (2, 1.0), (2, 0.5)]


def test_D09_zero_variance_kept_with_exactly_0():
    transform = MCAdvantage(3)
    got = run(transform, *FLAT)
    assert [got[i] for i in range(3)] == [0, 0, 0]
    assert transform.stats.groups_zero_variance == 1


@pytest.mark.parametrize("refill", [False, True], ids=["drop", "refill"])
def test_D09_zero_variance_dropped(refill):
    transform = MCAdvantage(3, zero_variance="refill" if refill else "drop")
    assert run(transform, *FLAT).keys() == {3, 4, 5}
    assert transform.stats.rows_dropped_zero_variance == 3
    assert transform.take_refills() == ({1: 3} if refill else {})
    assert transform.take_refills() == {}


BROKEN = [(1, math.nan), (1, 0.0), (1, 1.0)]


def test_unscorable_kept_with_0_and_outside_the_statistics():
    got = run(MCAdvantage(3), *BROKEN)
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert got == {0: 0, 1: pytest.approx(-a), 2: pytest.approx(a)}


def test_unscorable_dropped():
    assert run(MCAdvantage(3, unscorable="drop"), *BROKEN).keys() == {1, 2}


def test_D10_unscorable_refilled():
    transform = MCAdvantage(3, unscorable="refill")
    assert run(transform, *BROKEN) == {}
    assert transform.take_refills() == {1: 1}
    assert transform.queue.missing() == {1: 1}
    assert run(transform, (1, 0.5)).keys() == {0, 1, 2}


def test_a_row_marked_unscorable_is_not_scored_whatever_its_reward():
    rows = [make_row(1, 100.0, name=0, scorable=False)]
    rows += [make_row(1, float(i), name=i, scorable=True) for i in (1, 2)]
    out = MCAdvantage(3).inv(lazy_stack(rows))
    assert out["advantage"].view(-1)[0].item() == 0
    assert out["advantage"].view(-1)[1].item() < 0


def test_fewer_than_two_valid_rows_carry_no_signal():
    assert run(MCAdvantage(2, zero_variance="drop"), (1, math.nan), (1, 1.0)) == {}
    assert run(MCAdvantage(2), (1, math.nan), (1, 1.0)) == {0: 0, 1: 0}


def test_a_group_of_one_is_defined():
    assert run(MCAdvantage(1), (1, 5.0), (2, math.nan)) == {0: 0, 1: 0}


def test_bounds_on_the_mean_drop_groups():
    transform = MCAdvantage(2, keep_return_bounds=(0.2, 0.8))
    assert run(transform, (1, 0.0), (1, 1.0), (2, 1.0), (2, 0.6)).keys() == {0, 1}
    assert transform.stats.rows_dropped_bounds == 2


@pytest.mark.parametrize("bound", [0.5, 0.0, 1.0], ids=["half", "none solved", "all solved"])
def test_a_group_on_a_bound_is_dropped(bound):
    """The bounds themselves lie outside, the lower as the upper."""
    rewards = {0.5: (0.0, 1.0), 0.0: (0.0, 0.0), 1.0: (1.0, 1.0)}[bound]
    rows = [(1, reward) for reward in rewards]
    for bounds in ((bound, 2.0), (-1.0, bound)):
        assert run(MCAdvantage(2, keep_return_bounds=bounds), *rows) == {}
    assert run(MCAdvantage(2, keep_return_bounds=(bound - 0.1, bound + 0.1)), *rows)


def test_refills_of_one_group_add_up():
    """Two rows that could not be scored, then a whole group without a signal: 2, then 3 more."""
    transform = MCAdvantage(3, unscorable="refill", zero_variance="refill")
    assert run(transform, (1, math.nan), (1, math.inf), (1, 0.5), (2, math.nan)) == {}
    assert transform.take_refills() == {1: 2, 2: 1}
    assert run(transform, (1, math.nan), (1, 0.5), (1, 0.5)) == {}
    assert transform.take_refills() == {1: 1 + 3}


def test_a_smaller_group_that_expires_flat_is_refilled_whole():
    transform = MCAdvantage(3, zero_variance="refill", max_pending_groups=1, on_expiry="release")
    assert run(transform, (1, 0.5), (1, 0.5), (2, 0.0)) == {}
    assert transform.take_refills() == {1: 3}


def test_scales_and_leave_one_out(slow):
    rewards, groups = [0.0, 1.0, 4.0, 2.0], [1, 1, 2, 2]
    rows = list(zip(groups, rewards, strict=True))
    for scale in ("group", "batch", "none"):
        got = list(run(MCAdvantage(2, scale=scale), *rows).values())
        assert got == pytest.approx(slow.group_advantage(rewards, groups, scale), rel=1e-5)
    got = list(run(MCAdvantage(2, estimator="rloo"), *rows).values())
    assert got == pytest.approx(slow.rloo(rewards, groups))


def test_dense_rewards_by_trajectory_and_by_turn(slow):
    rewards = [[0.0, 1.0, 0.0, 2.0], [0.0, 0.5, 0.0, 0.0]]
    masks = [[False, True, False, True], [False, True, True, False]]
    rows = []
    for reward, mask in zip(rewards, masks, strict=True):
        row = make_row(1, 0.0)
        row["reward"] = torch.tensor(reward).unsqueeze(-1)
        row["masks", "all_assistant_mask"] = torch.tensor(mask)
        rows.append(row)
    for how, totals in {"sum": [3, 0.5], "mean": [0.75, 0.125], "max": [2, 0.5]}.items():
        out = MCAdvantage(2, trajectory_return=how).inv(lazy_stack([r.clone() for r in rows]))
        want = slow.group_advantage(totals, [0, 0])
        assert out["advantage"].view(-1).tolist() == pytest.approx(want, rel=1e-5)
    out = MCAdvantage(2, credit="turn").inv(lazy_stack(rows))
    assert out["advantage"].shape == (2, 4, 1)
    for got, want in zip(
        out["advantage"], slow.turn_advantage(rewards, masks, [0, 0]), strict=True
    ):
        assert got.view(-1).tolist() == pytest.approx(want, rel=1e-5)


def test_credit_by_turn_drops_groups_in_which_no_turn_is_better():
    one, two = [False, True, True], [True, False, True]
    groups = {
        1: ([0.0, 0.0, 1.0], [0.0, 0.0, 1.0], one),  # one turn each, both worth 1
        2: ([0.5, 0.0, 0.5], [0.5, 0.0, 0.5], two),  # two turns each, all worth 0.5
        3: ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], two),
        4: ([0.0, 0.0, 1.0], [0.0, 0.0, 1.0], two),  # equal rows, but the second turn is better
        5: ([0.0, 0.0, 1.0], [0.0, 0.0, 0.0], one),
        6: ([0.0, 0.0, 1.0], [0.0, 0.0, math.nan], two),  # one valid row
    }
    rows = []
    for group, (first, second, mask) in groups.items():
        for reward in (first, second):
            row = make_row(group, 0.0, name=group, tokens=3)
            row["reward"] = torch.tensor(reward).unsqueeze(-1)
            row["masks", "all_assistant_mask"] = torch.tensor(mask)
            rows.append(row)
    transform = MCAdvantage(2, credit="turn", zero_variance="drop")
    assert names(transform.inv(lazy_stack(rows))) == [4, 4, 5, 5]
    assert transform.stats.groups_zero_variance == 4
    assert transform.stats.rows_dropped_zero_variance == 8
    assert transform.stats.ledger(0)


@pytest.mark.parametrize("on_expiry", ["drop", "release"])
def test_D10_incomplete_groups_expire_visibly(on_expiry, caplog):
    transform = MCAdvantage(3, max_pending_groups=2, on_expiry=on_expiry)
    got = run(transform, (1, 0.0), (1, 1.0), (2, 0.0), (3, 0.0))
    assert got.keys() == ({0, 1} if on_expiry == "release" else set())
    assert "Group 1 expired with 2 of 3 rows" in caplog.text
    assert transform.stats.groups_expired == 1
    assert list(transform.queue.expired) == [(1, 2)]
    assert transform.queue.missing() == {2: 2, 3: 2}


def test_a_group_expires_by_age(caplog):
    transform = MCAdvantage(2, expire_after_rows=3)
    run(transform, (1, 0.0), (2, 0.0), (2, 1.0))
    assert transform.queue.missing() == {1: 1}
    run(transform, (3, 0.0))
    assert transform.queue.missing() == {3: 1}
    assert "Group 1" in caplog.text


@pytest.mark.parametrize("kind", ["state_dict", "file", "pickle"])
def test_incomplete_groups_survive_a_restart(tmp_path, kind):
    transform = MCAdvantage(2, unscorable="refill")
    rb = make_buffer(transform)
    rb.extend(lazy_stack([make_row(1, 0.0, name=0), make_row(2, math.nan, name=1)]))
    fresh = MCAdvantage(2, unscorable="refill")
    if kind == "state_dict":
        fresh.load_state_dict(transform.state_dict())
    elif kind == "file":
        torch.save(transform.state_dict(), tmp_path / "state.pt")
        fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    else:
        fresh = pickle.loads(pickle.dumps(transform))
    out = [t.inv(lazy_stack([make_row(1, 1.0, name=2)])) for t in (transform, fresh)]
    for a, b in zip(out[0].unbind(0), out[1].unbind(0), strict=True):
        assert a["name"] == b["name"]
        assert a["query"] == b["query"]
        assert a["conversation"] == b["conversation"]
        assert a["tokens", "full"].equal(b["tokens", "full"])
        assert a["advantage"].equal(b["advantage"])
    assert fresh.stats == transform.stats
    assert fresh.take_refills() == {2: 1}


@pytest.mark.parametrize("broken", ["a row", "the estimator", "a row that top-k reads"])
def test_an_extend_that_raises_takes_nothing_in_and_loses_nothing(broken, same):
    """The whole batch can be given again once it is mended, and nothing counts twice."""
    rows = [make_row(2, 1.0, name=0), make_row(7, 0.5, name=1)]
    batch = [make_row(g, r, name=i) for i, (g, r) in enumerate([(1, 1.0), (1, 0.0), (2, 1.0)], 2)]
    batch += [make_row(3, math.nan, name=5), make_row(8, 0.0, name=6)]
    mended = [row.clone() for row in batch]
    transform = MCAdvantage(2, unscorable="refill", max_pending_groups=2)
    if broken == "the estimator":
        transform = MCAdvantage(2, estimator="gdpo", unscorable="refill", max_pending_groups=2)
        for row in (*rows, *batch, *mended):
            row["rewards"] = TensorDict({"length": torch.tensor(float(row["name"]))})
        batch[2]["rewards", "style"] = torch.tensor(1.0)
    else:
        del batch[2]["reward"]
    if broken == "a row that top-k reads":
        transform = TopKRewardSelector(group_size=2, topk_size=1, max_pending_groups=2)
    transform.inv(lazy_stack(rows))
    before = transform.get_extra_state()
    expired = list(transform.queue.expired)
    with pytest.raises(ValueError if broken == "the estimator" else MissingEntryError):
        transform.inv(lazy_stack(batch))
    assert same(transform.get_extra_state(), before)
    assert list(transform.queue.expired) == expired
    assert transform.queue.missing() == {2: 1, 7: 1}
    assert transform.stats.ledger(transform.queue.num_rows)
    got = names(transform.inv(lazy_stack(mended)))
    assert got == ([2] if broken == "a row that top-k reads" else [2, 3, 0, 4])
    assert transform.stats.ledger(transform.queue.num_rows)
    assert transform.stats.rows_in == 7


def test_within_a_compose_none_is_passed_on():
    compose = Compose(MCAdvantage(1), MCAdvantage(2, advantage_key="other"))
    assert compose.inv(lazy_stack([make_row(1, 0.0)])) is None


def test_errors_name_the_entry():
    row = make_row(1, 0.0)
    with pytest.raises(MissingEntryError, match=r"'group_id'.*holds.*reward"):
        MCAdvantage(2).inv(lazy_stack([row.exclude("group_id")]))
    with pytest.raises(MissingEntryError, match="'reward'"):
        MCAdvantage(1).inv(lazy_stack([row.exclude("reward")]))
    with pytest.raises(TypeError, match="integer id"):
        MCAdvantage(2, group_key="query").inv(lazy_stack([row]))
    row["masks", "all_assistant_mask"] = torch.ones(2, dtype=torch.bool)
    with pytest.raises(ValueError, match="a reward for each token"):
        MCAdvantage(1, credit="turn").inv(lazy_stack([row]))


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        pytest.param({}, "group_size", id="no size"),
        pytest.param({"group_size": 2, "grpo_size": 2}, "give one", id="size given twice"),
        pytest.param({"group_size": 0}, "group_size", id="size 0"),
        pytest.param({"group_size": 2, "scale": "std"}, "batch", id="misspelt scale"),
        pytest.param({"group_size": 2, "credit": "step"}, "turn", id="misspelt credit"),
        pytest.param({"group_size": 2, "zero_variance": "skip"}, "refill", id="misspelt choice"),
        pytest.param({"group_size": 2, "estimator": "loo"}, "rloo", id="misspelt estimator"),
        pytest.param(
            {"group_size": 1, "zero_variance": "drop"}, "every row", id="drops all groups of one"
        ),
        pytest.param(
            {"group_size": 2, "estimator": "rloo", "scale": "none"},
            "no effect",
            id="scale that rloo would ignore",
        ),
        pytest.param(
            {"group_size": 2, "credit": "turn", "scale": "batch"}, "credit", id="scale by turn"
        ),
        pytest.param(
            {"group_size": 2, "keep_return_bounds": (1.0, 0.0)}, "increasing", id="bounds"
        ),
        pytest.param({"group_size": 2, "max_pending_groups": 0}, "at least 1", id="no room"),
        pytest.param({"group_size": 2.5}, "group_size must be a whole number", id="half a row"),
        pytest.param({"group_size": True}, "group_size must be a whole number", id="size True"),
        pytest.param({"group_size": 2, "expire_after_rows": 1.5}, "expire_after", id="half an age"),
        pytest.param(
            {"group_size": 2, "keep_return_bounds": (0.1,)},
            r"keep_return_bounds takes a pair.*\(0.1,\)",
            id="one bound",
        ),
        pytest.param(
            {"group_size": 2, "keep_return_bounds": (math.nan, 1.0)}, "increasing", id="NaN bound"
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_options_raise_at_construction(options, hint):
    with pytest.raises(ValueError, match=hint):
        MCAdvantage(**options)


def test_grpo_size_is_group_size():
    assert MCAdvantage(grpo_size=4).group_size == 4


def names(out):
    return [int(row["name"]) for row in out.unbind(0)] if out is not None else []


def test_top_k_keeps_the_best_above_the_median_in_order():
    rewards = [1.0, 5.0, math.nan, 3.0, 5.0, 0.0]
    rows = lazy_stack([make_row(1, r, name=i) for i, r in enumerate(rewards)])
    selector = TopKRewardSelector(6, 2)
    assert names(selector.inv(rows)) == [1, 4]
    assert selector.stats.rows_dropped_unselected == 4
    assert selector.stats.ledger(0)
    assert names(TopKRewardSelector(6, 5).inv(rows)) == [1, 4]
    assert names(TopKRewardSelector(6, 4, above="any").inv(rows)) == [1, 4, 3, 0]
    assert names(TopKRewardSelector(6, 4, above="mean").inv(rows)) == [1, 4, 3]  # 14 / 5 < 3
    flat = lazy_stack([make_row(1, 0.7) for _ in range(3)])  # whose rounded mean is below 0.7
    for above in ("median", "mean"):
        assert names(TopKRewardSelector(3, 1, above=above).inv(flat)) == []
    # Most are right: the median is the best there is, and the mean is not.
    solved = lazy_stack([make_row(1, float(i != 1), name=i) for i in range(4)])
    assert names(TopKRewardSelector(4, 2).inv(solved)) == []
    assert names(TopKRewardSelector(4, 2, above="mean").inv(solved)) == [0, 2]
    assert names(TopKRewardSelector(4, 3, above=0.5).inv(solved)) == [0, 2, 3]
    assert names(TopKRewardSelector(3, 2, above=0.5).inv(flat)) == [0, 0]


def test_top_k_counts_an_episode_with_several_rows_once_and_keeps_all_of_them():
    """Three episodes of one, two and three rows, whose rows come mixed."""

    def part(episode, segment, reward, count):
        row = make_row(1, reward, name=10 * episode + segment)
        where = {"episode_id": episode, "segment": segment, "num_segments": count}
        return row.update({name: torch.tensor(value) for name, value in where.items()})

    came = [part(1, 0, 1.0, 2), part(2, 1, 2.0, 3), part(0, 0, 0.0, 1), part(2, 0, 2.0, 3)]
    selector = TopKRewardSelector(3, 1)
    assert selector.inv(lazy_stack(came)) is None
    with pytest.raises(ValueError, match="Row 0 of episode 1 in group 1 came twice"):
        selector.inv(lazy_stack([part(2, 2, 2.0, 3), part(1, 0, 1.0, 2)]))
    fresh = TopKRewardSelector(3, 1)
    fresh.load_state_dict(selector.state_dict())
    rest = lazy_stack([part(2, 2, 2.0, 3), part(1, 1, 1.0, 2)])
    assert names(fresh.inv(rest)) == [20, 21, 22]
    assert fresh.stats.rows_dropped_unselected == 3
    assert fresh.stats.ledger(0)


def test_top_k_in_a_buffer_survives_a_restart_and_expires(caplog):
    selector = TopKRewardSelector(group_size=2, topk_size=1, max_pending_groups=1)
    rb = make_buffer(selector)
    rb.extend(lazy_stack([make_row(1, 0.0, name=0)]))
    fresh = TopKRewardSelector(group_size=2, topk_size=1, max_pending_groups=1)
    fresh.load_state_dict(selector.state_dict())
    assert names(fresh.inv(lazy_stack([make_row(1, 1.0, name=1)]))) == [1]
    rb.extend(lazy_stack([make_row(2, 0.0)]))
    assert selector.stats.rows_expired == 1
    assert "Group 1" in caplog.text


def test_a_pair_is_the_best_and_the_worst_of_a_group():
    rewards = [1.0, 5.0, math.nan, 3.0, 5.0, 1.0]
    selector = PairSelector(6)
    pair = selector.inv(lazy_stack([make_row(9, r, name=i) for i, r in enumerate(rewards)]))
    assert names(pair) == [1, 0]
    assert pair["chosen"].tolist() == [[True], [False]]
    assert pair["pair_id"].tolist() == [[9], [9]]
    assert selector.stats.rows_dropped_unselected == 4
    assert selector.stats.ledger(0)
    rows = lazy_stack([make_row(1, r, name=i) for i, r in enumerate((0.5, 0.25))])
    assert rows[0].get("chosen") is None
    for least, kept in ((0.25, [0, 1]), (0.3, [])):
        assert names(PairSelector(2, min_difference=least).inv(rows)) == kept
    for same in ((0.7, 0.7), (math.nan, 1.0), (math.nan, math.nan)):
        flat = lazy_stack([make_row(1, r) for r in same])
        assert PairSelector(2).inv(flat) is None
        assert PairSelector(2, refill=GroupRefill()).asks_again(list(flat.unbind(0)))
    assert not PairSelector(2, refill=GroupRefill()).asks_again(list(rows.unbind(0)))
    silent = make_row(1, -1.0, name=2).set(ASSISTANT_MASK, torch.tensor([False, False]))
    with_mask = [row.copy().set(ASSISTANT_MASK, torch.tensor([False, True])) for row in rows]
    assert names(PairSelector(3).inv(lazy_stack([*with_mask, silent]))) == [0, 1]


def test_an_episode_of_several_rows_is_in_no_pair():
    def part(episode, segment, reward, count):
        row = make_row(1, reward, name=10 * episode + segment)
        where = {"episode_id": episode, "segment": segment, "num_segments": count}
        return row.update({name: torch.tensor(value) for name, value in where.items()})

    came = [part(0, 0, 9.0, 2), part(1, 0, 2.0, 1), part(2, 0, 1.0, 1), part(0, 1, 9.0, 2)]
    selector = PairSelector(3)
    assert names(selector.inv(lazy_stack(came))) == [10, 20]
    assert selector.stats.rows_dropped_unselected == 2
    for bad in ({"group_size": 1}, {"group_size": 2, "min_difference": -1.0}):
        with pytest.raises(ValueError, match="PairSelector"):
            PairSelector(**bad)


@pytest.mark.usefixtures("unchecked")
def test_top_k_of_another_size_raises_at_construction():
    for bad in (
        {},
        {"group_size": 2, "topk_size": 3},
        {"group_size": 2, "topk_size": 0},
        {"group_size": 2.5},
        {"group_size": 0},
    ):
        with pytest.raises(ValueError, match="size"):
            TopKRewardSelector(**bad)
    for bad in ("average", math.nan):
        with pytest.raises(ValueError, match=f"above must be.*{bad}"):
            TopKRewardSelector(4, above=bad)


@pytest.mark.usefixtures("unchecked")
def test_a_setting_of_advantages_that_is_set_later_takes_effect_or_raises():
    advantage = MCAdvantage(2)
    advantage.zero_variance = "drop"
    assert advantage.inv(lazy_stack([make_row(1, 1.0), make_row(1, 1.0)])) is None
    advantage.estimator = "maxrl"  # (R - mean) / mean
    released = advantage.inv(lazy_stack([make_row(2, 1.0), make_row(2, 0.0)]))
    assert released["advantage"].flatten().tolist() == [1.0, -1.0]
    for name, value, kind, hint in (
        ("zero_variance", "dorp", ValueError, "zero_variance must be one of"),
        ("keep_return_bounds", (1.0, 0.0), ValueError, "increasing pair"),
        ("estimator", PassAtK(k=3), ValueError, "PassAtK: k is 3, but a group has 2"),
        ("group_size", 4, AttributeError, "group_size is fixed when it is made"),
        ("scale", "none", AttributeError, "scale is fixed when it is made"),
        ("zero_varience", "drop", AttributeError, "Did you mean 'zero_variance'"),
    ):
        with pytest.raises(kind, match=hint):
            setattr(advantage, name, value)
    assert (advantage.zero_variance, advantage.group_size) == ("drop", 2)
    selector = TopKRewardSelector(group_size=2, topk_size=1)
    with pytest.raises(ValueError, match="topk_size must lie in"):
        selector.topk_size = 3

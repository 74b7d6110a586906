"""Credit over the tree of an episode's rows, against slow references."""

import math
import statistics
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

from objectives import FunctionCredit, LengthPenalty, MCAdvantage, RowTree
from objectives.advantages.tree_credit import AgentCredit, BranchCredit
from torchrl_data.missing_entry import MissingEntryError

KINDS = ("parallel", "sub_agent", "compaction")


@st.composite
def trees(draw):
    """An episode: of each row its turns' lengths and rewards, and where it comes from."""
    rows = []
    for number in range(draw(st.integers(1, 5))):
        turns = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(-2, 2)), min_size=1))[:3]
        parent = draw(st.integers(0, number - 1)) if number else -1
        # It leaves between two turns of the other one, or after the last.
        after = draw(st.integers(0, len(rows[parent]["turns"]))) if number else 0
        kind = draw(st.sampled_from(KINDS)) if number else "main"
        agent = draw(st.sampled_from("ab"))
        rows.append(
            {"turns": turns, "parent": parent, "after": after, "kind": kind, "agent": agent}
        )
    return rows


def place_after(turns, count):
    """The first token after so many turns; one that was not sampled stands before each of them."""
    return sum(length + 1 for length, _ in turns[:count])


def made(episode, number, group=7):
    """The rows of an episode, as a collector gives them."""
    rows = []
    for segment, own in enumerate(episode):
        mask, reward = [], []
        for length, value in own["turns"]:
            mask += [False, *[True] * length]
            reward += [0.0] * length + [float(value)]
        left = place_after(episode[own["parent"]]["turns"], own["after"]) if segment else 0
        row = TensorDict(
            {
                "group_id": torch.tensor(group),
                "episode_id": torch.tensor(number),
                "segment": torch.tensor(segment),
                "num_segments": torch.tensor(len(episode)),
                "parent_segment": torch.tensor(own["parent"]),
                "parent_tokens": torch.tensor(left),
                "reward": torch.tensor(reward).unsqueeze(-1),
                ("masks", "all_assistant_mask"): torch.tensor(mask),
                ("tokens", "full"): torch.arange(len(mask)),
            }
        )
        row.set_non_tensor("row_kind", own["kind"])
        row.set_non_tensor("agent", own["agent"])
        rows.append(row)
    return rows


def run(transform, episodes):
    """Advantages by episode and row."""
    rows = [row for number, episode in enumerate(episodes) for row in made(episode, number)]
    found = [[None] * len(episode) for episode in episodes]
    for row in transform.inv(lazy_stack(rows)).unbind(0):
        found[int(row["episode_id"])][int(row["segment"])] = row["advantage"].view(-1).tolist()
    return found


def normalised(values):
    """Of some numbers with the same peers."""
    mean = statistics.fmean(values)
    if len(values) < 2 or min(values) == max(values):
        return [0.0] * len(values)
    return [(value - mean) / (statistics.stdev(values) + 1e-4) for value in values]


def descendants(episode, row):
    own = [n for n, each in enumerate(episode) if each["parent"] == row]
    return [row, *(d for child in own for d in descendants(episode, child))]


def total(episode, row):
    return sum(value for _, value in episode[row]["turns"])


@given(st.lists(trees(), min_size=2, max_size=4))
def test_a_branch_is_paid_by_its_subtree_and_compared_with_its_like(episodes):
    found = run(MCAdvantage(len(episodes), credit="branch"), episodes)
    peers = {}
    for number, episode in enumerate(episodes):
        for row, own in enumerate(episode):
            value = sum(total(episode, each) for each in descendants(episode, row))
            peers.setdefault((own["kind"], own["agent"]), []).append((number, row, value))
    for units in peers.values():
        wanted = normalised([value for *_, value in units])
        for (number, row, _), value in zip(units, wanted, strict=True):
            assert found[number][row] == pytest.approx([value], abs=1e-5)


@given(st.lists(trees(), min_size=2, max_size=4))
def test_an_agent_is_compared_with_itself(episodes):
    found = run(MCAdvantage(len(episodes), credit="agent"), episodes)
    returns = [sum(total(e, row) for row in range(len(e))) for e in episodes]
    for agent in "ab":
        took_part = [n for n, e in enumerate(episodes) if any(r["agent"] == agent for r in e)]
        wanted = normalised([returns[number] for number in took_part]) if took_part else []
        for number, value in zip(took_part, wanted, strict=True):
            for row, own in enumerate(episodes[number]):
                if own["agent"] == agent:
                    assert found[number][row] == pytest.approx([value], abs=1e-5)


@example(
    [[{"turns": [(1, 1), (2, 2)], "parent": -1, "after": 0, "kind": "main", "agent": "a"}]] * 2
)
@given(st.lists(trees(), min_size=2, max_size=3))
def test_a_turn_is_paid_by_all_that_comes_after_it_in_the_tree(episodes):
    found = run(MCAdvantage(len(episodes), credit="turn"), episodes)
    places = [
        (number, row, turn)
        for number, episode in enumerate(episodes)
        for row, own in enumerate(episode)
        for turn in range(len(own["turns"]))
    ]
    values = [episodes[number][row]["turns"][turn][1] for number, row, turn in places]
    normal = dict(zip(places, normalised(values), strict=True))

    def later(number, row, turn):
        """Of a turn, of those after it in its row, and of rows that left after it."""
        episode = episodes[number]
        own = range(turn, len(episode[row]["turns"]))
        after = [n for n, r in enumerate(episode) if r["parent"] == row and r["after"] > turn]
        return sum(normal[number, row, each] for each in own) + sum(
            normal[number, each, t]
            for child in after
            for each in descendants(episode, child)
            for t in range(len(episode[each]["turns"]))
        )

    for number, row, turn in places:
        turns = episodes[number][row]["turns"]
        start = place_after(turns, turn) + 1
        got = found[number][row][start : start + turns[turn][0]]
        assert got == pytest.approx([later(number, row, turn)] * turns[turn][0], abs=1e-5)


ALONE = {"turns": [(2, 1)], "parent": -1, "after": 0, "kind": "main", "agent": "a"}
HELPED = [ALONE, {**ALONE, "turns": [(1, 2)], "parent": 0, "kind": "sub_agent", "agent": "b"}]
EPISODES = [[ALONE], HELPED, [{**ALONE, "turns": [(2, 0)]}]]  # returns 1, 3 and 0


def test_the_whole_episode_is_paid_unless_something_else_is_asked_for():
    """With rewards by token, too, of which each row has those of its own tokens."""
    found = run(MCAdvantage(3, scale="none"), EPISODES)
    values = [[-1 / 3], [5 / 3, 5 / 3], [-4 / 3]]
    for episode, wanted in zip(found, values, strict=True):
        assert [value for (value,) in episode] == pytest.approx(wanted)


def test_a_function_gives_each_row_its_own():
    def helpers_half(tree, advantage):
        assert isinstance(tree, RowTree)
        whole = torch.full((len(tree.rows[0]["tokens", "full"]),), advantage)
        return [whole, *[advantage / 2] * (len(tree.rows) - 1)]

    found = run(MCAdvantage(3, scale="none", credit=helpers_half), EPISODES)
    assert found[1] == [pytest.approx([5 / 3] * 3), pytest.approx([5 / 6])]
    with pytest.raises(ValueError, match=r"credit=one gave 1 advantages for an episode of 2 rows"):
        run(MCAdvantage(3, credit=one), EPISODES)
    for bad in (math.nan, [1.0, 2.0, 3.0, 4.0]):
        with pytest.raises(ValueError, match="is a finite number, or one for each token"):
            run(MCAdvantage(3, credit=partial(always, bad)), EPISODES)


def one(tree, advantage):
    del tree
    return [advantage]


def always(value, tree, advantage):
    del advantage
    return [value] * len(tree.rows)


def test_a_group_is_kept_if_a_part_of_it_has_a_signal():
    """Both episodes have the return 3, but their helpers did not earn the same."""
    other = [{**ALONE, "turns": [(2, 0)]}, {**HELPED[1], "turns": [(1, 3)]}]
    for credit, num_rows in (("episode", 0), ("agent", 0), ("branch", 4), ("turn", 4)):
        transform = MCAdvantage(2, credit=credit, zero_variance="drop")
        rows = [row for n, episode in enumerate((HELPED, other)) for row in made(episode, n)]
        released = transform.inv(lazy_stack(rows))
        assert (0 if released is None else len(released)) == num_rows
        assert transform.stats.ledger(0)


def test_rows_that_could_not_be_scored_take_no_part():
    rows = [row for number, episode in enumerate(EPISODES) for row in made(episode, number)]
    for row in rows:
        row["scorable"] = torch.tensor([int(row["episode_id"]) != 1])
    for credit in ("branch", "agent"):
        released = MCAdvantage(3, credit=credit).inv(lazy_stack([row.clone() for row in rows]))
        values = [float(row["advantage"]) for row in released.unbind(0)]
        assert values == pytest.approx([0.7071 * 0.9999, 0, 0, -0.7071 * 0.9999], abs=1e-3)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"credit": "agent", "estimator": "gdpo"}, ValueError, "AgentCredit compares .*'rloo'"),
        ({"credit": "branch", "estimator": "running_mean"}, ValueError, "BranchCredit compares"),
        ({"credit": "agent", "estimator": BranchCredit()}, ValueError, "given twice"),
        ({"credit": "trajectory"}, ValueError, r"credit must be one of \('episode', 'branch'"),
        ({"credit": len, "estimator": "gdpo"}, ValueError, "DecoupledSources does not give with"),
    ],
)
def test_credit_that_can_not_take_effect_is_refused(options, error, said):
    with pytest.raises(error, match=said):
        MCAdvantage(2, **options)


@pytest.mark.usefixtures("unchecked")
def test_what_a_credit_reads_has_to_be_there():
    rows = [made([ALONE], number)[0] for number in range(2)]
    for row in rows:
        row["reward"] = torch.tensor([[1.0]])
    for credit in ("branch", "turn"):
        with pytest.raises(ValueError, match=f"credit '{credit}' needs a reward for each token"):
            MCAdvantage(2, credit=credit).inv(lazy_stack([row.clone() for row in rows]))
    for row in rows:
        row.set_non_tensor("agent", "")
    with pytest.raises(ValueError, match="it is of no AgentProgram"):
        MCAdvantage(2, credit="agent").inv(lazy_stack(rows))
    old = [row.exclude("parent_segment") for row in made(HELPED, 1)]
    with pytest.raises(MissingEntryError, match=r"\['parent_segment'\].*credit='episode'"):
        MCAdvantage(1, credit="turn").inv(lazy_stack(old))
    with pytest.raises(TypeError, match="AgentCredit does not go"):
        LengthPenalty(coeff=0.1, estimator=AgentCredit())
    with pytest.raises(TypeError, match="takes a function"):
        FunctionCredit(function="mine")

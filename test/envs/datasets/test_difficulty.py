"""Difficulty pools: draws follow from solve rates and the seed, and survive a stop."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from torchrl_data.batched_object import read_objects
from torchrl_envs import ChatEnv, DataLoadingPrimer, DifficultyPools, RewardFunctions
from torchrl_envs.datasets.difficulty_pools import IDS_PER_EPOCH, POOLS
from torchrl_envs.datasets.row_stream import NumberedRows

ROWS = [{"prompt": f"question {i}", "number": i} for i in range(8)]


def score(completions):
    return [0.0 for _ in completions]


def make_primer(pools=None, **options):
    primer = DataLoadingPrimer(ROWS, **{"shuffle": True, "seed": 3, **options})
    if pools is not None:
        primer.admit_by(pools)
    return primer


def draw(primer, count, env=None):
    """Numbers and epochs of the next draws."""
    env = env or ChatEnv(batch_size=1).append_transform(Compose(primer, RewardFunctions([score])))
    found = []
    for _ in range(count):
        batch = env.reset()
        epoch = batch["group_id"][0].item() // IDS_PER_EPOCH
        found.append((epoch, read_objects(batch, "row")[0]["number"]))
    return found


def group_of(number, epoch=0):
    return epoch * IDS_PER_EPOCH + number


def test_no_positive_resampling_leaves_out_what_was_solved():
    """Row 2: 9 of 10, row 5: 8 of 10, row 6: none. Row 2 alone never comes again."""
    pools = DifficultyPools(easy_at=0.9, admit_easy=0.0)
    primer = make_primer(pools)
    env = ChatEnv(batch_size=1).append_transform(Compose(primer, RewardFunctions([score])))
    first = draw(primer, 8, env)
    assert sorted(first) == [(0, i) for i in range(8)]
    assert first == draw(make_primer(), 8), "the order is that of the data without pools"
    for number, solved in ((2, 9), (5, 8), (6, 0)):
        for i in range(10):
            pools.observe(group_of(number), float(i < solved))
    assert [pools.pool(i) for i in (0, 2, 5, 6)] == ["new", "easy", "normal", "hard"]
    assert [pools.solve_rate(i) for i in (0, 2, 5, 6)] == [None, 0.9, 0.8, 0.0]
    later = draw(primer, 14, env)
    want = [item for item in draw(make_primer(), 24) if item[0] > 0 and item[1] != 2]
    assert later == want
    # Row 2 was left out once in each of both passes, if it came before the last draw.
    assert pools.counts["left_out"] in (1, 2)
    assert pools.counts["hard"] == 2


def test_rows_are_known_by_their_numbers_in_the_data():
    """Rows 0 and 1 are held out: what was solved is row 3, the second of those that are drawn."""
    rows = NumberedRows(ROWS[2:5])
    rows.numbers = (2, 3, 4)
    pools = DifficultyPools(admit_easy=0.0)
    primer = DataLoadingPrimer(rows)
    primer.admit_by(pools)
    env = ChatEnv(batch_size=1).append_transform(Compose(primer, RewardFunctions([score])))
    assert draw(primer, 3, env) == [(0, 2), (0, 3), (0, 4)]
    pools.observe(group_of(3), 1.0)
    assert draw(primer, 4, env) == [(1, 2), (1, 4), (2, 2), (2, 4)]


def test_the_last_group_of_a_row_counts_and_stragglers_do_not():
    pools = DifficultyPools(admit_easy=0.5)
    for reward in (1.0, 1.0):
        pools.observe(group_of(4), reward)
    assert pools.pool(4) == "easy"
    pools.observe(group_of(4, epoch=2), 0.0)
    assert pools.pool(4) == "hard"
    pools.observe(group_of(4, epoch=1), 1.0)
    assert pools.solve_rate(4) == 0.0
    pools.observe(group_of(4, epoch=2), 1.0)
    assert pools.pool(4) == "normal"
    pools.observe(group_of(4, epoch=3), math.nan)
    assert pools.solve_rate(4) == 0.5, "what could not be scored says nothing"
    pools.observe(-1, 1.0)
    assert pools.state_dict()["solved"] == [[4, 2, 1, 2]]


def test_trajectories_are_observed_as_a_collector_gives_them():
    def row(number, reward, **entries):
        return TensorDict(
            {"group_id": torch.tensor(group_of(number)), "reward": torch.tensor(reward), **entries}
        )

    off, second, episode = torch.tensor([False]), torch.tensor(1), torch.tensor(7)
    rows = [
        row(1, [[1.0]]),
        row(1, [[0.5]], segment=torch.tensor(0), episode_id=episode),
        row(1, [[0.5]], segment=second, episode_id=episode),  # of the same rollout
        row(2, [[0.5], [0.5]]),  # dense, 1 in all
        row(3, [[9.0]], scorable=off),
    ]
    pools = DifficultyPools(admit_easy=0.0)
    assert pools(lazy_stack(rows)).batch_size == (5,)
    assert [pools.solve_rate(i) for i in (1, 2, 3)] == [0.5, 1.0, None]
    pools.observe(group_of(2), 0.0)
    pools(lazy_stack(rows))  # the same group again, after a restart
    assert [pools.solve_rate(i) for i in (1, 2, 3)] == [0.5, 1.0, None]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data(), chance=st.sampled_from([0.0, 0.3, 1.0]))
def test_a_resumed_run_draws_what_the_other_one_draws(through_files, data, chance):
    """Saved after any number of draws, with whatever was observed; the state is plain values."""
    options = {"easy_at": 0.6, "hard_at": 0.2, "admit_easy": chance, "admit_hard": 0.5}

    def make():
        pools = DifficultyPools(**options)
        primer = make_primer(pools)
        parts = Compose(primer, RewardFunctions([score]))
        return pools, primer, ChatEnv(batch_size=1).append_transform(parts)

    pools, primer, env = make()
    seen = {}
    for _ in range(data.draw(st.integers(1, 12))):
        ((epoch, number),) = draw(primer, 1, env)
        seen[number] = epoch
        # Two rollouts a group; row 0 is never solved, so that there is always something to draw.
        for _ in range(2):
            pools.observe(group_of(number, epoch), float(number and data.draw(st.booleans())))
    other_pools, other, other_env = make()
    other.load_state_dict(through_files(primer.state_dict()))
    # The episode under way is over for nobody: the resumed run draws its row again.
    again = draw(other, 1, other_env) if other_pools.pool(number) in ("new", "normal") else None
    assert again in (None, [(epoch, number)])
    assert other_pools.state_dict()["solved"] == pools.state_dict()["solved"]
    for each in range(8):
        verdicts = [p.admits(each, epoch=5, seed=3) for p in (pools, other_pools)]
        assert verdicts[0] == verdicts[1]


def test_the_chance_is_that_of_the_setting_and_follows_from_seed_epoch_and_row():
    pools = DifficultyPools(admit_hard=0.25)
    for number in range(400):
        pools.observe(group_of(number), 0.0)

    def drawn(epoch, seed):
        return {i for i in range(400) if pools.admits(i, epoch=epoch, seed=seed)}

    first = drawn(1, 0)
    # Four standard deviations of a binomial of 400 and 1/4 are 35.
    assert 65 <= len(first) <= 135
    assert first == drawn(1, 0)
    assert len({frozenset(drawn(e, s)) for e in (1, 2) for s in (0, 1)}) == 4


def test_data_of_which_everything_is_solved_end_with_an_error():
    pools = DifficultyPools(admit_easy=0.0)
    primer = make_primer(pools)
    env = ChatEnv(batch_size=1).append_transform(Compose(primer, RewardFunctions([score])))
    for epoch, number in draw(primer, 8, env):
        pools.observe(group_of(number, epoch), 1.0)
    with pytest.raises(ValueError, match=r"no row that can be used.*difficulty pools leave it out"):
        env.reset()


def test_pools_come_before_the_first_draw_and_belong_to_the_position():
    primer = make_primer()
    draw(primer, 1)
    with pytest.raises(RuntimeError, match="before the first draw"):
        primer.admit_by(DifficultyPools(admit_easy=0.0))
    primer = make_primer(DifficultyPools(admit_easy=0.0))
    with pytest.raises(RuntimeError, match="once"):
        primer.admit_by(DifficultyPools(admit_easy=0.0))
    saved = primer.state_dict()
    for other in (make_primer(), make_primer(DifficultyPools(admit_easy=0.5))):
        with pytest.raises(ValueError, match="pools is"):
            other.load_state_dict(saved)
    with pytest.raises(ValueError, match="pools is"):
        primer.load_state_dict(make_primer().state_dict())


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({}, "every row is drawn anyway"),
        ({"easy_at": 1.5, "admit_easy": 0.0}, "easy_at"),
        ({"admit_hard": -0.1}, "admit_hard"),
        ({"easy_at": 0.2, "hard_at": 0.2, "admit_easy": 0.0}, "hard_at must be below"),
        ({"admit_easy": 0.0, "solved_at": math.nan}, "solved_at"),
    ],
)
def test_settings_that_can_take_no_effect_raise(options, hint):
    with pytest.raises(ValueError, match=hint):
        DifficultyPools(**options)
    assert POOLS == ("new", "easy", "normal", "hard")


def test_pools_ask_the_reward_that_is_named():
    def row(valid, right):
        return TensorDict(
            {
                "group_id": torch.tensor(group_of(1)),
                "reward": torch.tensor([[valid + right]]),
                "rewards": TensorDict({"valid": [[valid]], "right": [[right]]}),
            }
        )

    rows = lazy_stack([row(1.0, 0.0), row(1.0, 1.0)])
    for solved_by, rate in (("right", 0.5), (["valid", "right"], 0.5), ("valid", 1.0)):
        pools = DifficultyPools(admit_easy=0.0, solved_by=solved_by)
        pools(rows)
        assert pools.solve_rate(1) == rate
    with pytest.raises(ValueError, match=r"\['right', 'valid'\] are added.* Set solved_by"):
        DifficultyPools(admit_easy=0.0)(rows)


def test_a_collector_tells_pools_which_reward_counts_or_refuses(scripted):
    def right(completions):
        return [1.0] * len(completions)

    def length(completions):
        return [float(len(each)) for each in completions]

    def make(weights):
        pools = DifficultyPools(admit_easy=0.0)
        primer = make_primer(pools)
        functions = RewardFunctions([right, length], weights=weights)
        env = ChatEnv(batch_size=1).append_transform(Compose(primer, functions))
        return LLMCollector(env, scripted({})), pools

    _, pools = make([1.0, 0.0])
    assert pools.solved_by == ["right"], "the other one is a metric"
    with pytest.raises(ValueError, match=r"\['length', 'right'\] are added.*solved_by to the rew"):
        make([1.0, 0.1])

"""Groups without a signal are replaced by others until the batch is full."""

import logging

import pytest
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import LLMCollector, StreamingCollector
from collectors.resume.random_numbers import random_state, set_random_state
from objectives import GroupRefill, MCAdvantage, TopKRewardSelector
from torchrl_envs import ChatEnv, DataLoadingPrimer, RewardFunctions, StepCounter
from torchrl_modules import TransformersWrapper

SIGNAL = (2, 3, 7, 8, 9, 11)
"""Of the prompts 0 to 11; in the groups of the others all rewards are equal."""


class Scripted:
    """A reward that differs within the groups of some prompts: 1, 2, ... by the rollout's place."""

    __name__ = "scripted"

    def __init__(self, signal):
        self.signal, self.drawn = signal, []

    def __call__(self, completions, number, **_):
        self.drawn.append(list(number))
        seen = {}
        for n in number:
            seen.setdefault(n, 0)
        rewards = []
        for n in number:
            seen[n] += 1
            rewards.append(float(seen[n]) if n in self.signal else 1.0)
        return rewards


@pytest.fixture
def make(chatml_tokenizer, make_tiny_model):
    """A collector of three groups of two a batch, and what its reward was asked."""

    def make(part, *, signal=SIGNAL, num_rows=12, num_epochs=None, kind=LLMCollector, **settings):
        rows = [{"prompt": f"question {n}", "number": n} for n in range(num_rows)]
        reward = Scripted(signal)
        loader = DataLoadingPrimer(rows, group_size=2, shuffle=False, num_epochs=num_epochs)
        env = ChatEnv(batch_size=6).append_transform(
            Compose(loader, RewardFunctions([reward]), StepCounter(max_steps=1))
        )
        policy = TransformersWrapper(
            make_tiny_model(0),
            tokenizer=chatml_tokenizer,
            generate_kwargs={"max_new_tokens": 3},
            write_tokens=False,
        )
        buffer = ReplayBuffer(storage=LazyStackStorage(64), transform=part, batch_size=6)
        return kind(env, policy, replay_buffer=buffer, **settings), reward

    return make


def prompts_of(batch):
    return [int(group) % (1 << 32) for group in batch["group_id"].flatten().tolist()]


def refilled(max_draws=16):
    return MCAdvantage(2, scale="none", zero_variance=GroupRefill(max_draws=max_draws))


def test_the_next_prompts_are_drawn_in_the_rows_of_refused_groups_until_the_batch_is_full(make):
    collector, reward = make(refilled())
    batch = collector.collect()
    # 0, 1, 2 are drawn: two groups are refused; 3, 4: one is; 5, 6 and then 7 in its row.
    assert reward.drawn == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4], [5, 5], [6, 6], [7, 7]]
    assert prompts_of(batch) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    trained = collector.replay_buffer[:]
    assert prompts_of(trained) == [2, 2, 3, 3, 7, 7]
    # Rewards of 1 and 2, less their mean.
    assert trained["advantage"].flatten().tolist() == [-0.5, 0.5] * 3
    assert collector.num_collected == 16
    assert collector.replay_buffer._transform[0].take_refills() == {}
    collector.replay_buffer.empty()
    collector.collect()
    assert reward.drawn[5:] == [[8, 8, 9, 9, 10, 10], [11, 11]]
    assert prompts_of(collector.replay_buffer[:]) == [8, 8, 9, 9, 11, 11]
    collector.shutdown()


@pytest.mark.parametrize(
    ("max_draws", "drawn", "trained"),
    [
        pytest.param(1, [[0, 0, 1, 1, 2, 2]], [2, 2], id="one draw: nothing is refilled"),
        pytest.param(
            2,  # batches, 6 groups: 0 to 5
            [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4], [5, 5]],
            [2, 2, 3, 3],
            id="six groups, the last draw included",
        ),
    ],
)
def test_at_the_bound_the_batch_goes_on_with_what_it_has(make, caplog, max_draws, drawn, trained):
    collector, reward = make(refilled(max_draws))
    with caplog.at_level(logging.WARNING, logger="collectors.llm_collector"):
        collector.collect()
    assert reward.drawn == drawn
    assert prompts_of(collector.replay_buffer[:]) == trained
    assert f"no others are drawn after {max_draws} draws (GroupRefill.max_draws" in caplog.text
    collector.shutdown()


def test_a_batch_without_any_signal_leaves_the_buffer_empty(make):
    collector, reward = make(refilled(2), signal=())
    assert len(collector.collect()) == 12
    assert len(collector.replay_buffer) == 0
    assert sum(map(len, reward.drawn)) == 12
    collector.shutdown()


def test_data_that_end_end_the_refill(make):
    collector, _ = make(refilled(), num_rows=5, num_epochs=1)
    batch = collector.collect()
    assert prompts_of(batch) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert prompts_of(collector.replay_buffer[:]) == [2, 2, 3, 3]
    collector.shutdown()


def tokens_of(batch):
    return [row["tokens", "full"].tolist() for row in batch.unbind(0)]


def test_a_resumed_collector_draws_what_it_would_have_drawn(make):
    first, _ = make(refilled())
    first.collect()
    state, random = first.state_dict(), random_state()
    expected = first.collect()
    second, reward = make(refilled())
    second.load_state_dict(state)
    set_random_state(random)
    found = second.collect()
    assert reward.drawn[0] == [8, 8, 9, 9, 10, 10]
    assert tokens_of(found) == tokens_of(expected)
    for collector in (first, second):
        collector.shutdown()


def test_the_best_of_other_groups_are_selected_where_a_group_gives_nothing(make):
    collector, reward = make(
        TopKRewardSelector(group_size=2, topk_size=1, above="mean", refill=GroupRefill())
    )
    collector.collect()
    assert reward.drawn == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4], [5, 5], [6, 6], [7, 7]]
    best = collector.replay_buffer[:]
    assert prompts_of(best) == [2, 3, 7]
    assert best["reward"].flatten().tolist() == [2.0, 2.0, 2.0]
    collector.shutdown()


def test_streaming_refuses_by_the_same_rule_and_raises_at_the_same_bound(make):
    # Every group is refused: with two batches of three groups the sixth one in a row ends it.
    collector, _ = make(refilled(2), signal=(), kind=StreamingCollector)
    with collector, pytest.raises(RuntimeError) as raised:
        collector.collect()
    assert "6 groups in a row were refused" in str(raised.value.__cause__)
    assert "collector.max_draws=2" in str(raised.value.__cause__)


def test_rewards_that_come_after_the_choice_are_refused(make, chatml_tokenizer, make_tiny_model):
    loader = DataLoadingPrimer([{"prompt": "question"}], group_size=2)
    env = ChatEnv(batch_size=2).append_transform(Compose(loader, StepCounter(max_steps=1)))
    policy = TransformersWrapper(make_tiny_model(0), tokenizer=chatml_tokenizer)
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=refilled())
    with pytest.raises(ValueError, match="the environment gives no reward"):
        LLMCollector(env, policy, replay_buffer=buffer, postproc=lambda rows: rows)
    with pytest.raises(ValueError, match="max_draws"):
        GroupRefill(max_draws=0)
    with pytest.raises(ValueError, match="A group of one never has a signal"):
        MCAdvantage(1, zero_variance=GroupRefill())

"""From a reward, sparse or dense, to the advantage that a loss reads and the numbers of a log."""

import math

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose, RewardClipping, RewardScaling, SignTransform
from torchrl.envs.utils import check_env_specs

from collectors import LLMCollector, OnPolicy, StreamingCollector
from objectives import MCAdvantage
from torchrl_envs import (
    AddThinkingPrompt,
    ChatEnv,
    DataLoadingPrimer,
    EnvironmentTools,
    EpisodeTransform,
    GSM8KEnv,
    RewardFunctions,
    StepCounter,
    reward_metrics,
)
from torchrl_envs.entries.rewards import turn_ends


class Echo:
    """A tool that says what it hears."""

    def reset(self, **row):
        del row

    def echo(self, word: str) -> str:
        """Say a word.

        Args:
            word: The word.
        """
        return word


@pytest.fixture
def collect(scripted, call_text):
    """Two rollouts of one group: one of a single turn, one of three."""

    def run(functions, *, buffer=None, **kwargs):
        script = {
            "<a>": ["one turn"],
            "<b>": [call_text("echo", word="x"), call_text("echo", word="yy"), "the end"],
        }
        rows = [{"prompt": "<a>"}, {"prompt": "<b>"}]
        env = ChatEnv(batch_size=2).append_transform(
            Compose(
                DataLoadingPrimer(rows),
                EnvironmentTools(Echo),
                RewardFunctions(functions, **kwargs),
                StepCounter(max_steps=5),
            )
        )
        collector = LLMCollector(
            env, scripted(script), replay_buffer=buffer, postproc=_one_group, total_trajectories=2
        )
        trajectories = collector.collect()
        collector.shutdown()
        return trajectories

    return run


def _one_group(trajectories):
    rows = [row.copy().set("group_id", torch.tensor(7)) for row in trajectories.unbind(0)]
    return lazy_stack(rows)


def turn_rewards(completions):
    """1, 2, 4, ... for the turns of a rollout."""
    turns = [sum(m["role"] == "assistant" for m in chat) for chat in completions]
    return [[2.0**i for i in range(count)] for count in turns]


def test_rewards_by_turn_are_dense_at_the_last_token_of_each_turn(collect):
    rows = collect([turn_rewards], level="turn", weights=[0.5]).unbind(0)
    for row, expected in zip(rows, ([0.5], [0.5, 1.0, 2.0]), strict=True):
        reward, mask = row["reward"], row["masks", "all_assistant_mask"]
        assert reward.shape == (len(row["tokens", "full"]), 1), "one per token, without padding"
        (places,) = reward.view(-1).nonzero(as_tuple=True)
        assert reward.view(-1)[places].tolist() == expected
        assert places.tolist() == turn_ends(mask).tolist()
        assert mask[places].all()
        assert int(places[-1]) == int(mask.nonzero()[-1]), "the last turn's end of turn"
        assert row["rewards", "turn_rewards"].item() == 2 * sum(expected)


def test_a_reward_of_the_trajectory_beside_rewards_by_turn_is_at_the_last_sampled_token(scripted):
    def whole(completions):
        return [10.0] * len(completions)

    env = ChatEnv(batch_size=1).append_transform(
        Compose(
            DataLoadingPrimer([{"prompt": "<a>"}]),
            RewardFunctions([turn_rewards], level="turn"),
            RewardFunctions([whole]),
        )
    )
    policy = scripted(["words"])
    end = env.step(policy(env.reset()))["next"]
    env.close()
    num_tokens = len(policy.engine.served[0][0]) + len(policy.engine.served[0][1].ids)
    assert end["reward"].shape == (1, num_tokens, 1)
    assert end["reward"].view(-1).tolist() == [0.0] * (num_tokens - 1) + [11.0]


def test_sparse_rewards_give_one_advantage_per_row(collect):
    buffer = ReplayBuffer(
        storage=LazyStackStorage(8), transform=MCAdvantage(2), batch_size=2, sampler=None
    )
    rows = collect([lambda completions: [float(len(chat)) for chat in completions]], buffer=buffer)
    assert [row["reward"].shape for row in rows.unbind(0)] == [(1, 1)] * 2
    stored = [buffer[i] for i in range(2)]
    # Returns 1 and 5: mean 3, Bessel's standard deviation sqrt(8).
    expected = 2 / (math.sqrt(8) + 1e-4)
    assert [row["advantage"].item() for row in stored] == pytest.approx([-expected, expected])


def test_dense_rewards_give_credit_by_turn(collect):
    buffer = ReplayBuffer(
        storage=LazyStackStorage(8), transform=MCAdvantage(2, credit="turn"), batch_size=2
    )
    collect([turn_rewards], level="turn", buffer=buffer)
    # All turns of the group are normalised together: 1 | 1, 2, 4 have mean 2, variance 2.
    scale = math.sqrt(2) + 1e-4
    short, long = (buffer[i] for i in range(2))
    assert short["advantage"].view(-1).unique().tolist() == pytest.approx([-1 / scale])
    ends = turn_ends(long["masks", "all_assistant_mask"])
    expected = [(-1 + 0 + 2) / scale, (0 + 2) / scale, 2 / scale]
    assert long["advantage"].view(-1)[ends].tolist() == pytest.approx(expected)


def test_dense_rewards_give_the_return_of_their_sum(collect):
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(2), batch_size=2)
    collect([turn_rewards], level="turn", buffer=buffer)
    expected = 3 / (math.sqrt(18) + 1e-4)  # Returns 1 and 7.
    assert [buffer[i]["advantage"].item() for i in range(2)] == pytest.approx([-expected, expected])


def test_a_wrong_number_of_turns_is_named(collect):
    def wrong(completions):
        return [[1.0, 1.0] for _ in completions]

    with pytest.raises(ValueError, match=r"wrong must return one reward per turn.*list of 1, got"):
        collect([wrong], level="turn")


def row(reward, sources, *, scorable=True, group=0, error=""):
    entries = {"reward": torch.tensor(reward).view(-1, 1), "group_id": torch.tensor(group)}
    entries["rewards"] = {name: torch.tensor([[value]]) for name, value in sources.items()}
    out = TensorDict(entries | {"scorable": torch.tensor([scorable])})
    return out.set_non_tensor("reward_errors", error)


def test_metrics_of_a_batch():
    nan = math.nan
    batch = lazy_stack(
        [
            row([1.0], {"right": 1.0, "judge": nan}),
            row([1.0], {"right": 1.0, "judge": nan}),
            row([0.0, 3.0], {"right": 2.0, "judge": 1.0}, group=1),
            row([9.0], {"right": nan, "judge": 4.0}, scorable=False, group=1, error="raised"),
        ]
    )
    metrics = reward_metrics(batch)
    third = 1 / 3
    assert metrics == pytest.approx(
        {
            "reward/mean": 5 / 3,
            "reward/std": math.sqrt(4 / 3),
            "reward/unscorable_fraction": 0.25,
            "reward/error_fraction": 0.25,
            "reward/zero_std_fraction": 1.0,
            "rewards/right/mean": 4 / 3,
            "rewards/right/std": math.sqrt(third),
            "rewards/right/applied_fraction": 0.75,
            "rewards/judge/mean": 2.5,
            "rewards/judge/std": math.sqrt(4.5),
            "rewards/judge/applied_fraction": 0.5,
        }
    )


def test_metrics_of_what_a_collector_gives(collect):
    def length(completions):
        return [float(len(chat)) for chat in completions]

    metrics = reward_metrics(collect([length, length], weights=[1.0, 0.5]))
    assert metrics["rewards/length/mean"] == metrics["rewards/length_2/mean"] == 3.0
    assert metrics["rewards/length/std"] == pytest.approx(math.sqrt(8))
    assert metrics["reward/mean"] == 4.5
    assert metrics["reward/zero_std_fraction"] == 0.0


def one(completions):
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("transform", "rewards"),
    [
        pytest.param(lambda: RewardScaling(loc=1.0, scale=2.0), [3.0, 3.0], id="scaled"),
        pytest.param(lambda: RewardClipping(-0.5, 0.5), [0.5, 0.5], id="clipped"),
        pytest.param(lambda: SignTransform(in_keys=["reward"]), [1.0, 1.0], id="its sign"),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["before the source", "after it"])
def test_torchrls_transforms_of_the_reward_act_on_it(scripted, transform, rewards, first):
    parts = (
        [transform(), RewardFunctions([one])] if first else [RewardFunctions([one]), transform()]
    )
    env = ChatEnv(batch_size=2).append_transform(
        Compose(DataLoadingPrimer([{"prompt": "a"}, {"prompt": "b"}]), *parts)
    )
    collected = LLMCollector(env, scripted(["done"], write_tokens=False)).collect()
    assert collected["reward"].flatten().tolist() == rewards
    assert collected["rewards", "one"].flatten().tolist() == [1.0, 1.0]
    env.close()


class Forgets(EpisodeTransform):
    """Three turns; before the last one the past is rewritten."""

    def after_turn(self, episode):
        if episode.num_turns < 3:
            episode.say({"role": "user", "content": "more"})
        if episode.num_turns == 2:
            episode.rewrite([{"role": "user", "content": "what was said"}])


@pytest.mark.parametrize("kind", ["in batches", "streaming"])
def test_torchrls_transforms_act_on_rewards_by_turn_before_a_rewritten_past(scripted, kind):
    data = DataLoadingPrimer([{"prompt": "a"}, {"prompt": "b"}])
    rewards = RewardFunctions([turn_rewards], level="turn")
    parts = (data, Forgets(), rewards, RewardScaling(loc=0.0, scale=3.0), RewardClipping(-9, 9))
    env = ChatEnv(batch_size=2).append_transform(Compose(*parts))
    policy = scripted(["done"])
    if kind == "streaming":
        with StreamingCollector(env, policy, staleness=OnPolicy()) as collector:
            rows = collector.collect()
    else:
        rows = LLMCollector(env, policy).collect()
    assert rows["segment"].tolist() == [0, 1, 0, 1]
    given = [reward[reward != 0].tolist() for reward in (row["reward"] for row in rows.unbind(0))]
    assert given == [[3.0, 6.0], [9.0]] * 2  # 1, 2 and 4 for the three turns


def test_a_second_thought_needs_a_second_turn():
    rows = [{"question": "2 + 2?", "answer": "#### 4"}]
    env = GSM8KEnv(dataset=rows).append_transform(AddThinkingPrompt(lambda _: True))
    with pytest.raises(ValueError, match="max_steps=2"):
        env.reset()
    env.close()


def test_the_specs_of_a_question_are_those_of_its_data(scripted):
    rows = [{"question": "2 + 2?", "answer": "#### 4"}] * 2
    check_env_specs(GSM8KEnv(dataset=rows, num_envs=2))
    env = GSM8KEnv(dataset=rows, num_envs=2)
    said = scripted(["<think>x</think><answer>4</answer>"], write_tokens=False)
    collected = LLMCollector(env, said).collect()
    assert collected["success"].flatten().tolist() == [True, True]
    assert collected["reward_right"].flatten().tolist() == collected["reward"].flatten().tolist()
    env.close()

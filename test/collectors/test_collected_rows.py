"""What users read of the rows that a collector gives, and of those that a buffer gives back."""

import pickle
from typing import Any

import pytest
import torch
from tensordict import lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs.transforms import Compose

from collectors import CheckpointStore, LLMCollector, RunState, StreamingCollector
from collectors.trajectory_rows import row_outline
from objectives import MCAdvantage
from torchrl_data import LogProbs, Masks, MissingEntryError, Tokens
from torchrl_data.keys import LOG_PROBS_FULL
from torchrl_data.missing_entry import known_entries
from torchrl_envs import (
    AnswerReward,
    ChatEnv,
    DataLoadingPrimer,
    FunctionTools,
    RewardFunctions,
    StepCounter,
    row_reward,
)
from torchrl_envs.rewards.kl import KLComputation
from torchrl_modules import TransformersWrapper

GROUPS = {"tokens": Tokens, "masks": Masks, "log_probs": LogProbs}


def one(completions):
    return [1.0] * len(completions)


def make_env(*parts, num_rows=2, group_size=2):
    rows = [{"prompt": "hi"}, {"prompt": "a longer question"}]
    transforms = [DataLoadingPrimer(rows, group_size=group_size), *parts, StepCounter(max_steps=1)]
    return ChatEnv(batch_size=num_rows).append_transform(Compose(*transforms))


@pytest.fixture
def policy(chatml_tokenizer, make_tiny_model):
    return TransformersWrapper(
        make_tiny_model(0), tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 4}
    )


def test_rows_hold_tokens_masks_and_log_probs_before_and_after_the_buffer(policy):
    buffer = ReplayBuffer(
        storage=LazyStackStorage(4), transform=MCAdvantage(2), batch_size=4, pin_memory=False
    )
    env = make_env(RewardFunctions([one]), num_rows=4)
    collected = LLMCollector(env, policy, replay_buffer=buffer).collect()
    assert len({len(row) for row in collected["tokens"].full}) > 1
    batch: Any
    for batch in (collected, buffer[:], buffer.sample()):
        for name, kind in GROUPS.items():
            assert type(batch[name]) is kind
            assert type(batch[0][name]) is kind
            assert batch[name].batch_size == (4,)
        full = batch["tokens"].full
        assert isinstance(full, list)
        prompts, responses = batch["tokens"].prompt, batch["tokens"].response
        for row, start, end in zip(full, prompts, responses, strict=True):
            assert torch.equal(row, torch.cat([start, end]))
        for mask, row in zip(batch["masks"].all_assistant_mask, full, strict=True):
            assert mask.shape == row.shape
            assert mask.dtype == torch.bool
        assert batch[1]["log_probs"].full.shape == full[1].shape
        padded, attention = batch["tokens"].to_padded(0)
        assert attention.all_attention_mask.sum() == sum(map(len, full))
        assert padded.full.shape[0] == 4


class Parser(AnswerReward):
    """1 for a message that has the letter of its row."""

    def components(self, text, row, query):
        return {"reward": float(row["letter"] in text), "success": True}


class Always(AnswerReward):
    """1, and a further entry."""

    def components(self, text, row, query):
        return {"reward": 1.0, "success": True}


def match(completions, letter, **_):
    return [float(one in said) for one, said in zip(letter, completions, strict=True)]


LETTERS = [{"prompt": "<a>", "letter": "a"}, {"prompt": "<b>", "letter": "b"}]


def unscored(*parts):
    transforms = [DataLoadingPrimer(LETTERS, group_size=2), *parts, StepCounter(max_steps=1)]
    return ChatEnv(batch_size=4).append_transform(Compose(*transforms))


def filled(*transforms):
    return ReplayBuffer(storage=LazyStackStorage(4), transform=Compose(*transforms), batch_size=4)


@pytest.mark.parametrize(
    "source", [pytest.param(Parser, id="parser"), pytest.param(RewardFunctions, id="functions")]
)
def test_rewards_given_in_the_buffer_reach_the_advantages(source, scripted):
    transform = RewardFunctions([match], weights=[2.0]) if source is RewardFunctions else Parser()
    policy = scripted({"<a>": ["a", "a"], "<b>": ["c"]})
    buffer = filled(MCAdvantage(2, scale="none"), transform)
    LLMCollector(unscored(), policy, replay_buffer=buffer).collect()
    full = 2.0 if source is RewardFunctions else 1.0
    assert buffer[:]["reward"].flatten().tolist() == [full, full, 0.0, 0.0]
    assert buffer[:]["advantage"].flatten().tolist() == [0.0] * 4
    if source is RewardFunctions:
        assert buffer[:]["rewards", "match"].flatten().tolist() == [1.0, 1.0, 0.0, 0.0]
        assert buffer[:]["scorable"].all()
    transform.close()


def test_a_reward_that_comes_after_the_advantages_is_refused_when_composed(scripted):
    buffer = filled(Parser(), MCAdvantage(2))
    with pytest.raises(ValueError, match="Parser stands before MCAdvantage"):
        LLMCollector(unscored(), scripted(["a"]), replay_buffer=buffer)
    with pytest.raises(ValueError, match="MCAdvantage needs rewards"):
        LLMCollector(unscored(), scripted(["a"]), replay_buffer=filled(MCAdvantage(2)))


@pytest.mark.parametrize("level", ["trajectory", "turn"])
def test_finished_rows_are_scored_as_in_their_environment(level, scripted):
    """By functions of strings, of messages, of one rollout, and of turns."""

    def of_turns(completions, number, **_):
        return [[float(n) + len(said)] for n, said in zip(number, completions, strict=True)]

    def of_text(completions, log_metric, **_):
        log_metric("length", len(completions[0]))
        return [None if said == "c" else float(len(said)) for said in completions]

    @row_reward
    def of_one(completion, number):
        if number == 1:
            raise ValueError("none")
        return number

    def make():
        functions = [of_turns] if level == "turn" else [of_text, of_one]
        return RewardFunctions(functions, level=level)

    rows = [{"prompt": "<a>", "number": 3}, {"prompt": "<b>", "number": 1}]

    def collect(*parts):
        transforms = [DataLoadingPrimer(rows), *parts, StepCounter(max_steps=1)]
        env = ChatEnv(batch_size=2).append_transform(Compose(*transforms))
        batch = LLMCollector(env, scripted({"<a>": ["aa"], "<b>": ["c"]})).collect()
        env.close()
        return batch

    later = make()
    expected, got = collect(make()), later(collect())
    assert later(got) is got
    for row in range(2):
        assert torch.equal(*(each[row]["reward"].nan_to_num(-9.0) for each in (got, expected)))
        assert got[row]["scorable"].tolist() == expected[row]["scorable"].tolist()
        rewards, own = got[row]["rewards"].to_dict(), expected[row]["rewards"].to_dict()
        torch.testing.assert_close(rewards, own, equal_nan=True)
    assert list(map(bool, got["reward_errors"])) == [False, level == "trajectory"]
    if level == "trajectory":
        assert got[0]["logged_metrics"] == {"length": 2.0}
    later.close()


def echo(text: str) -> str:
    """What it is given.

    Args:
        text: anything.
    """
    return text


def test_a_policy_is_not_shown_the_rewards_of_the_turn_before(scripted, call_text):
    """What TorchRL's ``step_mdp`` leaves out, entries that transforms declare included."""
    rewards = [Parser(), RewardFunctions([one])]
    parts = [DataLoadingPrimer(LETTERS), FunctionTools([echo]), *rewards]
    env = ChatEnv(batch_size=2).append_transform(Compose(*parts, StepCounter(max_steps=3)))
    policy = scripted({"<a>": [call_text("echo", text="x"), "a"], "<b>": ["c"]})
    seen = []
    policy.register_forward_pre_hook(lambda _, given: seen.append(set(given[0].keys())))
    batch = LLMCollector(env, policy).collect()
    assert batch["reward"].flatten().tolist() == [2.0, 1.0]
    assert batch["success"].flatten().tolist() == [True, True]
    declared = {"reward", "rewards", "scorable", "reward_errors", "success"}
    assert set(env.full_reward_spec.keys()) == declared
    assert len(seen) == 2
    assert [keys & declared for keys in seen] == [set(), set()]
    stepped = env.step(policy(env.reset()))
    assert declared <= set(stepped["next"].keys())
    assert seen[1] - {"_step"} <= set(env.step_mdp(stepped).keys())
    assert not declared & set(env.step_mdp(stepped).keys())
    env.close()


def test_rows_whose_prompts_nobody_knows_are_not_guessed(scripted):
    rows = [{"task": "<a>"}]
    env = ChatEnv(batch_size=1).append_transform(
        Compose(DataLoadingPrimer(rows, prompt_column="task"), StepCounter(max_steps=1))
    )
    batch = LLMCollector(env, scripted(["a"])).collect()
    with pytest.raises(MissingEntryError, match="completion_format='text' or 'messages'"):
        RewardFunctions([one])(batch)
    assert RewardFunctions([one], completion_format="messages")(batch)["reward"].item() == 1.0


def test_a_buffer_that_is_restored_writes_and_samples_as_the_one_that_was_saved(policy, tmp_path):
    def make(size=6):
        storage = LazyStackStorage(size)
        sampler = SamplerWithoutReplacement()
        return ReplayBuffer(
            storage=storage, sampler=sampler, transform=MCAdvantage(2), batch_size=1
        )

    def go_on(buffer):
        torch.manual_seed(0)
        drawn = [buffer.sample()]
        buffer.extend(rows[5:])  # the other half of a group, and one more: over the oldest rows
        drawn += [buffer.sample(), buffer[:]]
        return [
            (*(row[key].tolist() for key in keys), row["history", "full"].to_chats(), row["row"])
            for batch in drawn
            for row in batch.unbind(0)
        ]

    keys = ["advantage", ("tokens", "full"), ("log_probs", "full"), "group_id"]
    lengths = RewardFunctions([lambda completions: [float(len(said)) for said in completions]])
    collector = LLMCollector(make_env(lengths, num_rows=4), policy)
    rows = lazy_stack([row for _ in range(2) for row in collector.collect().unbind(0)])
    buffer = make()
    buffer.extend(rows[:5])  # one row waits for its group
    for _ in range(3):
        buffer.sample()  # the fourth row is left to be drawn
    with CheckpointStore(tmp_path) as store:
        RunState(buffer=buffer).save(store, 1)
        copy, other = pickle.loads(pickle.dumps(buffer)), make()
        assert RunState(buffer=other).restore(store) == 1
        assert go_on(buffer) == go_on(other) == go_on(copy)
        with pytest.raises(ValueError, match=r"4 rows were saved, .* holds 3"):
            RunState(buffer=make(3)).restore(store)
    with pytest.raises(RuntimeError, match=r"leave out the messages.*RunState\(buffer=buffer"):
        buffer.state_dict()
    ahead = ReplayBuffer(storage=LazyStackStorage(4), batch_size=2, prefetch=1)
    with pytest.raises(ValueError, match="drawn ahead"):
        RunState(buffer=ahead)


@pytest.mark.parametrize("collector", [LLMCollector, StreamingCollector])
def test_a_row_has_what_is_documented_and_nothing_else(policy, collector):
    env = make_env(RewardFunctions([one]), num_rows=4)
    with collector(env, policy, total_trajectories=4) as collecting:
        (row, *_) = collecting.collect().unbind(0)
    ragged = [
        *(("tokens", part) for part in ("prompt", "response", "full")),
        *(("masks", f"all_{kind}_mask") for kind in ("assistant", "attention")),
        *(("log_probs", part) for part in ("response", "full")),
        ("policy_versions", "full"),
        ("rewards", "one"),
    ]
    numbers = [
        *("reward", "scorable", "done", "terminated", "truncated", "group_id", "policy_version"),
        *("num_turns", "episode_id", "segment", "num_segments", "stop_code", "stop_limit"),
        *("parent_segment", "parent_tokens"),
    ]
    assert set(row.keys(include_nested=True, leaves_only=True)) == {*ragged, *numbers}
    objects = {"row", "stop_reason", "finish_reason", "reward_errors", "history"}
    objects |= {"row_kind", "agent"}
    assert set(row.keys()) == {key[0] for key in ragged} | set(numbers) | objects


@pytest.mark.parametrize("collector", [LLMCollector, StreamingCollector])
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(lambda: [RewardFunctions([one])], id="a reward"),
        pytest.param(lambda: [FunctionTools([echo]), RewardFunctions([one, one])], id="tools"),
        pytest.param(lambda: [Always()], id="what scores declares more"),
        pytest.param(
            lambda: [
                RewardFunctions([one]),
                KLComputation(LOG_PROBS_FULL, LOG_PROBS_FULL, kl_key="kl"),
            ],
            id="values by token and a penalty",
        ),
    ],
)
def test_what_rows_will_hold_is_known_before_anything_is_run(policy, collector, parts):
    env = make_env(*parts(), num_rows=4)
    env.check()
    outline = row_outline(env)
    with collector(env, policy, total_trajectories=4) as collecting:
        for row in collecting.collect().unbind(0):
            assert known_entries(row) == known_entries(outline)

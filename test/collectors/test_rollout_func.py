"""A user's own rollout function: what it returns is checked and becomes rows of the layout."""

import math

import pytest
import torch
from torchrl.data import LazyStackStorage, ReplayBuffer

from collectors import RolloutFunctionCollector, generate_rollout_completions
from collectors.rollout_rows import check_rollouts
from objectives import GRPOLoss, MCAdvantage
from torchrl_envs import DataLoadingPrimer, RewardFunctions
from torchrl_modules import TransformersWrapper

ROWS = [{"prompt": "What is 2 + 2?", "answer": "4"}, {"prompt": "hello", "answer": "world"}]
GOOD = {
    "prompt_ids": [[5, 6], [7]],
    "completion_ids": [[8, 9, 10], [11]],
    "logprobs": [[-0.5, -9.0, -0.25], [-1.0]],
    "env_mask": [[1, 0, 1], [1]],
    "env_reward": [1.0, 0.0],
}


def collector_of(rollout_func, policy, **settings):
    settings = {"num_rollouts": 2, "reward_field": "env_reward"} | settings
    return RolloutFunctionCollector(rollout_func, policy, DataLoadingPrimer(ROWS), **settings)


def test_rows_of_the_layout(scripted):
    collector = collector_of(lambda *_: GOOD, scripted(["x"]))
    rows = collector.collect()
    first = rows[0]
    assert first["tokens", "full"].tolist() == [5, 6, 8, 9, 10]
    assert first["tokens", "prompt"].tolist() == [5, 6]
    assert first["tokens", "response"].tolist() == [8, 9, 10]
    assert first["masks", "all_assistant_mask"].tolist() == [False, False, True, False, True]
    assert first["log_probs", "full"].tolist() == [0.0, 0.0, -0.5, 0.0, -0.25]
    assert first["policy_versions", "full"].tolist() == [-1, -1, 0, -1, 0]
    assert rows["reward"].flatten().tolist() == [1.0, 0.0]
    assert rows["rewards", "env_reward"].flatten().tolist() == [1.0, 0.0]
    assert rows["group_id"].tolist() == [0, 1]
    assert [row["stop_reason"] for row in rows.unbind(0)] == ["answered"] * 2
    assert [m.role for m in first["history"].full.unbind(0)][:2] == ["user", "assistant"]
    collector.shutdown()


def test_reward_functions_get_columns_and_returned_fields(scripted):
    seen = {}

    def reward(prompts, completion_ids, answer, env_reward, **kwargs):
        seen.update(prompts=prompts, ids=completion_ids, answer=answer, kwargs=sorted(kwargs))
        return [2 * value for value in env_reward]

    def not_mine(completions, **kwargs):
        return [None] * len(completions)

    collector = collector_of(
        lambda *_: {**GOOD, "turns": [3, 1]},
        scripted(["x"]),
        reward_field=None,
        reward_functions=[reward, not_mine],
    )
    rows = collector.collect()
    assert rows["reward"].flatten().tolist() == [2.0, 0.0]
    assert rows["rewards", "not_mine"].isnan().all()
    assert seen["prompts"][1] == "hello"
    assert seen["ids"] == [[8, 9, 10], [11]]
    assert seen["answer"] == ["4", "world"]
    assert "turns" in seen["kwargs"]
    collector.shutdown()


def test_a_bad_reward_marks_its_row_alone(scripted):
    collector = collector_of(
        lambda *_: {**GOOD, "env_reward": [math.nan, 0.5], "truncated": [True, False]},
        scripted(["x"]),
    )
    rows = collector.collect()
    assert rows["scorable"].flatten().tolist() == [False, True]
    assert "env_reward gave nan" in rows[0]["reward_errors"]
    assert rows["truncated"].flatten().tolist() == [True, False]
    assert rows["terminated"].flatten().tolist() == [False, True]
    collector.shutdown()


def test_two_exact_turns_are_trained_at_ratio_one(make_tiny_model, chatml_tokenizer):
    """The function of TRL's guide, with a second turn that goes on where the first one ended."""
    model = make_tiny_model()
    settings = {"max_new_tokens": 5, "temperature": 0.7}
    policy = TransformersWrapper(model, tokenizer=chatml_tokenizer, generate_kwargs=settings)
    seen = chatml_tokenizer.encode("seen", add_special_tokens=False)

    def rollout_func(prompts, trainer):
        firsts = generate_rollout_completions(trainer, prompts)
        before = [out["prompt_ids"] + out["completion_ids"] + seen for out in firsts]
        seconds = generate_rollout_completions(trainer, before)
        turns = list(zip(firsts, seconds, strict=True))
        return {
            "prompt_ids": [a["prompt_ids"] for a, _ in turns],
            "completion_ids": [a["completion_ids"] + seen + b["completion_ids"] for a, b in turns],
            "logprobs": [a["logprobs"] + [0.0] * len(seen) + b["logprobs"] for a, b in turns],
            "env_mask": [
                [1] * len(a["logprobs"]) + [0] * len(seen) + [1] * len(b["logprobs"])
                for a, b in turns
            ],
            "env_reward": [float(i % 2) for i in range(len(prompts))],
        }

    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(4), batch_size=8)
    collector = RolloutFunctionCollector(
        rollout_func,
        policy,
        DataLoadingPrimer(ROWS, group_size=4),
        num_rollouts=8,
        reward_field="env_reward",
        replay_buffer=buffer,
    )
    rows = collector.collect()
    assert rows["group_id"].tolist() == [0] * 4 + [1] * 4
    losses = GRPOLoss(policy, temperature=0.7)(buffer[:])
    assert abs(losses.kl_approx.item()) < 1e-5
    losses.total().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    collector.update_policy_weights_(model)
    assert collector.collect()[0]["policy_version"].item() == 1
    collector.shutdown()


@pytest.mark.parametrize("field", [None, "env_reward"])
def test_gdpo_weighs_the_rewards_of_the_functions(scripted, field):
    """One of four has a reward of 1 and 0.75 / 0.5; the other function counts nothing."""

    def is_first(completions):
        return [float(place == 0) for place in range(len(completions))]

    def place_of(completions):
        return list(range(len(completions)))

    advantage = MCAdvantage(4, estimator="gdpo")
    buffer = ReplayBuffer(storage=LazyStackStorage(4), transform=advantage, batch_size=4)
    collector = RolloutFunctionCollector(
        lambda *_: {
            "prompt_ids": [[5]] * 4,
            "completion_ids": [[8, 9]] * 4,
            "logprobs": [[-0.5, -0.5]] * 4,
            "env_reward": [3.0] * 4,
        },
        scripted(["x"]),
        DataLoadingPrimer(ROWS, group_size=4),
        num_rollouts=4,
        reward_field=field,
        reward_functions=RewardFunctions([is_first, place_of], weights=[2.0, 0.0]),
        replay_buffer=buffer,
    )
    collector.collect()
    collector.shutdown()
    found = sorted(buffer[:]["advantage"].unique().tolist())
    assert found == pytest.approx([-0.5, 1.5], rel=1e-3)


@pytest.mark.parametrize("wrong", ["raises", "returns nothing", "bad reward"])
def test_after_an_error_the_same_rows_are_drawn_again(scripted, wrong):
    asked = []

    def rollout_func(prompts, collector):
        asked.append(prompts)
        if len(asked) > 1:
            return GOOD
        if wrong == "raises":
            raise OSError("no server")
        return {} if wrong == "returns nothing" else {**GOOD, "env_reward": [1.0, [2.0]]}

    def reward(completions, env_reward, **columns):
        return env_reward

    settings = {"reward_field": None, "reward_functions": [reward]}
    collector = collector_of(rollout_func, scripted(["x"]), **settings)
    with pytest.raises((OSError, ValueError)):
        collector.collect()
    assert collector.collect()["group_id"].tolist() == [0, 1]
    assert asked[0] == asked[1]
    ledger = collector.data.ledger
    assert (ledger["drawn"], ledger["ended"], ledger["in_flight"]) == (2, 2, 0)
    assert collector.num_collected == 2
    collector.shutdown()


def test_rows_that_were_not_handed_on_are_drawn_again(scripted):
    fails = [True, False]

    def fail_once(batch):
        if fails.pop(0):
            raise OSError("the disk is full")
        return batch

    collector = collector_of(lambda *_: GOOD, scripted(["x"]), postproc=fail_once)
    with pytest.raises(OSError, match="the disk is full"):
        collector.collect()
    assert collector.num_collected == 0
    assert collector.collect()["group_id"].tolist() == [0, 1]
    ledger = collector.data.ledger
    assert (ledger["drawn"], ledger["ended"], collector.num_collected) == (2, 2, 2)
    collector.shutdown()


def test_finite_data_that_end_inside_a_batch(scripted):
    def rollout_func(prompts, collector):
        return {key: values[: len(prompts)] for key, values in GOOD.items()}

    data = DataLoadingPrimer([*ROWS, {"prompt": "third", "answer": ""}], num_epochs=1)
    collector = RolloutFunctionCollector(
        rollout_func, scripted(["x"]), data, num_rollouts=2, reward_field="env_reward"
    )
    assert [batch["group_id"].tolist() for batch in collector] == [[0, 1], [2]]
    assert collector.num_collected == 3
    assert data.ledger["ended"] == 3
    collector.shutdown()


def test_weights_under_torchrls_names_and_with_a_version(make_tiny_model, chatml_tokenizer):
    policy = TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer)
    collector = collector_of(lambda *_: GOOD, policy)
    other = make_tiny_model(1).state_dict()
    assert collector.update_policy_weights_(state_dict=other, version=7) == 7
    assert collector.collect()[0]["policy_version"].item() == 7
    assert all(torch.equal(v, other[k]) for k, v in policy.model.state_dict().items())
    with pytest.raises(TypeError, match=r"RolloutFunctionCollector.*got 0 of them"):
        collector.update_policy_weights_()
    collector.shutdown()


def test_generated_completions(scripted, chatml_tokenizer):
    class Owner:
        policy = scripted({"hello": ["world"], "2 + 2": ["4"]})

    chat = [{"role": "user", "content": "hello"}]
    out = generate_rollout_completions(Owner, [chat, "What is 2 + 2?"])
    assert [o["text"] for o in out] == ["world", "4"]
    assert chatml_tokenizer.decode(out[0]["prompt_ids"]).endswith("<|im_start|>assistant\n")
    assert len(out[0]["logprobs"]) == len(out[0]["completion_ids"])
    assert out[0]["finish_reason"] == "stop"
    with pytest.raises(TypeError, match="string or a list of messages"):
        generate_rollout_completions(Owner, [3])


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"logprobs": None}, ValueError, r"\['logprobs'\] are missing"),
        ({"logprobs": [[-0.5, 0.0, -0.2]]}, ValueError, "'logprobs' has 1 items for 2 prompts"),
        ({"logprobs": [[-0.5], [-1.0]]}, ValueError, "'logprobs' of row 0 has 1 items for 3 comp"),
        ({"logprobs": [[-1, -1, -1], [0.5]]}, ValueError, "'logprobs' of row 1 .* got 0.5"),
        ({"logprobs": [[-1, -1, math.nan], [-1]]}, ValueError, "'logprobs' of row 0 .* token 2"),
        ({"logprobs": [[-1, -1, [-1]], [-1]]}, TypeError, "'logprobs' of row 0 .* number per"),
        ({"env_mask": [[1, 0], [1]]}, ValueError, "'env_mask' of row 0 has 2 items"),
        ({"env_mask": [[1, 0, 2], [1]]}, ValueError, "'env_mask' of row 0 must hold 0 and 1"),
        ({"prompt_ids": [[5], []]}, ValueError, "'prompt_ids' of row 1 is empty"),
        ({"prompt_ids": [[5], ["a"]]}, TypeError, "'prompt_ids' of row 1 must be a list of token"),
        ({"completion_ids": [[8, 9, -1], [1]]}, ValueError, "'completion_ids' of row 0 .* id -1"),
        ({"completion_ids": [[8, 9, 50], [1]]}, ValueError, "token id 50; the vocabulary has 50"),
        ({"completion_ids": "ab"}, TypeError, "'completion_ids' must be a list"),
        ({"env_reward": [1.0]}, ValueError, "'env_reward' has 1 items for 2 prompts"),
        ({"truncated": [0, "no"]}, TypeError, "'truncated' of row 1"),
    ],
)
def test_what_is_wrong_is_named(change, error, named):
    outputs = {key: value for key, value in (GOOD | change).items() if value is not None}
    with pytest.raises(error, match=named):
        check_rollouts(outputs, 2, vocab_size=50)


def test_a_token_that_the_model_does_not_know_is_refused(scripted, chatml_tokenizer):
    size = len(chatml_tokenizer)
    outputs = GOOD | {"completion_ids": [[8, 9, 10], [size]]}
    collector = collector_of(lambda *_: outputs, scripted(["x"]))
    with pytest.raises(ValueError, match=f"row 1 holds the token id {size}; the vocabulary has"):
        collector.collect()
    collector.shutdown()


def test_results_that_are_no_dictionary_and_tensors():
    with pytest.raises(TypeError, match="dictionary of lists, got list"):
        check_rollouts([GOOD], 1)
    tensors = {
        "prompt_ids": torch.tensor([[1, 2]]),
        "completion_ids": [torch.tensor([3])],
        "logprobs": [torch.tensor([-0.5])],
    }
    (row,) = check_rollouts(tensors, 1)
    assert (row.prompt_ids, row.completion_ids, row.log_probs) == ([1, 2], [3], [-0.5])
    assert row.sampled == [True]


def test_settings_that_cannot_work(scripted):
    policy = scripted(["x"])
    with pytest.raises(ValueError, match="no reward"):
        collector_of(lambda *_: GOOD, policy, reward_field=None)
    with pytest.raises(ValueError, match="whole groups of 2, got 3"):
        RolloutFunctionCollector(
            lambda *_: GOOD,
            policy,
            DataLoadingPrimer(ROWS, group_size=2),
            num_rollouts=3,
            reward_field="env_reward",
        )
    with pytest.raises(ValueError, match="did not return 'score', the reward field"):
        collector_of(lambda *_: GOOD, policy, reward_field="score").collect()

"""Preferences that several ranks learn are learnt as one process does, against its reference."""

import math

import pytest
import torch


@pytest.mark.parametrize("kind", ["copies", "shards"])
def test_preferences_of_ranks_are_learnt_as_by_one_process(found, kind):
    result = found("recipe with preferences")
    one, several = result["one"], result[kind]
    assert [step["step"] for step in several["metrics"]] == [1, 2, 3, 4]
    names = ("loss", "loss_nll", "accuracy", "chosen_reward", "rejected_reward", "grad_norm")
    for ours, theirs in zip(several["metrics"], one["metrics"], strict=True):
        assert theirs["num_pairs"] == 5 == ours["num_pairs"]
        for name in (*names, "held_out_loss", "held_out_accuracy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    first, *_, last = one["metrics"]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)  # the reference is the policy
    assert first["chosen_reward"] == pytest.approx(0, abs=1e-5)
    assert last["loss"] < first["loss"] - 0.01
    for name, value in one["model"].items():
        torch.testing.assert_close(several["model"][name], value, rtol=1e-3, atol=1e-5)


def test_adapters_in_shards_learn_preferences_as_one_process_and_go_on(found):
    """The reference is asked before the first step, while other ranks wait for a job."""
    result = found("recipe with preferences and adapters")
    one, shards = result["one"], result["shards"]
    assert [step["step"] for step in shards["metrics"]] == [1, 2, 3, 4]
    for ours, theirs in zip(shards["metrics"], one["metrics"], strict=True):
        for name in ("loss", "chosen_reward", "rejected_reward", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    assert one["metrics"][-1]["loss"] < one["metrics"][0]["loss"] - 1e-3
    for name, value in one["model"].items():
        torch.testing.assert_close(shards["model"][name], value, rtol=1e-3, atol=1e-5)
    first = [n for n in result["one adapter"] if "lora_A" in n]
    seeds = [result[f"{name} adapter"] for name in ("one", "other")]
    assert first
    assert all((seeds[0][n] - seeds[1][n]).abs().max() > 1e-2 for n in first)


@pytest.mark.parametrize("kind", ["copies", "shards"])
def test_a_reward_model_of_ranks_is_that_of_one_process(found, kind):
    result = found("reward model")
    one, several = result["one"], result[kind]
    assert [step["num_pairs"] for step in several["told"]] == [3, 1, 3]
    for ours, theirs in zip(several["told"], one["told"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9)
    assert len({step["loss_reward"] for step in one["told"]}) == 3
    assert one["model"].keys() == several["model"].keys()
    for name, value in one["model"].items():
        torch.testing.assert_close(several["model"][name], value)


def test_a_reward_model_in_shards_learns_as_in_one_process_and_goes_on(found):
    result = found("recipe of a reward model")
    one, shards = result["one"], result["shards"]
    assert [step["step"] for step in shards["metrics"]] == [1, 2, 3]
    names = ("loss", "loss_center", "accuracy", "chosen_reward", "rejected_reward", "grad_norm")
    for ours, theirs in zip(shards["metrics"], one["metrics"], strict=True):
        assert ours["num_pairs"] == 5
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    tests = {n: {x["step"]: x for x in result[n]["tests"]} for n in ("one", "shards")}
    for step in range(4):
        for name in ("loss", "accuracy", "chosen_reward", "rejected_reward"):
            ours, theirs = (tests[each][step][name] for each in ("shards", "one"))
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    assert tests["one"][3]["loss"] < tests["one"][0]["loss"] - 0.01
    for name, value in one["model"].items():
        torch.testing.assert_close(shards["model"][name], value, rtol=1e-3, atol=1e-5)
    # Adapters are merged into what is saved, and the head is the one that was trained.
    changed = {n for n, x in result["halfway"].items() if not torch.equal(x, one["model"][n])}
    assert {"score.weight", "model.layers.0.self_attn.q_proj.weight"} <= changed

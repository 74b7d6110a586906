"""Adapters with a KL to the model that they are over: on ranks, after a warm start, and resumed."""

import pytest
import torch


@pytest.mark.parametrize("kind", ["given", "warm"])
def test_adapters_with_a_reference_go_on_in_shards_and_in_one_process(found, kind):
    result = found("recipe with a reference")[kind]
    one, shards = result["one"], result["shards"]
    assert [step["step"] for step in shards["metrics"]] == [1, 2, 3, 4]
    assert all("loss" in step for step in one["metrics"])
    for ours, theirs in zip(shards["metrics"], one["metrics"], strict=True):
        for name in ("reward", "loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    for name, value in one["model"].items():
        torch.testing.assert_close(shards["model"][name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["one", "shards"])
def test_an_adapter_folder_is_over_the_model_that_it_was_trained_over(found, name):
    result = found("recipe with a reference")
    for kind, has_base in (("given", False), ("warm", True)):
        left = result[kind][name]
        assert left["has_base"] == has_base  # policy.model has what no warm start has changed
        torch.testing.assert_close(left["adapted"], left["merged"])
    gap = result["warm"]["one"]["merged"] - result["given"]["one"]["merged"]
    assert gap.abs().max() > 0.1

"""A recipe on several ranks: what one process trains, also with adapters, and when ranks die."""

import pytest
import torch


def test_adapters_of_ranks_that_are_killed_are_those_of_one_process(found):
    """Shards, then copies, then one process, of the folder alone; each but the last is killed."""
    result = found("recipe with adapters")
    one, two = result["one"], result["two"]
    assert [step["step"] for step in two["metrics"]] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(two["metrics"], one["metrics"], strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3), name
    moved = {name: value - result["base"][name] for name, value in one["model"].items()}
    for kind in ("adapter", "model"):
        assert two[kind].keys() == one[kind].keys()
        for name, value in one[kind].items():
            torch.testing.assert_close(two[kind][name], value, rtol=1e-3, atol=1e-6)
    assert max(float(value.abs().max()) for value in moved.values()) > 1e-3
    assert all("lora_" in name for name in two["adapter"])
    assert two["resumed"] == 3


def test_a_rank_that_is_killed_ends_the_others(found):
    """Of kill -9 nobody is told; who waits for the dead one says so, and does not wait long."""
    whole, without_1, without_0, alone, last = found("recipe with adapters")["ends"]
    assert whole[0] == last[0] == ""
    assert alone[0].startswith("[-9]")
    for (text, seconds), left, codes in (
        (without_1, 0, "[1, -9]"),
        (without_0, 1, "[-9, 1]"),
    ):
        assert text.startswith(codes)
        assert f"Rank {left} of 2 ends: rank {left} lost another one, which said nothing" in text
        assert seconds < 30

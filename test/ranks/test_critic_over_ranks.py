"""A critic that several ranks have learns what that of one process does, and judges as it does."""

import pytest
import torch


@pytest.mark.parametrize("kind", ["copies", "shards"])
def test_a_critic_of_ranks_is_that_of_one_process(found, kind):
    result = found("recipe with a critic")
    one, several = result["one"], result[kind]
    assert [step["step"] for step in several["metrics"]] == [1, 2, 3, 4]
    for ours, theirs in zip(several["metrics"], one["metrics"], strict=True):
        names = [name for name in theirs if name.startswith("critic/")]
        assert len(names) == 6
        # In the first step the critic alone learns, and there is no loss of the policy.
        assert ("loss" in theirs) == (theirs["step"] > 1)
        for name in (*names, *(("loss", "grad_norm") if "loss" in theirs else ())):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
    for part in ("critic", "model"):
        assert several[part].keys() == one[part].keys()
        for name, value in one[part].items():
            torch.testing.assert_close(several[part][name], value, rtol=1e-3, atol=1e-6)
    assert one["critic"]["score.weight"].abs().max() > 1e-3
    moved = {name: value - result["base"][name] for name, value in one["model"].items()}
    assert max(float(value.abs().max()) for value in moved.values()) > 1e-4

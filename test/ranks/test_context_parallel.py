"""Ranks that share out the tokens of their rows train what one process does."""

import math

import pytest
import torch

from objectives import Ranks

from .context_cases import CASES, RUNS

TRAINED = [
    (run, case)
    for run, (size, together, _) in RUNS.items()
    for case in (CASES if size == together else ("grpo", "lora"))
]


@pytest.mark.parametrize(("run", "case"), TRAINED)
def test_ranks_train_what_one_process_trains(found, run, case):
    """Losses, norms and parameters of two steps of AdamW with clipping, of each rank."""
    size, together, _ = RUNS[run]
    # The norms of Qwen3 are float32 and round by micro-batch, as the softmax of capped scores does.
    is_exact = size == together and case != "capped scores, windows"
    close = 1e-9 if is_exact else 1e-6
    alone = found(f"one process, context, {case}, {size == together}")
    for rank in found(f"context, {run}"):
        shared = rank[case]
        torch.testing.assert_close(shared["parameters"], alone["parameters"], rtol=0, atol=close)
        for step, expected in zip(shared["steps"], alone["steps"], strict=True):
            assert step.keys() == expected.keys()
            for name, value in expected.items():
                assert math.isclose(step[name], value, rel_tol=0, abs_tol=close), name


@pytest.mark.parametrize(("run", "size"), [("2 ranks, ddp", 2), ("4 ranks, fsdp2", 4)])
def test_a_rank_reads_its_part_of_the_tokens_that_are_read_once(found, run, size):
    """As many tokens as one process by their number, rounded up to two chunks for each rank."""
    for case in ("grpo", "two tokens"):
        alone = found(f"one process, context, {case}, True")["read"]
        due = [2 * -(-count // (2 * size)) for count in alone]
        assert [rank[case]["read"] for rank in found(f"context, {run}")] == [due] * size
        assert case == "two tokens" or sum(alone) > 100


@pytest.mark.parametrize("size", [2, 4])
def test_scores_of_all_kinds_are_those_of_one_process(found, size):
    alone = found("one process, context, scores")
    for rank in found(f"context, scores, {size} ranks"):
        assert rank.keys() == alone.keys()
        for name, scores in alone.items():
            for mine, expected in zip(rank[name], scores, strict=True):
                assert (mine is None) == (expected is None), name
                if expected is not None:
                    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6, msg=name)
    assert len(alone["plain"]) == 3
    assert all(x is not None for x in alone["plain"])


def test_each_layer_sends_keys_and_values_once_and_gathers_them_again(found):
    """Of 32 of 64 tokens, 2 heads of keys and of values of 16; and the scores of 32 targets."""
    heads, sums, scored = (2 * 32 * 2 * 2 * 16,), (32, 2, 2 * 16), (2 * 32,)
    for forward, backward, added in found("context, messages"):
        assert forward == [heads] * 3 + [scored]
        assert backward == [heads] * 3
        assert added == [sums] * 3


def test_what_can_not_be_shared_out_is_refused_on_every_rank(found):
    for plain, padded, adapted, drops, frozen in found("context, refused"):
        for unwrapped in (plain, adapted):
            assert "each rank of a context_group has a part of the gradient" in unwrapped
        assert "is read padded (as asked)" in padded
        assert "is in training mode and has dropout" in drops
        assert frozen == ""


def test_sizes_that_do_not_go_together_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="context_parallel_size=3 has to divide the number of"):
        Ranks.join(context_parallel_size=3)
    with pytest.raises(ValueError, match="context_parallel_size=2 do not go together"):
        Ranks.join(context_parallel_size=2, tensor_parallel_size=2)

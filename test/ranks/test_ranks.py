"""Several ranks train what one process with all of their rows would."""

import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from objectives import PackedBatch, Ranks
from objectives.batching.equal_shares import equal_shares, moved_to, smallest_bound

CASES = (
    "grpo",
    "grpo, empty ranks",
    "grpo, entropy of the window",
    "grpo, rows without a signal",
    "sft",
    "preferences",
    "labels",
    "distillation",
    "lora",
    "activation checkpointing",
    "bfloat16",
)
RUNS = [(2, case) for case in CASES] + [(4, case) for case in CASES[:2]]


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("size", "case"), RUNS)
def test_ranks_train_what_one_process_trains(found, size, case, how):
    """Losses, norms and parameters of two steps of AdamW with clipping, on every rank."""
    # float64 but for the norms of Qwen3, which are float32; bfloat16 rounds by the micro-batch.
    close = {"rtol": 0, "atol": 2e-2 if case == "bfloat16" else 1e-6}
    alone = found(f"one process, {case}")
    everyone = found(f"{size} ranks, {how}")
    for ranked in everyone:
        torch.testing.assert_close(ranked[case]["parameters"], alone["parameters"], **close)
        for step, expected in zip(ranked[case]["steps"], alone["steps"], strict=True):
            assert step.keys() == expected.keys()
            if case == "bfloat16":
                step, expected = ({"total": x["total"]} for x in (step, expected))
            for name, value in expected.items():
                assert math.isclose(step[name], value, rel_tol=0, abs_tol=close["atol"]), name
    shares = [ranked[case]["shares"] for ranked in everyone]
    for step in zip(*shares, strict=True):
        assert len({len(parts) for parts in step}) == 1, "as many micro-batches on each rank"
    is_ragged = [len({sum(parts) for parts in step}) > 1 for step in zip(*shares, strict=True)]
    assert any(is_ragged) or case != "grpo", "ranks had different numbers of rows"
    if case == "grpo, empty ranks":
        assert shares[1:] == [[[0]] * len(shares[0])] * (size - 1)


@pytest.mark.parametrize("case", ["grpo", "lora"])
def test_copies_of_shards_train_what_one_process_trains(found, case):
    """HSDP: two copies of the model, each in shards of two of the four ranks."""
    alone = found(f"one process, {case}")
    for ranked in found("4 ranks, hsdp"):
        close = {"rtol": 0, "atol": 1e-6}
        torch.testing.assert_close(ranked[case]["parameters"], alone["parameters"], **close)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_gradients_are_reduced_once_a_step_and_are_those_of_each_time(found, how):
    """Four micro-batches; a model of two layers and what is around them is reduced in pieces."""
    for rank in found(f"reduced, {how}"):
        num_pieces = rank["once"]["num"]
        assert rank["each"]["num"] == 4 * num_pieces > 0
        torch.testing.assert_close(rank["once"]["grads"], rank["each"]["grads"])


def test_what_is_gathered_under_autocast_is_in_bfloat16(found):
    """Of the recipes' wrapper; each rank receives all matrices in 2 bytes instead of 4."""
    for rank in found("gathered"):
        plain, narrow = rank
        assert plain["bytes"] == 2 * narrow["bytes"] > 0
        assert plain["dtypes"] == {torch.float32}
        assert narrow["dtypes"] == {torch.bfloat16}
        assert narrow["reduced"] == {torch.float32}


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_take_their_shards_from_rank_0_without_a_model_of_their_own(found, size):
    """Bytes at their peak, beside those that were there before; a layer is a sixteenth of all."""
    _, *others = found(f"loaded, {size} ranks")
    for rank in others:
        assert rank["equal"]
        assert rank["on meta before"]
        assert rank["peak"] < rank["model"] * (1 / size + 0.25)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_one_ranks_nan_skips_the_step_of_all(found, how):
    for rank in found(f"one nan, {how}"):
        skipped, made = rank["outcomes"]
        assert skipped[1] == "of rank 1 the loss is nan (loss_objective nan)"
        assert rank["kept"], "parameters are those of before, to the bit"
        assert made[1] == ""
        assert made[0] > 0


def test_the_norm_of_sharded_and_whole_gradients_is_that_of_all_of_them(found):
    assert found("partly sharded") == pytest.approx([13.0, 13.0])


def test_gradients_that_were_not_reduced_are_noticed(found):
    for unreduced, partial, no_ranks in found("unreduced"):
        assert "have different norms" in unreduced
        assert "so they were not reduced" in unreduced
        assert "PackedScorer: model.layers.0 of Qwen3ForCausalLM is sharded" in partial
        assert "parameters are spread over several ranks" in no_ranks


def test_gradients_of_models_without_a_wrapper_are_averaged(found):
    """Of (10, -20), of 20 alone, of (30, -60), and of none."""
    for grads, error in found("averaged"):
        assert grads == [[-5.0, -5.0], [10.0, 10.0], [-15.0, -15.0], None]
        assert "Ranks.average_gradients: ranks give [1, 4] parameters" in error


def test_passes_of_limited_size_are_as_many_on_each_rank(found):
    assert found("limited") == [5, 20]


def test_a_rank_that_fails_ends_the_others_with_the_cause(found):
    text = found("failing")
    assert "ValueError: the disk of rank 1 is full" in text
    assert (
        "RankFailedError: Rank 0 of 2 ends: rank 1 failed of ValueError: the disk of rank 1 is full"
    ) in text


def test_nobody_waits_for_ever(found):
    assert "Timed out waiting 3000ms" in found("stuck")[0]


def packed(lengths):
    """Rows of these lengths, of which all but the first token is trained."""
    tokens = sum(lengths)
    lengths = torch.tensor(lengths, dtype=torch.int64)
    first = torch.zeros(tokens, dtype=torch.bool)
    first[lengths.cumsum(0) - lengths] = True
    targets = tokens - len(lengths)
    return PackedBatch(
        ids=torch.arange(tokens),
        lengths=lengths,
        target_mask=~first,
        target_lengths=lengths - 1,
        sampled=torch.arange(targets) % 3 > 0,
        entries={"advantage": torch.arange(targets, dtype=torch.float64)},
        left_out=torch.arange(len(lengths)) % 5 == 0,
    )


rows = st.lists(st.integers(1, 30), max_size=12)


@given(rows, st.integers(1, 5), st.integers(1, 60))
def test_every_row_is_dealt_out_once(lengths, size, max_tokens):
    shares = equal_shares(packed(lengths), size, max_tokens=max_tokens)
    assert len({len(parts) for parts in shares}) == 1
    parts = sorted((p for parts in shares for p in parts if p.num_rows), key=lambda p: p.ids[0])
    assert [length for part in parts for length in part.lengths.tolist()] == lengths
    assert torch.equal(torch.cat([torch.arange(0), *[p.ids for p in parts]]), packed(lengths).ids)
    assert all(len(part.ids) <= max_tokens or part.num_rows == 1 for part in parts)
    for share in shares:
        again = pickle.loads(pickle.dumps([moved_to(part, "cpu") for part in share]))
        assert [vars(part).keys() for part in again] == [vars(part).keys() for part in share]
        for part, copy in zip(share, again, strict=True):
            torch.testing.assert_close(vars(copy), vars(part), rtol=0, atol=0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 4))
def test_no_cut_has_a_smaller_largest_part(lengths, num_parts):
    """Beside every way to cut the rows; a part of one row may have any size."""
    bounds = []
    for cut in itertools.combinations_with_replacement(range(len(lengths) + 1), num_parts - 1):
        parts = [lengths[a:b] for a, b in itertools.pairwise((0, *cut, len(lengths)))]
        bounds.append(max([1, *(sum(part) for part in parts if len(part) > 1)]))
    assert smallest_bound(lengths, num_parts) == min(bounds)


def test_one_process_has_the_micro_batches_of_before():
    batch = packed([5, 9, 3, 8, 20, 2])
    ours = Ranks.alone().scatter(batch, max_tokens=16)
    plain = list(batch.micro_batches(max_tokens=16))
    assert [p.lengths.tolist() for p in ours] == [p.lengths.tolist() for p in plain]
    assert not torch.distributed.is_initialized()


def test_what_ranks_refuse():
    with pytest.raises(ValueError, match="rank 0 of 1 gave no batch"):
        Ranks.alone().scatter(None, max_tokens=8)
    with pytest.raises(ValueError, match="max_tokens must be a positive number, got 0"):
        equal_shares(packed([3]), 2, max_tokens=0)
    with pytest.raises(ValueError, match="timeout_s"):
        Ranks.join(timeout_s=0.0)
    with pytest.raises(ValueError, match=r"Ranks: rank 2 of 2"):
        Ranks(2, 2)

"""Ranks that compute a model together train what one process does: matrices and experts."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.distributed import tensor_parallel

from torchrl_modules.model_splits import plans_of
from torchrl_modules.scoring.scorer import PackedScorer
from torchrl_modules.tiny_model import tiny_qwen3

from .split_models import SPLITS, mixture

CASES = [(2, case) for case, (_, *sizes) in SPLITS.items() if max(sizes) <= 2]
CASES += [(4, case) for case in SPLITS]


@pytest.mark.parametrize(("size", "case"), CASES)
def test_ranks_of_a_split_model_train_what_one_process_trains(found, size, case):
    """Losses, norms and parameters of two steps of AdamW with clipping, of each rank."""
    alone = found(f"one process, split {case}")
    for rank in found(f"{size} ranks, split"):
        split = rank[case]
        for name in ("parameters", "with penalty"):
            torch.testing.assert_close(split[name], alone[name], rtol=0, atol=1e-9)
        assert split["head in tiles"]
        for step, expected in zip(split["steps"], alone["steps"], strict=True):
            assert step.keys() == expected.keys()
            for name, value in expected.items():
                assert math.isclose(step[name], value, rel_tol=0, abs_tol=1e-9), name


@pytest.mark.parametrize(("size", "case"), CASES)
def test_ranks_that_compute_matrices_together_have_the_rows_of_one(found, size, case):
    _, matrices, _ = SPLITS[case]
    rows = [rank[case]["rows"] for rank in found(f"{size} ranks, split")]
    groups = [rows[i : i + matrices] for i in range(0, size, matrices)]
    assert all(each == group[0] for group in groups for each in group)
    assert len({repr(group[0]) for group in groups}) == size // matrices


@pytest.mark.parametrize(("size", "case"), CASES)
def test_each_rank_holds_its_share_of_matrices_and_experts(found, size, case):
    """Bytes of memory behind each parameter, and not only those that it shows."""
    kind, matrices, _ = SPLITS[case]
    whole = found(f"one process, split {case}")["bytes"]
    for rank in found(f"{size} ranks, split"):
        held = rank[case]["bytes"]
        for name, num_bytes in held.items():
            is_whole = any(x in name for x in ("norm", "embed_tokens", "gate.weight"))
            num_pieces = size // matrices if is_whole else size
            assert num_bytes == whole[name] // num_pieces, name
    assert any(".experts." in name for name in whole) == (kind == "mixture")


def test_a_run_goes_on_however_it_is_split(found):
    """Two ranks, then four, then two that share out rows, then one process; and what is left."""
    result = found("recipe over splits")
    assert result["ends"] == [""] * 5
    one, two = result["one"], result["two"]
    assert [step["step"] for step in two["metrics"]] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(two["metrics"], one["metrics"], strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    assert two["model"].keys() == one["model"].keys()
    assert any("experts.3.up_proj" in name for name in two["model"])
    for name, value in one["model"].items():
        torch.testing.assert_close(two["model"][name], value, rtol=0, atol=1e-5)


def plans(model, matrices, experts, num_ranks=4):
    sizes = {"tensor_parallel_size": matrices, "expert_parallel_size": experts}
    return plans_of(model, **sizes, num_ranks=num_ranks, who="train")


def test_what_can_not_be_split_is_refused_by_name():
    dense, sparse = tiny_qwen3(64), mixture(64)
    assert set(plans(sparse, 2, 4).experts.values()) == {"grouped_gemm", "ep_dispatch_experts"}
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has num_key_value_heads=2, which 4"):
        plans(dense, 4, 1)
    with pytest.raises(ValueError, match="does not define an expert-parallel plan"):
        plans(dense, 1, 2)
    with pytest.raises(ValueError, match=r"cuts each expert in pieces \(moe_tp_experts, packed"):
        plans(sparse, 2, 1)
    with pytest.raises(ValueError, match="num_experts=4, which 8 ranks"):
        plans(sparse, 1, 8, num_ranks=8)
    small = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=64))
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no plan for tensor parallelism"):
        plans(small, 2, 1)


def test_a_model_that_transformers_has_split_is_refused():
    """Its hook adds up the gradients of a norm that earlier micro-batches have left."""
    model = tiny_qwen3(64)
    model._tp_size = 2
    with pytest.raises(TypeError, match="was split by Transformers itself"):
        PackedScorer(model)


def test_a_release_without_such_plans_is_refused(monkeypatch):
    monkeypatch.delattr(tensor_parallel, "apply_expert_parallelism")
    with pytest.raises(ImportError, match=r"train: Transformers .* Install 5\.19 or a later one"):
        plans(tiny_qwen3(64), 2, 1)

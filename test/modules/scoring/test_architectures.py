"""Architectures of different kinds are scored and sampled as they compute, or refused by name."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def architectures(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("architectures")


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        pytest.param("gpt2", ("packed", "tiles", "PrefixSlotReader"), id="learnt positions"),
        pytest.param("mistral", ("packed", "tiles", "PaddedReader"), id="sliding window"),
        pytest.param("gemma2", ("packed", "own logits", "PaddedReader"), id="scores capped"),
        pytest.param(
            "modernbert-decoder",
            ("packed", "own logits", "PaddedReader"),
            id="a transform before the head",
        ),
        pytest.param(
            "minicpm3", ("packed", "own logits", "PrefixSlotReader"), id="scaled before the head"
        ),
        pytest.param("doge", ("padded", "tiles", "PaddedReader"), id="a mask of its own"),
        pytest.param(
            "roberta",
            ("padded", "own logits", "OwnCacheReader"),
            id="positions behind the padding index",
        ),
        pytest.param("gpt_oss", ("padded", "tiles", "PaddedReader"), id="attention sinks"),
        pytest.param("lfm2", ("padded", "tiles", "OwnCacheReader"), id="convolutions"),
        pytest.param("mamba", ("padded", "tiles", "OwnCacheReader"), id="recurrent"),
        pytest.param("qwen3_next", ("padded", "tiles", "OwnCacheReader"), id="gated delta net"),
        pytest.param("falcon_h1", ("padded", "tiles", "OwnCacheReader"), id="in parallel"),
        pytest.param(
            "bamba", ("padded", "tiles", "OwnCachePositionsReader"), id="positions to be told"
        ),
        pytest.param(
            "recurrent_gemma",
            ("padded", "own logits", "WholeRowReader"),
            id="logits capped, cache not given back",
        ),
    ],
)
def test_values_gradients_and_samples_are_the_models_own(architectures, model_type, expected):
    found = architectures.examine(model_type)
    errors = {key: value for key, value in found.items() if key.endswith(("error", "built"))}
    assert not errors
    assert (found["scored"], found["head"], found["sampled"]) == expected
    # float32, sums in another order
    assert found["difference"] < 5e-5
    assert found["gradient"] < 5e-5
    assert found["ratio"] < 5e-5


def test_what_sees_the_whole_row_is_refused_by_name(architectures):
    found = architectures.examine("cpmant")
    for key in ("scored_error", "sampled_error"):
        assert "CpmAntForCausalLM is no policy" in found[key]

"""Sampling masks and routed experts in the record of a run, and what verification makes of them."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from collectors import LLMCollector
from collectors.record import RolloutRecorder, RunRecord, write_html
from collectors.record.atif import read_rollout, write_atif
from collectors.record.replay_columns import (
    experts_from_json,
    experts_to_json,
    masks_from_json,
    masks_to_json,
)
from collectors.verification import Cause, Recomputation, SampledRow, verify_rows
from torchrl_envs import ChatEnv, DataLoadingPrimer
from torchrl_modules import TransformersWrapper

SAMPLING = {"max_new_tokens": 12, "top_p": 0.8, "seed": 1}


@given(st.lists(st.binary(max_size=9), max_size=8))
def test_sets_are_read_as_they_were_written(sets):
    column = json.loads(json.dumps(masks_to_json(sets)))
    assert masks_from_json(column, len(sets)) == (sets if any(sets) else [])


@settings(max_examples=50)
@given(st.data(), st.sampled_from(["uint8", "int16"]), st.tuples(*[st.integers(0, 4)] * 3))
def test_experts_are_read_as_they_were_written(data, dtype, shape):
    bounds = np.iinfo(dtype)
    values = st.integers(int(bounds.min), int(bounds.max))
    size = int(np.prod(shape))
    flat = data.draw(st.lists(values, min_size=size, max_size=size))
    experts = torch.tensor(flat, dtype=getattr(torch, dtype)).reshape(shape)
    column = json.loads(json.dumps(experts_to_json(experts)))
    found = experts_from_json(column, shape[0])
    assert found is not None
    assert (found.dtype, found.shape) == (experts.dtype, experts.shape)
    assert torch.equal(found, experts)


def test_the_bytes_of_a_record_are_as_the_documentation_has_them():
    # "AgAB": 2, 0, 1; "////": three times 255. Little endian: -2 is fe ff.
    assert masks_to_json([b"", b"\x02\x00\x01"]) == {"lengths": [0, 3], "bytes": "AgAB"}
    known = torch.tensor([[[255]], [[255]], [[255]]], dtype=torch.uint8)
    assert experts_to_json(known) == {"shape": [3, 1, 1], "dtype": "uint8", "bytes": "////"}
    wide = torch.tensor([[[-2]]], dtype=torch.int16)
    assert experts_to_json(wide) == {"shape": [1, 1, 1], "dtype": "int16", "bytes": "/v8="}


@pytest.mark.parametrize(
    ("read", "column", "words"),
    [
        (masks_from_json, {"lengths": [3], "bytes": "AgAB"}, "1 tokens and 3 bytes"),
        (masks_from_json, {"lengths": [0, 4], "bytes": "AgAB"}, "there are 2 tokens and 3 bytes"),
        (masks_from_json, {"lengths": [-1, 4], "bytes": "AgAB"}, "it is damaged"),
        (masks_from_json, {"lengths": [0, 3], "bytes": "AgA"}, "sampling_masks can't be read"),
        (experts_from_json, {"shape": [2, 1, 2], "dtype": "uint8", "bytes": "AgAB"}, "3 bytes"),
        (experts_from_json, {"shape": [3, 1, 1], "dtype": "uint8", "bytes": "AgAB"}, "2 tokens"),
        (experts_from_json, {"shape": [2, 1, 1], "dtype": "int64", "bytes": ""}, "are int64"),
    ],
)
def test_a_damaged_column_is_refused(read, column, words):
    with pytest.raises(ValueError, match=words):
        read(column, 2)


def router_model(vocab_size):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            initializer_range=0.2,
            max_position_embeddings=512,
        )
        model = Qwen3MoeForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):  # the router, which begins at zero
                torch.nn.init.normal_(parameter, std=0.1)
        return model


@pytest.fixture(scope="module")
def recorded(chatml_tokenizer, tmp_path_factory):
    """A batch of a mixture of experts with both columns, its record, and a record without them."""
    folder = tmp_path_factory.mktemp("record")
    policy = TransformersWrapper(
        router_model(len(chatml_tokenizer)),
        tokenizer=chatml_tokenizer,
        generate_kwargs={**SAMPLING, "sampling_mask": True, "routed_experts": True},
    )
    prompts = [{"prompt": "What is 2 + 2?"}, {"prompt": "hello world"}]
    env = ChatEnv(batch_size=4).append_transform(
        DataLoadingPrimer(prompts, group_size=2, shuffle=False)
    )
    batch = LLMCollector(env, policy).collect()
    for name, replay in (("with", True), ("without", False)):
        with RolloutRecorder(folder / name, chatml_tokenizer, replay=replay) as recorder:
            recorder.write(1, batch)
    return policy, batch, RunRecord(folder / "with"), RunRecord(folder / "without")


def test_a_record_has_the_sets_and_the_experts_of_its_rows(recorded):
    _, batch, record, without = recorded
    samples = list(record.samples(1))
    assert len(samples) == 4
    for row, sample in zip(batch.unbind(0), samples, strict=True):
        assert isinstance(row, TensorDict) or row.batch_dims == 0
        own, read = SampledRow.of_collected(row), SampledRow.of_sample(sample)
        assert read.ids == own.ids
        assert any(own.sampling_masks)
        assert read.sampling_masks == own.sampling_masks
        assert own.experts is not None
        assert read.experts is not None
        for one, other in zip(read.experts, own.experts, strict=True):
            assert torch.equal(one, other)
        # As a trajectory of others it comes back whole.
        again = read_rollout(json.loads(json.dumps(write_atif(sample, agent="run"))))
        assert again.tokens == sample.tokens
    for sample in without.samples(1):
        assert sample.tokens.sampling_masks is None
        assert sample.tokens.routed_experts is None


def test_a_page_of_such_a_record_shows_it(recorded, tmp_path):
    *_, record, without = recorded
    pages = [write_html([run], tmp_path / run.run_folder.name) for run in (record, without)]
    parts = [next((page.parent / "data" / "0").glob("step-*.js")).read_bytes() for page in pages]
    assert parts[0] == parts[1]


def test_tokens_of_a_record_are_computed_in_their_sets_and_by_their_experts(recorded):
    policy, _, record, without = recorded
    rows = [SampledRow.of_sample(sample) for sample in record.samples(1)]
    certificate = verify_rows(rows, Recomputation(policy))
    assert certificate.is_clean
    assert [(each.cause, each.num_tokens) for each in certificate.replayed] == [
        ("truncation", certificate.num_tokens),
        ("routing", certificate.num_tokens),
    ]
    # Told another truncation the log-probs are right, as they are those of the sets.
    whole = TransformersWrapper(
        policy.model,
        tokenizer=policy.tokenizer,
        generate_kwargs={**SAMPLING, "top_p": 1.0},
        generate=False,
    )
    certificate = verify_rows(rows, Recomputation(whole))
    assert certificate.is_clean
    assert certificate.replayed[0].num_others > 0
    bare = [SampledRow.of_sample(sample) for sample in without.samples(1)]
    assert set(verify_rows(bare, Recomputation(whole)).counts) == {Cause.TRUNCATION}


def test_the_causes_of_wrong_columns_are_told_from_a_record(recorded):
    policy, _, record, _ = recorded
    rows = [SampledRow.of_sample(sample) for sample in record.samples(1)]
    others = []
    for row in rows:
        assert row.experts is not None
        others.append(replace(row, experts=[(layer + 1) % 8 for layer in row.experts]))
    certificate = verify_rows(others, Recomputation(policy))
    assert set(certificate.counts) == {Cause.ROUTING}
    alone = [
        [b"\x02" + i.to_bytes(2, "little") if here else b"" for i, here in zip(*pair, strict=True)]
        for pair in ((row.ids, row.sampled) for row in rows)
    ]
    others = [replace(row, sampling_masks=sets) for row, sets in zip(rows, alone, strict=True)]
    certificate = verify_rows(others, Recomputation(policy))
    assert set(certificate.counts) == {Cause.TRUNCATION}
    assert "not from the recorded sets" in certificate.rows[0].words[Cause.TRUNCATION]

"""Penalties, bias, least tokens, seeds and stop strings with vLLM, against slow references."""

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch
from sampling_reference import OPTIONS, STOPS, turn_log_probs

from torchrl_data import SamplingMasks
from torchrl_data.sampling_masks import sets_of_ids
from torchrl_modules import AsyncVLLMEngine, SamplingParameters
from torchrl_modules.vllm.bridges import BlockingVLLMEngine
from torchrl_modules.vllm.requests import MaskSource

PROMPTS = [[5, 6, 7, 8] * 10, [9, 10], [11] * 40, [12, 13, 14]]

pytestmark = pytest.mark.vllm


@pytest.fixture(
    params=["in process", "asynchronous", pytest.param("server", marks=pytest.mark.slow)]
)
def engine(request):
    if request.param == "server":
        yield request.getfixturevalue("server_engine")
        return
    inside = request.getfixturevalue("vllm_engine")
    if request.param == "in process":
        yield inside
        return
    served = AsyncVLLMEngine(inside)
    blocking = BlockingVLLMEngine(served)
    yield blocking
    blocking.close()
    served.close()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_log_probs_are_those_of_the_distribution_drawn_from(engine, model, options):
    params = SamplingParameters(max_new_tokens=16, stop_token_ids=STOPS, **options)
    rows = engine.generate(PROMPTS, params)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        expected = turn_log_probs(model, params, prompt, row.ids)
        # vLLM's kernels sum in another order.
        torch.testing.assert_close(
            torch.tensor(row.log_probs).double(), expected.double(), rtol=0, atol=5e-5
        )
        stops = [i for i, token in enumerate(row.ids) if token in STOPS]
        assert stops in ([], [len(row.ids) - 1])
        assert all(i >= params.min_tokens for i in stops)


def test_least_tokens_without_the_models_own_end_token_are_refused(engine):
    params = SamplingParameters(min_tokens=4, stop_token_ids=(2, 7))
    with pytest.raises(ValueError, match=r"own end tokens, \[3\] too.*Add them to stop_token_ids"):
        engine.generate(PROMPTS, params)


def test_a_seed_repeats_a_call_and_rows_of_one_prompt_differ(engine):
    params = SamplingParameters(max_new_tokens=8, stop_token_ids=(), seed=3)
    other = SamplingParameters(max_new_tokens=8, stop_token_ids=(), seed=4)
    first, again, third = (
        [row.ids for row in engine.generate([PROMPTS[1]] * 4, given)]
        for given in (params, params, other)
    )
    assert first == again != third
    assert len({tuple(ids) for ids in first}) == 4


def test_a_budget_below_the_least_tokens(engine):
    params = SamplingParameters(
        max_new_tokens=8, min_tokens=6, stop_token_ids=STOPS, logit_bias={2: 100.0}
    )
    rows = engine.generate(PROMPTS, params, max_new_tokens=[3, 8, 3, 8])
    assert [(row.finish_reason, len(row.ids)) for row in rows] == [("length", 3), ("stop", 7)] * 2


def test_a_stop_string_ends_a_turn_and_the_ids_are_those_that_were_drawn(
    engine, model, chatml_tokenizer
):
    free = SamplingParameters(max_new_tokens=12, temperature=0.0, stop_token_ids=())
    whole = engine.generate(PROMPTS, free)
    stop = chatml_tokenizer.decode(whole[1].ids[3:5])
    params = SamplingParameters(max_new_tokens=12, temperature=0.0, stop_token_ids=(), stop=(stop,))
    with pytest.raises(ValueError, match="with_tokenizer"):
        engine.generate(PROMPTS, params)
    rows = engine.generate(PROMPTS, params.with_tokenizer(chatml_tokenizer))
    assert rows[1].finish_reason == "stop"
    for row, all_of_it in zip(rows, whole, strict=True):
        assert row.ids == all_of_it.ids[: len(row.ids)]
        assert len(row.log_probs) == len(row.ids) == len(row.token_versions(otherwise=0))
        text = chatml_tokenizer.decode(row.ids)
        assert (stop in text) == (row.finish_reason == "stop")
        assert stop not in chatml_tokenizer.decode(row.ids[:-1])
    expected = turn_log_probs(model, params, PROMPTS[1], rows[1].ids)
    torch.testing.assert_close(
        torch.tensor(rows[1].log_probs).double(), expected.double(), rtol=0, atol=5e-5
    )


def test_a_stream_ends_at_a_stop_string(vllm_engine, chatml_tokenizer):
    free = SamplingParameters(max_new_tokens=12, temperature=0.0, stop_token_ids=())
    (whole,) = vllm_engine.generate([PROMPTS[1]], free)
    stop = chatml_tokenizer.decode(whole.ids[3:5])
    params = SamplingParameters(max_new_tokens=12, temperature=0.0, stop_token_ids=(), stop=(stop,))

    async def main():
        async with AsyncVLLMEngine(vllm_engine) as engine:
            stream = engine.submit(PROMPTS[1], params.with_tokenizer(chatml_tokenizer))
            return [token async for delta in stream for token in delta.ids], await stream.result()

    ids, result = asyncio.run(main())
    assert ids == result.generation.ids == whole.ids[: len(ids)]
    assert result.generation.finish_reason == "stop"
    assert stop in chatml_tokenizer.decode(ids)
    assert stop not in chatml_tokenizer.decode(ids[:-1])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_set_of_each_draw_is_read_off_the_log_probs(vllm_engine, model, asynchronous):
    params = SamplingParameters(
        max_new_tokens=8, stop_token_ids=(2,), top_k=5, temperature=0.7, sampling_mask=True
    )
    if asynchronous:
        with AsyncVLLMEngine(vllm_engine) as served, BlockingVLLMEngine(served) as engine:
            rows = engine.generate(PROMPTS, params)
    else:
        rows = vllm_engine.generate(PROMPTS, params)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        masks = SamplingMasks.of(row.sampling_masks)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *row.ids]])).logits[0, len(prompt) - 1 : -1]
        for kept, scores in zip(masks.kept(model.config.vocab_size), logits, strict=True):
            assert kept.nonzero().flatten().tolist() == sorted(scores.topk(5).indices.tolist())
        assert len(row.log_probs) == len(row.ids)


def test_a_set_that_an_engine_can_not_tell_is_refused_by_name(engine):
    params = SamplingParameters(top_p=0.9, sampling_mask=True)
    with pytest.raises(ValueError, match=r"sampling_mask (needs an engine.*=|is read from an eng)"):
        engine.generate(PROMPTS, params)


def test_sets_with_a_tie_behind_top_k_are_not_known():
    flat = SimpleNamespace(
        start_indices=[0, 4],
        end_indices=[4, 8],
        token_ids=[7, 7, 8, 9, 5, 6, 5, 9],
        logprobs=[-0.1, -0.1, -3.0, -math.inf, -1.0, -0.9, -1.0, -math.inf],
    )
    source = MaskSource(vocab_size=64)
    assert source.num_log_probs(SamplingParameters(top_k=2, sampling_mask=True)) == 3
    assert source.num_log_probs(SamplingParameters(top_p=0.9, sampling_mask=True)) == -1
    assert source.num_log_probs(SamplingParameters(top_k=2)) == 0
    read = SamplingMasks.of(source.read(SimpleNamespace(logprobs=flat)))
    assert read.sets() == SamplingMasks.from_ids([[7, 8], [5, 6]], 64).sets()
    flat.logprobs[-1] = -1.0
    with pytest.raises(ValueError, match="for token 1 are not known: more than top_k"):
        source.read(SimpleNamespace(logprobs=flat))
    # A release that returns them is read as it says.
    returned = SimpleNamespace(sampling_mask=SimpleNamespace(token_ids=[[9, 3]]))
    assert MaskSource(64, are_returned=True).read(returned) == sets_of_ids([[3, 9]], 64)

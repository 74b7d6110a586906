"""Adapters pushed alone to a real vLLM engine: each response is drawn by those it began with."""

import asyncio
import copy
import warnings
from pathlib import Path

import pytest
import torch
from adapted_models import adapted, largest_gap

from collectors.weight_update.adapters_alone import adapter_weights
from collectors.weight_update.in_process_updater import InProcessUpdater
from torchrl_modules import AsyncVLLMEngine, VLLMEngine, vLLMWrapper
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.weights.adapter_weights import AdapterWeights
from torchrl_modules.weights.expected_weights import UpdateRefused

pytestmark = [
    pytest.mark.vllm,
    # Building an engine collects garbage, whoever left it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PROMPTS = [[5, 6, 7, 8] * 10, [9, 10]]
ENDLESS = SamplingParameters(max_new_tokens=60, stop_token_ids=())


@pytest.fixture(scope="module")
def engine(model_directory):
    settings = {"max_lora_rank": 8, "max_loras": 3, "max_model_len": 256}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own, while it is imported and built
        built = VLLMEngine(model_directory, enable_lora=True, **settings)
    with built:
        yield built


def test_pushed_adapters_give_the_log_probs_of_the_peft_model(engine, model, chatml_tokenizer):
    first, second = adapted(model, 1), adapted(model, 2)
    policy = vLLMWrapper(engine, tokenizer=chatml_tokenizer)
    updater = InProcessUpdater(policy)
    last = [(model, engine.generate(PROMPTS, ENDLESS))]
    for trained in (first, second):
        version = updater.push(trained)
        assert engine.version == policy.policy_version == version
        last.append((trained, engine.generate(PROMPTS, ENDLESS)))
    for trained, generations in last:
        for prompt, generation in zip(PROMPTS, generations, strict=True):
            assert largest_gap(trained, prompt, generation) < 1e-4
            others = [other for other, _ in last if other is not trained]
            assert all(largest_gap(other, prompt, generation) > 0.05 for other in others)


def test_a_response_in_flight_keeps_its_adapters_to_the_end(engine, model):
    old, new = adapted(model, 3), adapted(model, 4)

    async def main():
        async with AsyncVLLMEngine(engine) as face:
            await face.update_weights(adapter_weights(old))
            async with face.submit(PROMPTS[0], ENDLESS, max_new_tokens=150) as stream:
                async for _ in stream:
                    break
                before = engine.version
                await face.update_weights(adapter_weights(new))
                beside = await face.generate(PROMPTS[0], ENDLESS)
                begun = await stream.result()
            folder = Path(engine._adapters._folder.name)
            held = len(list(folder.iterdir()))
            await face.update_weights(adapter_weights(old))
            return before, begun, beside, held, len(list(folder.iterdir()))

    before, begun, beside, held, kept = asyncio.run(main())
    assert [tuple(span) for span in begun.versions] == [(before, 0, 150)]
    assert [tuple(span) for span in beside.versions] == [(before + 1, 0, 60)]
    assert largest_gap(old, PROMPTS[0], begun.generation) < 1e-4
    assert largest_gap(new, PROMPTS[0], beside.generation) < 1e-4
    assert (held, kept) == (2, 1)


def test_what_it_cannot_apply_changes_nothing(engine, model):
    engine.update_weights(adapter_weights(serving := adapted(model, 5)))
    version = engine.version
    good = adapter_weights(serving)
    broken = copy.deepcopy(good)
    broken[next(iter(broken))][0, 0] = float("nan")
    pair = (torch.zeros(8, 64), torch.zeros(64, 8))
    elsewhere = AdapterWeights({"model.layers.0.nothing": pair})
    misshapen = AdapterWeights({"model.layers.0.self_attn.q_proj": (torch.ones(8, 63), pair[1])})
    refused = {
        "rank 16": adapter_weights(adapted(model, 5, rank=16)),
        "lora_A.weight holds NaN": broken,
        "the model has no model.layers.0.nothing": elsewhere,
        r"factors .64, 8. and .8, 63. for a weight of .128, 64.": misshapen,
    }
    for message, weights in refused.items():
        with pytest.raises(UpdateRefused, match=message):
            engine.update_weights(weights)
    with pytest.raises(RuntimeError, match="pushed models with LoRA"):
        engine.update_weights(model.state_dict())
    assert engine.version == version
    generation = engine.generate(PROMPTS, ENDLESS)[0]
    assert largest_gap(serving, PROMPTS[0], generation) < 1e-4


@pytest.mark.filterwarnings("ignore:.lora_bias=True")
def test_what_is_no_lora_is_refused_by_name(model):
    with pytest.raises(UpdateRefused, match="has no adapters"):
        adapter_weights(model)
    with pytest.raises(UpdateRefused, match="norm is trained whole"):
        adapter_weights(adapted(model, 1, modules_to_save=["norm"]))
    with pytest.raises(UpdateRefused, match="DoraLinearVariant"):
        adapter_weights(adapted(model, 1, use_dora=True))
    with pytest.raises(UpdateRefused, match="bias"):
        adapter_weights(adapted(model, 1, lora_bias=True))


def test_adapters_need_an_engine_that_takes_them(vllm_engine, model):
    with pytest.raises(UpdateRefused, match="enable_lora=True"):
        vllm_engine.update_weights(adapter_weights(adapted(model, 1)))

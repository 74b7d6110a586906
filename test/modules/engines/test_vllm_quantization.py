"""Weights that vLLM quantises as it loads them: again at each update, as the trainer does it."""

import warnings

import pytest
import torch

from torchrl_modules.quantized_forward import quantize_forward, quantized_rows
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.vllm.engine import VLLMEngine
from torchrl_modules.vllm.server import start_server
from torchrl_modules.vllm.server_engine import VLLMServerEngine

FP8 = "fp8_per_channel"
PROMPTS = [[5, 6, 7, 8] * 10, [9, 10], [11] * 40, [12, 13, 14]]
PARAMS = SamplingParameters(max_new_tokens=24, temperature=0.0, stop_token_ids=())
OPTIONS = {
    "quantization": FP8,
    "max_model_len": 128,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
}

pytestmark = pytest.mark.vllm


def drawn(engine):
    return [(row.ids, row.log_probs) for row in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def engine(model_directory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own, while it is imported and built
        built = VLLMEngine(model_directory, **OPTIONS)
    yield built
    built.close()


@pytest.fixture(scope="module")
def of_model(engine):
    """What an engine draws that has read the weights of `model` from its files."""
    assert engine.version == 0
    return drawn(engine)


def test_an_update_is_quantised_as_files_are(engine, of_model, model, other_model):
    engine.update_weights(other_model.state_dict())
    of_other = drawn(engine)
    engine.update_weights(model.state_dict())
    assert drawn(engine) == of_model != of_other
    assert engine.quantization == FP8
    assert engine.compute_dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("transfer", ["file", pytest.param("c10d", marks=pytest.mark.weekly)])
def test_a_server_quantises_what_it_is_sent(of_model, model, other_model, tmp_path, transfer):
    other_model.save_pretrained(tmp_path)
    with (
        start_server(str(tmp_path), **OPTIONS) as url,
        VLLMServerEngine(url, weight_transfer=transfer) as client,
    ):
        assert client.quantization == FP8
        assert drawn(client) != of_model
        client.update_weights(model.state_dict())
        assert drawn(client) == of_model


def test_the_trained_model_computes_what_vllm_draws_by(of_model, build_model):
    # Both add up in bfloat16, and what falls on the other side of a rounding is off by a whole
    # step of float8: the gap that is left is of noise, and the larger one is the rounding itself.
    gaps = []
    for is_quantized in (False, True):
        trained = build_model(0)
        if is_quantized:
            quantize_forward(trained, FP8)
        trained.bfloat16()
        found = []
        for prompt, (ids, told) in zip(PROMPTS, of_model, strict=True):
            with torch.no_grad():
                logits = trained(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            log_p = logits.float().log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
            found.append(log_p - torch.tensor(told))
        gaps.append(torch.cat(found).square().mean())
    assert gaps[1] < 0.7 * gaps[0]


def test_rows_are_rounded_as_vllm_rounds_them(engine):
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    torch.manual_seed(0)
    x = torch.randn(64, 96, dtype=torch.bfloat16) * torch.logspace(-8, 3, 64)[:, None].bfloat16()
    rounded, scale = quantized_rows(x, FP8)
    of_matrix = fp8._fp8_channel_scale(x.abs().amax(-1, keepdim=True))
    torch.testing.assert_close(scale, of_matrix, rtol=0, atol=0)
    assert torch.equal(rounded.float(), fp8._fp8_quant_per_channel(x, of_matrix).float())
    config = engine._llm.llm_engine.vllm_config
    with engine._names.set_current_vllm_config(config):
        of_token = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN, use_ue8m0=False)
    tokens, of_tokens = of_token.forward_native(x)
    torch.testing.assert_close(scale, of_tokens, rtol=0, atol=0)
    # By the scale's inverse, which differs in the last bit: one number in some hundred.
    assert (rounded.float() != tokens.float()).float().mean() < 0.02


def test_weights_that_were_saved_quantised_are_not_updated(engine, monkeypatch, model):
    config = engine._llm.llm_engine.vllm_config.model_config
    told = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    monkeypatch.setattr(config.hf_config, "quantization_config", told, raising=False)
    monkeypatch.setattr(engine, "_expected", None)
    with pytest.raises(RuntimeError, match="quantised before they were saved"):
        engine.update_weights(model.state_dict())
    monkeypatch.delattr(config.hf_config, "quantization_config")
    monkeypatch.setattr(config, "quantization", "bitsandbytes")
    with pytest.raises(RuntimeError, match="quantised by bitsandbytes"):
        engine.update_weights(model.state_dict())

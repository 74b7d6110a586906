"""Products of 8 bits over whole weights: the rounding, its gradient, and models that have it."""

import copy

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from torchrl_data import Tokens
from torchrl_modules import SamplingParameters, TransformersWrapper
from torchrl_modules.quantized_forward import (
    QuantizedLinear,
    forward_quantization,
    kernel_fault,
    quantize_forward,
    quantized_rows,
    scaled_product,
)
from torchrl_modules.tiny_model import tiny_qwen3

FP8 = "fp8_per_channel"


@pytest.fixture
def quantized(chatml_tokenizer):
    torch.manual_seed(0)
    model = tiny_qwen3(len(chatml_tokenizer))
    quantize_forward(model, FP8)
    return model


def test_rows_are_rounded_to_the_numbers_of_float8_by_a_scale_of_their_own():
    # Float8 has three bits behind the leading one: 3.25, 3.5, ... between 2 and 4, and 288, 320
    # between 256 and 512; 17 is half way between 16 and 18, and goes to the even one.
    x = torch.tensor([[4.48, 0.033, -3.1, 0.17], [0.0, 0.0, 0.0, 0.0], [0.0, -896.0, 2.0, 4.5]])
    rounded, scale = quantized_rows(x, FP8)
    assert rounded.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(scale, torch.tensor([[0.01], [1 / (512 * 448)], [2.0]]))
    expected = [[448.0, 3.25, -320.0, 16.0], [0.0] * 4, [0.0, -448.0, 1.0, 2.25]]
    assert rounded.float().tolist() == expected


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=24))
def test_what_is_rounded_is_off_by_a_sixteenth_at_most(row):
    x = torch.tensor([row])
    rounded, scale = quantized_rows(x, FP8)
    gap = (rounded.float() * scale - x).abs()
    # Below 2**-6 of a scale numbers are 2**-9 apart.
    assert bool((gap <= torch.maximum(x.abs() / 16, scale * 2**-10) * 1.0001).all())


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_layer_computes_and_learns_by_the_rounded_numbers(with_bias):
    torch.manual_seed(0)
    plain = nn.Linear(48, 20, bias=with_bias)
    layer = copy.deepcopy(plain)
    layer.__class__, layer.quantization = QuantizedLinear, FP8
    x = torch.randn(3, 5, 48, requires_grad=True)
    grad = torch.randn(3, 5, 20)
    out = layer(x)
    out.backward(grad)
    # The same in float64, of what the rounded numbers stand for.
    tokens, scales = quantized_rows(x.detach(), FP8)
    matrix, its = quantized_rows(plain.weight.detach(), FP8)
    tokens, matrix = tokens.double() * scales, matrix.double() * its
    own = nn.functional.linear(tokens, matrix)
    if with_bias:
        own = own + plain.bias.double()
        torch.testing.assert_close(layer.bias.grad, grad.sum((0, 1)))
    torch.testing.assert_close(out.double(), own, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), grad.double() @ matrix, rtol=1e-5, atol=1e-6)
    of_weight = grad.flatten(0, 1).double().t() @ tokens.flatten(0, 1)
    torch.testing.assert_close(layer.weight.grad.double(), of_weight, rtol=1e-5, atol=1e-5)
    assert (out - plain(x)).abs().max() > 1e-3
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(x)
    assert half.dtype == torch.bfloat16
    assert (half.float() - out).abs().max() < 0.05 * out.abs().max()


def test_the_kernel_of_a_gpu_is_tried_and_one_that_is_wrong_is_told(monkeypatch):
    assert not kernel_fault(torch.device("cpu"))
    swapped = "torchrl_modules.quantized_forward.scaled_product"
    monkeypatch.setattr(swapped, lambda t, s, m, w, d: scaled_product(t, s.flip(0), m, w, d))
    assert "off by" in kernel_fault(torch.device("cpu"))

    def fails(*_):
        raise RuntimeError("no such\n kernel")

    monkeypatch.setattr(swapped, fails)
    assert kernel_fault(torch.device("cpu")).endswith("no such kernel")


def test_what_a_model_draws_is_what_it_scores_and_not_what_whole_numbers_give(
    quantized, chatml_tokenizer, reference_log_probs
):
    policy = TransformersWrapper(quantized, tokenizer=chatml_tokenizer)
    prompts = [chatml_tokenizer.encode(text) for text in ("Who is there?", "Why?", "Who are you?")]
    params = SamplingParameters(max_new_tokens=12, seed=0)
    drawn = policy.engine.generate(prompts, params)
    rows = [torch.tensor(prompt + its.ids) for prompt, its in zip(prompts, drawn, strict=True)]
    packed = policy.log_prob(TensorDict({"tokens": Tokens.from_rows(full=rows)}, len(rows)))
    whole = tiny_qwen3(len(chatml_tokenizer))
    whole.load_state_dict(quantized.state_dict())
    for row, prompt, its, found in zip(rows, prompts, drawn, packed, strict=True):
        told, place = torch.tensor(its.log_probs), slice(len(prompt), len(row))
        own, other = (
            reference_log_probs(m.eval(), row.tolist())[place] for m in (quantized, whole)
        )
        torch.testing.assert_close(told, own, rtol=0, atol=1e-5)
        torch.testing.assert_close(told, found[place], rtol=0, atol=1e-5)
        assert (own - other).abs().max() > 1e-3
    assert forward_quantization(quantized) == FP8
    assert forward_quantization(whole) is None


def test_the_head_and_the_weights_stay_whole(quantized):
    assert type(quantized.lm_head) is nn.Linear
    linear = [e for e in quantized.modules() if isinstance(e, nn.Linear)]
    assert len(linear) == 7 * quantized.config.num_hidden_layers + 1
    assert {type(e) for e in linear if e is not quantized.lm_head} == {QuantizedLinear}
    assert {x.dtype for x in quantized.parameters()} == {torch.float32}


def test_what_an_engine_would_round_otherwise_is_refused(chatml_tokenizer):
    model = tiny_qwen3(len(chatml_tokenizer))
    with pytest.raises(ValueError, match="fp8_per_channel"):
        quantize_forward(model, "fp7")
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_experts=2
    )
    with pytest.raises(ValueError, match="experts"):
        quantize_forward(AutoModelForCausalLM.from_config(config), FP8)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="before adapters"):
        quantize_forward(adapted, FP8)


def test_adapters_over_it_are_whole(quantized):
    adapted = peft.get_peft_model(quantized, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    layer = quantized.model.layers[0].self_attn.q_proj
    torch.manual_seed(1)
    nn.init.normal_(layer.lora_B["default"].weight)
    x = torch.randn(4, layer.in_features)
    added = (x @ layer.lora_A["default"].weight.t()) @ layer.lora_B["default"].weight.t()
    own = layer.base_layer(x) + added * layer.scaling["default"]
    torch.testing.assert_close(layer(x), own)
    assert forward_quantization(adapted) == FP8


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_a_layer_compiles_as_a_whole(monkeypatch):
    # With the kernel of a GPU, which a CPU has, too, and which is asked for as it is compiled.
    name = "torchrl_modules.quantized_forward.has_kernel"
    monkeypatch.setattr(name, torch.compiler.assume_constant_result(lambda *_: True))
    torch.manual_seed(0)
    layer = nn.Linear(64, 48)
    layer.__class__, layer.quantization = QuantizedLinear, FP8
    found = []
    for each in (layer, torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")):
        layer.zero_grad()
        for num_rows in (20, 13):
            x = torch.linspace(-3, 2, num_rows * 64).view(num_rows, 64).sinh().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                out = each(x)
            out.float().square().mean().backward()
            found.append((out.detach(), x.grad, layer.weight.grad.clone()))
    for own, compiled in zip(found[:2], found[2:], strict=True):
        for a, b in zip(own, compiled, strict=True):
            assert float((a.float() - b.float()).norm() / a.float().norm()) < 0.02

"""QLoRA: adapters over 4 bits are drawn from, scored, pushed and saved as one and the same model.

The 4 bits are undone here by hand: NF4's sixteen values, of Table 4 (appendix E) of
https://arxiv.org/abs/2305.14314, by the largest value of each block of 64.
"""

import copy

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from collectors.weight_update.adapters_alone import adapter_weights
from collectors.weight_update.plain_weights import gathered_state_dict
from torchrl_modules import SamplingParameters
from torchrl_modules.engines.transformers import TransformersEngine
from torchrl_modules.policies.loading import load_causal_lm
from torchrl_modules.weights.expected_weights import UpdateRefused
from torchrl_modules.weights.quantized_weights import (
    declared_whole,
    four_bit_config,
    quantization_of,
    quantized_layers,
    settle_quantized_layers,
    whole_weight,
)

NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
PROMPTS = [[5, 7, 11, 13], [17, 19, 23], [5, 7, 11, 29, 31]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_tiny_model):
    path = tmp_path_factory.mktemp("whole")
    make_tiny_model(3, hidden_size=64).save_pretrained(path)
    return str(path)


@pytest.fixture
def model(folder):
    """Adapters, which do something, over four bits."""
    base = load_causal_lm(
        folder, dtype=torch.float32, quantization_config=four_bit_config(torch.float32)
    )
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted = peft.get_peft_model(base, config)
    for name, value in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1)
    settle_quantized_layers(adapted)  # as an engine over it does
    return adapted


def test_a_weight_is_the_one_that_the_paper_describes(model, folder):
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    name = "model.layers.1.mlp.up_proj"
    given = whole.get_submodule(name).weight.detach().reshape(-1, 64)
    largest = given.abs().amax(1, keepdim=True)
    nearest = NF4[(given[..., None] / largest[..., None] - NF4).abs().argmin(-1)]
    found = whole_weight(model.base_model.model.get_submodule(name))
    torch.testing.assert_close(found, (nearest * largest).reshape(found.shape), atol=1e-6, rtol=0)


def test_reading_and_saving_leave_what_is_computed(model):
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        trained = model.train()(ids).logits
        drawn = model.eval()(ids).logits
        model.state_dict()  # a checkpoint, a push
        after = model(ids).logits
    assert torch.equal(trained, drawn)
    assert torch.equal(drawn, after)


def test_whole_weights_are_the_same_model(model, folder):
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain.load_state_dict(gathered_state_dict(model))
    assert quantization_of(plain) is None
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, atol=2e-5, rtol=0)
        with model.disable_adapter():
            frozen = gathered_state_dict(model)
            expected = model(ids).logits
        plain.load_state_dict(frozen)
        torch.testing.assert_close(plain(ids).logits, expected, atol=2e-5, rtol=0)


def test_adapters_do_not_go_alone_to_an_engine_with_other_weights(model):
    with pytest.raises(UpdateRefused, match="weights have 4 bits, and those of the engine are oth"):
        adapter_weights(model)


def test_what_is_saved_says_that_it_is_whole(model, tmp_path):
    inside = model.base_model.model
    assert quantization_of(inside) == "4bit"
    with declared_whole(inside):
        inside.save_pretrained(tmp_path, state_dict=gathered_state_dict(model))
    assert quantization_of(inside) == "4bit"
    assert inside.config.quantization_config is not None
    loaded = load_causal_lm(str(tmp_path), dtype=torch.float32)
    assert not quantized_layers(loaded)
    assert quantization_of(loaded) is None
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=2e-5, rtol=0)


@pytest.mark.parametrize("is_copied", [False, True])
def test_tokens_are_drawn_as_they_are_scored_before_and_after_an_update(
    model, is_copied, reference_log_probs
):
    engine = TransformersEngine(model)
    params = SamplingParameters(max_new_tokens=6, temperature=1.0, seed=3)

    def largest_gap(drawing, version):
        assert drawing.version == version
        gaps = []
        for prompt, one in zip(PROMPTS, drawing.generate(PROMPTS, params), strict=True):
            again = reference_log_probs(model.eval(), [*prompt, *one.ids])[len(prompt) :]
            gaps.append((torch.tensor(one.log_probs) - again).abs().max())
        return float(max(gaps))

    drawing = engine.copied() if is_copied else engine
    assert largest_gap(drawing, 0) < 2e-5
    before = copy.deepcopy(drawing.generate(PROMPTS, params))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.requires_grad and "lora_B" in name:
                value.mul_(-3)
    drawing.update_weights(model.state_dict())  # as both collectors do
    assert largest_gap(drawing, 1) < 2e-5
    assert drawing.generate(PROMPTS, params) != before

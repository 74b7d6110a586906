"""Models with adapters that change them much, and how far drawn log-probs are from theirs."""

import copy

import pytest
import torch

peft = pytest.importorskip("peft")


def adapted(model, seed, *, rank=8, **settings):
    """A model with adapters that change it much; some layers have other ranks and scales."""
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=12,
        target_modules="all-linear",
        rank_pattern={"q_proj": 4},
        alpha_pattern={"o_proj": 20},
        **settings,
    )
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    for name, value in wrapped.named_parameters():
        if "lora_B" in name:
            value.data.normal_(std=0.1, generator=generator)
    return wrapped.eval()


@torch.no_grad()
def largest_gap(model, prompt, generation, start=0, end=None):
    logits = model(torch.tensor([prompt + generation.ids])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)[torch.arange(len(generation.ids)), generation.ids]
    return (expected - torch.tensor(generation.log_probs))[start:end].abs().max().item()

"""Activation checkpointing of the recipes, which changes no number: dropout stays off."""

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
)

from torchrl_agents.models.loading import recompute_activations
from torchrl_modules.scoring.packed_attention import drops_out

MADE = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32, n_embd=16, n_layer=2, n_head=2, **dict.fromkeys(("attn_pdrop",), 0.5)
        )
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            vocab_size=32, hidden_size=16, ffn_dim=16, num_hidden_layers=2, num_attention_heads=2,
            word_embed_proj_dim=16, dropout=0.5, attention_dropout=0.5, layerdrop=0.5,
        )
    ),
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=2, hidden_dropout=0.5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", MADE)
def test_a_model_that_recomputes_gives_what_it_gives_in_evaluation(family):
    """Logits and gradients to the bit, of layers that are read twice."""
    torch.manual_seed(0)
    model, ids = MADE[family]().eval(), torch.arange(12).view(2, 6)
    layers = [m for m in model.modules() if type(m).__name__.endswith(("Block", "DecoderLayer"))]
    assert len(layers) == 2

    def read():
        counts = []
        hooks = [m.register_forward_pre_hook(lambda *_: counts.append(1)) for m in layers]
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
        for hook in hooks:
            hook.remove()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return len(counts), [logits.detach(), *grads]

    once, want = read()
    recompute_activations(model)
    twice, got = read()
    assert (once, twice) == (2, 4)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert not drops_out(model)

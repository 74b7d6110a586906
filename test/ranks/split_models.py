"""Models of which ranks compute parts of a layer, and how many of them."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from torchrl_modules.tiny_model import tiny_qwen3

SPLITS = {
    "matrices": ("dense", 2, 1),
    "experts": ("mixture", 1, 2),
    "matrices and experts": ("mixture", 2, 2),
    "experts over all": ("mixture", 1, 4),
    "matrices, experts over all": ("mixture", 2, 4),
}
"""Of each case the model, and how many ranks compute a matrix, and have the experts, together."""


def build(kind):
    torch.manual_seed(0)
    if kind == "dense":
        return tiny_qwen3(64, hidden_size=32, head_dim=16, initializer_range=0.2).double()
    return mixture(64, experts_implementation="eager").double()  # the faster one has no float64


def mixture(vocab_size, **options):
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        head_dim=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        **options,
    )
    model = Qwen3MoeForCausalLM(config)
    for name, value in model.named_parameters():
        if name.endswith("gate.weight"):  # zeros, as the class makes them
            torch.nn.init.normal_(value, std=0.5)
    return model

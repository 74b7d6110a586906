"""What a model takes to train and to serve: bytes of each GPU, and bytes that move in a step.

    PYTHONPATH=. python benchmarks/sizing.py

Computed from a model's shapes, without its weights; ``test/test_sizing.py`` holds the function
against what tiny models really take. It prints the tables of docs/sizing.md.
"""

import sys
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from torchrl_modules.model_splits import layers_of
from torchrl_modules.weights.lazy_weights import shells

GPUS: Final = (1, 8, 16)
TOKENS: Final = 32_768
"""Of a micro-batch: the recipes' ``train.micro_batch_tokens``."""


class Sizes(NamedTuple):
    """Bytes; those of training are of the rank that has most."""

    num_parameters: int
    weights: int
    """Trained parameters in float32, a shard."""
    gradients: int
    optimizer: int
    """AdamW's two moments."""
    gathered: int
    """Whole layers: what is around the layers, the one that computes, and the next one."""
    activations: int
    """Inputs of the layers for a micro-batch, all that gradient checkpointing keeps."""
    served: int
    """Weights in an engine, and what a push sends to each: matrices in bfloat16."""
    cache_per_token: int
    """Keys and values of a token in an engine, in bfloat16."""

    @property
    def trained(self) -> int:
        """All of training."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations


def sizes(
    model: nn.Module, *, num_shards: int = 1, autocast: bool = True, num_tokens: int = TOKENS
) -> Sizes:
    """What a model takes under ``train.parallel=fsdp2``, without its weights.

    Args:
        model: a causal language model of Transformers, which may be on the ``meta`` device.
        num_shards: ranks over which parameters are spread; 1: one GPU has all.
        autocast: whether layers compute in bfloat16 (``train.autocast``).
        num_tokens: of a micro-batch.
    """
    config: Any = model.config
    config = config.get_text_config()
    each, around = split(model)
    parameters = [p for group in (*each, around) for p in group]
    # A shard has so many rows of each parameter; the first ranks have the most.
    shard = sum(-(-p.shape[0] // num_shards) * p[0].numel() * 4 for p in parameters)
    # One process computes in bfloat16 beside a float32 residual; shards are gathered in bfloat16.
    width = 2 if autocast and num_shards > 1 else 4
    layers = sorted((sum(p.numel() for p in group) for group in each), reverse=True)
    whole = sum(p.numel() for p in around) + sum(layers[:2])
    served = shells(dict(model.named_parameters(remove_duplicate=False)), torch.bfloat16)
    heads = config.num_key_value_heads or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Sizes(
        num_parameters=sum(p.numel() for p in parameters),
        weights=shard,
        gradients=shard,
        optimizer=2 * shard,
        gathered=whole * width if num_shards > 1 else 0,
        activations=config.num_hidden_layers * num_tokens * config.hidden_size * width,
        served=sum(value.numel() * value.element_size() for value in served.values()),
        cache_per_token=2 * config.num_hidden_layers * heads * head_dim * 2,
    )


def split(model: Any) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
    """The parameters of each layer that is sharded by itself, and those around them."""
    layers = [list(block.parameters()) for block in layers_of(model)]
    inside = {id(p) for layer in layers for p in layer}
    return layers, [p for p in model.parameters() if id(p) not in inside]


def known_models() -> Iterator[tuple[str, nn.Module]]:
    """Qwen3 in four sizes, as its model cards say."""
    shared: Any = {"vocab_size": 151_936, "head_dim": 128}
    dense = {
        "0.6B": (1024, 3072, 28, 16, 8, True),
        "8B": (4096, 12_288, 36, 32, 8, False),
        "32B": (5120, 25_600, 64, 64, 8, False),
    }
    for name, (hidden, inner, layers, heads, shared_heads, tied) in dense.items():
        yield (
            f"Qwen3-{name}",
            outline(
                Qwen3Config(
                    hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                    num_attention_heads=heads, num_key_value_heads=shared_heads,
                    tie_word_embeddings=tied, **shared,
                )
            ),
        )  # fmt: skip
    yield (
        "Qwen3-30B-A3B",
        outline(
            Qwen3MoeConfig(
                hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48,
                num_attention_heads=32, num_key_value_heads=4, num_experts=128,
                num_experts_per_tok=8, **shared,
            )
        ),
    )  # fmt: skip


def outline(config: Any) -> nn.Module:
    """A model without data."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def main() -> None:
    lines = [
        "| model | parameters | GPUs | weights, gradients, AdamW, GB | gathered, GB | inputs, GB "
        "| sum, GB |",
        "|---|---|---|---|---|---|---|",
    ]
    engines = [
        "| model | weights in an engine, a push to it | cache of 1,000 tokens |",
        "|---|---|---|",
    ]
    for name, model in known_models():
        for num_gpus in GPUS:
            found = sizes(model, num_shards=num_gpus)
            cells = [found.weights + found.gradients + found.optimizer, found.gathered]
            cells += [found.activations, found.trained]
            told = " | ".join(f"{cell / 1e9:.1f}" for cell in cells)
            lines.append(f"| {name} | {found.num_parameters / 1e9:.2f}e9 | {num_gpus} | {told} |")
        cache = found.cache_per_token * 1000 / 1e6
        engines.append(f"| {name} | {found.served / 1e9:.1f} GB | {cache:.0f} MB |")
    sys.stdout.write("\n".join([*lines, "", *engines]) + "\n")


if __name__ == "__main__":
    main()

"""What a model is said to take is what it takes: bytes of tiny models, counted."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from torchrl_modules.weight_transfer.file import weights_file

PATH = Path(__file__).parents[1] / "benchmarks/sizing.py"
SPEC = importlib.util.spec_from_file_location("sizing", PATH)
sizing = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sizing)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=67, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=40, tie_word_embeddings=request.param,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def num_bytes(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.parametrize("autocast", [True, False])
def test_a_process_alone_has_weights_gradients_moments_and_layer_inputs(model, autocast):
    told = sizing.sizes(model, autocast=autocast, num_tokens=10)
    assert told.num_parameters == sum(p.numel() for p in model.parameters())
    assert told.weights == num_bytes(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    kept = []
    ids = torch.arange(10)[None]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            hidden = model.model(ids).last_hidden_state
        model.lm_head(hidden).sum().backward()
    optimizer.step()
    inputs = {x.data_ptr(): x for x in kept if x.shape == (1, 10, 24)}
    # Beside them the norm after the last layer keeps what it read.
    assert told.activations == num_bytes(list(inputs.values())[: len(model.model.layers)])
    assert len(inputs) - len(model.model.layers) <= 2
    assert told.gradients == num_bytes(p.grad for p in model.parameters())
    moments = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    assert told.optimizer == num_bytes(moments)
    assert told.gathered == 0


def test_a_rank_has_the_largest_shard_and_gathers_two_layers(model):
    whole = sizing.sizes(model, autocast=False)
    layers, around = sizing.split(model)
    assert [num_bytes(layer) for layer in layers] == [num_bytes(layers[0])] * 3
    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        told = sizing.sizes(model, num_shards=8, autocast=False)
        half = sizing.sizes(model, num_shards=8)
        mesh = init_device_mesh("cpu", (8,))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
        assert told.weights == num_bytes(p.to_local() for p in model.parameters())
        assert told.weights > whole.weights // 8  # 67 rows over 8 ranks: 9 in the first
    finally:
        torch.distributed.destroy_process_group()
    assert told.gathered == num_bytes(around) + 2 * num_bytes(layers[0])
    assert half.gathered * 2 == told.gathered


def test_an_engine_is_sent_what_it_serves_and_caches_keys_and_values(model):
    told = sizing.sizes(model)
    with weights_file(
        dict(model.named_parameters(remove_duplicate=False)),
        dtype=torch.bfloat16, directory=None, is_near=True, who="Engine",
    ) as path:  # fmt: skip
        content = Path(path).read_bytes()
    assert told.served == len(content) - 8 - int.from_bytes(content[:8], "little")
    cache = DynamicCache()
    model.bfloat16()(torch.arange(10)[None], past_key_values=cache)
    keys_and_values = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    assert told.cache_per_token * 10 == num_bytes(keys_and_values)


def test_known_models_have_the_parameters_of_their_names():
    counts = {name: sizing.sizes(m).num_parameters for name, m in sizing.known_models()}
    expected = {"0.6B": 0.596e9, "8B": 8.19e9, "32B": 32.76e9, "30B-A3B": 30.53e9}
    for name, count in expected.items():
        assert counts[f"Qwen3-{name}"] == pytest.approx(count, rel=2e-3)

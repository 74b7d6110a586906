"""What a run takes on its device where the settings say nothing; GPUs are described."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_agents import device_defaults
from torchrl_agents.device_defaults import (
    Device,
    bytes_of_a_token,
    default_autocast,
    default_micro_batch_tokens,
    describe,
)
from torchrl_agents.settings.schema import AgentsConfig, CriticConfig, EngineConfig, PolicyConfig
from torchrl_modules import TransformersWrapper

GIB = 2**30
H100 = Device("cuda", "H100", True, 70 * GIB)
T4 = Device("cuda", "T4", False, 15 * GIB)
CPU = Device("cpu", "cpu", False, 0)


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        pytest.param(H100, "float32", True, id="a card that has it"),
        pytest.param(H100, "bfloat16", False, id="weights are of it already"),
        pytest.param(T4, "float32", False, id="a card that emulates it"),
        pytest.param(CPU, "float32", False, id="a CPU"),
    ],
)
def test_activations_are_bfloat16_where_the_card_has_it(device, dtype, expected):
    assert default_autocast(device, dtype) is expected


@pytest.mark.parametrize(
    ("device", "num_bytes", "expected"),
    [
        # 0.6 x 70 GiB / 1 MiB = 43,008, which is 42 x 1,024.
        pytest.param(H100, 2**20, 43_008, id="as many as fit"),
        # 0.6 x 15 GiB / 2.5 MiB = 3,686
        pytest.param(T4, 2.5 * 2**20, 3_072, id="whole thousands"),
        pytest.param(T4, 2**30, 2_048, id="never fewer than that"),
        pytest.param(H100, 1024, 131_072, id="never more than that"),
        pytest.param(CPU, 2**20, 32_768, id="a CPU"),
    ],
)
def test_a_micro_batch_takes_three_fifths_of_the_free_memory(device, num_bytes, expected):
    assert default_micro_batch_tokens(device, num_bytes) == expected


def test_a_cpu_is_described_as_one():
    assert describe("cpu") == CPU


def test_what_a_token_keeps_is_counted(make_tiny_model, chatml_tokenizer):
    def of_layers(num_layers):
        model = make_tiny_model(0, num_layers=num_layers)
        return model, TransformersWrapper(model, tokenizer=chatml_tokenizer)

    (model, one), (_, two), (_, three) = map(of_layers, (1, 2, 3))
    each = bytes_of_a_token(two.model, two.scorer) - bytes_of_a_token(one.model, one.scorer)
    assert bytes_of_a_token(three.model, three.scorer) - bytes_of_a_token(
        two.model, two.scorer
    ) == pytest.approx(each, rel=1e-6)
    # At least the inputs of its seven products: those of queries, keys and values are one.
    config = model.config
    inputs = 2 * config.hidden_size + config.intermediate_size
    inputs += config.num_attention_heads * config.head_dim
    assert 4 * inputs < each < 20 * 4 * inputs
    model, wrapped = of_layers(3)
    kept = bytes_of_a_token(wrapped.model, wrapped.scorer)
    model.gradient_checkpointing_enable()
    assert bytes_of_a_token(wrapped.model, wrapped.scorer) == pytest.approx(
        kept / 3 + 3 * 4 * config.hidden_size
    )


@pytest.mark.parametrize(("advantage", "expected"), [("group", 99 * 1024), ("gae", 5 * 1024)])
def test_a_critic_leaves_less_memory_for_a_micro_batch(
    advantage, expected, make_tiny_model, chatml_tokenizer, monkeypatch
):
    """Of n weights: gradients and moments take 12 n bytes, all of the critic 16 n, of 29 n."""
    actor = TransformersWrapper(make_tiny_model(0), tokenizer=chatml_tokenizer)
    count = sum(value.numel() for value in actor.parameters())
    free = Device("cuda", "card", True, 29 * count)
    monkeypatch.setattr(device_defaults, "describe", lambda _: free)
    # 0.6 x 17 n or n bytes: 102,000 tokens or 6,000, in whole thousands.
    monkeypatch.setattr(device_defaults, "bytes_of_a_token", lambda *_: count / 10_000)
    cfg: Any = SimpleNamespace(
        train=SimpleNamespace(micro_batch_tokens=None),
        loss=SimpleNamespace(advantage=advantage),
        critic=CriticConfig(),
    )
    device_defaults.settle_micro_batches(cfg, actor)
    assert cfg.train.micro_batch_tokens == expected


@pytest.mark.parametrize(("engine", "expected"), [("vllm", 99 * 1024), ("transformers", 131_072)])
def test_engines_of_agents_that_come_yet_leave_less_memory_for_a_micro_batch(
    engine, expected, make_tiny_model, chatml_tokenizer, monkeypatch
):
    """Of n weights: of two agents gradients and moments take 24 n bytes, the second model 4 n.

    Its engine has half of 0.5 of the GPU's 40 n bytes; of 55 n that are free 17 n are left, or 27 n
    without it.
    """
    actor = TransformersWrapper(make_tiny_model(0), tokenizer=chatml_tokenizer)
    count = sum(value.numel() for value in actor.parameters())
    free = Device("cuda", "card", True, 55 * count, 40 * count)
    monkeypatch.setattr(device_defaults, "describe", lambda _: free)
    monkeypatch.setattr(device_defaults, "bytes_of_a_token", lambda *_: count / 10_000)
    settings = EngineConfig(name=engine, engine_kwargs={"gpu_memory_utilization": 0.5})
    cfg: Any = SimpleNamespace(
        train=SimpleNamespace(micro_batch_tokens=None),
        policy=PolicyConfig(),
        agents=AgentsConfig(["first", "second"]),
        engine=settings,
    )
    device_defaults.settle_micro_batches(cfg, actor)
    assert cfg.train.micro_batch_tokens == expected

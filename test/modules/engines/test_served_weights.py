"""A server that runs already has the model that a run is about, or is refused."""

import os
from contextlib import closing
from typing import Any

import pytest
import torch

from torchrl_agents.models.served_model import check_adapted_model, check_served
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import (
    EngineConfig,
    PolicyConfig,
    RecipeConfig,
    RolloutsConfig,
    WarmStartConfig,
)
from torchrl_modules import TransformersWrapper, vLLMWrapper
from torchrl_modules.engines.engine import Generation
from torchrl_modules.policies.served_weights import check_engine_of, check_same_weights
from torchrl_modules.vllm.server import start_server
from torchrl_modules.vllm.server_engine import VLLMServerEngine

pytestmark = pytest.mark.vllm


def test_an_engine_of_other_weights_is_told_by_what_it_draws(
    server_engine, model, other_model, chatml_tokenizer
):
    trainer, other = (
        TransformersWrapper(each, tokenizer=chatml_tokenizer, generate=False)
        for each in (model, other_model)
    )
    sampler = vLLMWrapper(server_engine, tokenizer=chatml_tokenizer)
    names: Any = {"engine": "the server", "model": "mine"}
    assert check_engine_of(trainer, sampler, **names) < 1e-4
    with pytest.raises(ValueError, match=r"the server has other weights than mine: .* nats"):
        check_engine_of(other, sampler, **names)


def test_adapters_go_alone_over_the_weights_that_they_are_trained_over(
    server, server_engine, model, other_model, chatml_tokenizer, monkeypatch
):
    monkeypatch.setattr(server_engine, "max_adapters", 1)  # as if begun with --enable-lora
    trainer, other = (
        TransformersWrapper(each, tokenizer=chatml_tokenizer, generate=False)
        for each in (model, other_model)
    )
    sampler = vLLMWrapper(server_engine, tokenizer=chatml_tokenizer)

    def check(actor, num_steps):
        cfg = RolloutsConfig(
            policy=PolicyConfig(model="mine", lora_rank=4),
            engine=EngineConfig(name="vllm", url=server),
            warm_start=WarmStartConfig(num_steps=num_steps),
        )
        check_adapted_model(cfg, actor, sampler)

    check(trainer, 0)
    with pytest.raises(SettingsError, match=r"has other weights than policy\.model='mine'"):
        check(other, 0)
    with pytest.raises(SettingsError, match=r"warm_start\.num_steps=3 trains the model before"):
        check(trainer, 3)


def test_eight_bits_may_be_further_from_the_model(chatml_tokenizer):
    drawn = Generation([7, 8], [-1.0, -2.0], "length")

    def check(*log_probs, quantized):
        return check_same_weights(
            chatml_tokenizer,
            lambda *_: drawn,
            lambda *_: torch.tensor(log_probs),
            quantized=quantized,
            engine="it",
            model="mine",
        )

    assert check(-1.1, -2.5, quantized=True) == pytest.approx((0.1 + 0.5) / 2)
    for log_probs, quantized in (((-1.1, -2.5), False), ((-1.0, float("nan")), True)):
        with pytest.raises(ValueError, match="it has other weights"):
            check(*log_probs, quantized=quantized)


def test_a_server_is_evaluated_under_its_own_name_and_with_its_own_weights(
    model_directory, other_model, tmp_path
):
    options = {"max_model_len": 64, "kv_cache_memory_bytes": 16 << 20, "block_size": 32}
    # One that no other test has given weights.
    with start_server(model_directory, dtype="float32", **options) as url:

        def check(name, source):
            engine = EngineConfig(name="vllm", urls=[url])
            check_served(RecipeConfig(policy=PolicyConfig(model=name), engine=engine), source)

        check("mine", model_directory)
        check("mine", os.path.relpath(model_directory))
        with pytest.raises(SettingsError, match=r"has the model .*policy.model='mine'.*--served-"):
            check("mine", str(tmp_path))
        with closing(VLLMServerEngine(url)) as engine:
            engine.update_weights(other_model.state_dict())
        with pytest.raises(SettingsError, match=r"replaced by a run \(1\)"):
            check("mine", model_directory)

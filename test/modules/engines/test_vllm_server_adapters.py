"""Adapters pushed alone to a vLLM server: bytes, versions, rows in flight, and a killed server."""

import asyncio
import os
import signal
from contextlib import closing
from functools import partial

import psutil
import pytest
import torch
from adapted_models import adapted, largest_gap

from collectors.weight_update.adapters_alone import adapter_weights
from collectors.weight_update.in_process_updater import InProcessUpdater
from collectors.weight_update.plain_weights import gathered_state_dict
from torchrl_modules import AgentPolicies, EngineFleet, open_async, vLLMWrapper
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.vllm.bridges import OwnServerEngine
from torchrl_modules.vllm.server import start_server
from torchrl_modules.vllm.server_engine import VLLMServerEngine
from torchrl_modules.weights.adapter_weights import AdapterWeights
from torchrl_modules.weights.agent_weights import AgentWeights
from torchrl_modules.weights.expected_weights import UpdateRefused

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PROMPTS = [[5, 6, 7, 8] * 10, [9, 10]]
ENDLESS = SamplingParameters(max_new_tokens=40, stop_token_ids=())


@pytest.fixture(scope="module")
def fleet(model_directory):
    start = partial(
        start_server,
        model_directory,
        dtype="float32",
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        enable_lora=True,
        max_lora_rank=8,
    )
    fleet = EngineFleet([partial(OwnServerEngine, start, stall_timeout_s=60)])
    yield fleet
    fleet.close()


def client_of(fleet):
    return fleet._members[0].engine._client


def draw(fleet, prompt, **options):
    return asyncio.run(fleet.respond(prompt, ENDLESS, **options))


def test_adapters_go_alone_and_draw_what_the_peft_model_would(fleet, model, chatml_tokenizer):
    assert fleet.max_adapters == 4
    policy = vLLMWrapper(fleet, tokenizer=chatml_tokenizer)
    updater, client = InProcessUpdater(policy), client_of(fleet)
    first, second = (adapted(model, seed, rank=4) for seed in (1, 2))
    for trained, other in ((first, second), (second, first)):
        before = client._adapters.bytes_sent
        version = updater.push(trained)
        sent = client._adapters.bytes_sent - before
        own = sum(value.nbytes for value in adapter_weights(trained).values())
        assert own <= sent < own + 10_000  # names, shapes and the settings of the adapters
        assert sent < sum(value.nbytes for value in gathered_state_dict(trained).values()) / 2
        for prompt in PROMPTS:
            drawn = draw(fleet, prompt)
            assert [tuple(span) for span in drawn.versions] == [(version, 0, 40)]
            assert largest_gap(trained, prompt, drawn) < 1e-4
            assert largest_gap(other, prompt, drawn) > 0.05


def test_a_row_in_flight_keeps_its_adapters_and_they_go_with_it(fleet, model):
    old, new = (adapted(model, seed) for seed in (3, 4))
    client = client_of(fleet)

    async def main():
        await fleet.update_weights(adapter_weights(old))
        before = fleet.version
        begun = asyncio.ensure_future(fleet.respond(PROMPTS[0], ENDLESS, max_new_tokens=200))
        while not client._adapters._in_use[client._adapters.current.name]:
            await asyncio.sleep(0.01)
        await fleet.update_weights(adapter_weights(new))
        assert not begun.done()
        held = list(client._adapters._names)
        beside = await fleet.respond(PROMPTS[0], ENDLESS)
        return before, await begun, beside, held

    before, begun, beside, held = asyncio.run(main())
    assert len(held) == 2
    assert [tuple(span) for span in begun.versions] == [(before, 0, 200)]
    assert [tuple(span) for span in beside.versions] == [(before + 1, 0, 40)]
    assert largest_gap(old, PROMPTS[0], begun) < 1e-4
    assert largest_gap(new, PROMPTS[0], beside) < 1e-4
    asyncio.run(fleet.update_weights(adapter_weights(old)))
    served = {one["id"] for one in client._post("/v1/models", method="GET")["data"]}
    assert {name for name in served if name.startswith("version-")} == set(client._adapters._names)
    assert client._adapters._names == [client._adapters.current.name]


def test_what_it_cannot_apply_changes_nothing(fleet, model):
    serving = adapted(model, 5)
    asyncio.run(fleet.update_weights(adapter_weights(serving)))
    version = fleet.version
    broken = adapter_weights(adapted(model, 5))
    broken[next(iter(broken))][0, 0] = float("nan")
    pair = (torch.zeros(8, 64), torch.zeros(64, 8))
    refused = {
        "rank 16": adapter_weights(adapted(model, 5, rank=16)),
        "lora_A.weight holds NaN": broken,
        "the model has no model.layers.0.nothing": AdapterWeights({"model.layers.0.nothing": pair}),
        "LoRA adapters, which go alone": gathered_state_dict(serving),
    }
    for message, weights in refused.items():
        with pytest.raises(UpdateRefused, match=message):
            asyncio.run(fleet.update_weights(weights))
    assert fleet.version == version
    assert largest_gap(serving, PROMPTS[0], draw(fleet, PROMPTS[0])) < 1e-4


def test_each_of_several_runs_has_its_adapters_in_one_server(fleet, model):
    serving = adapted(model, 7)
    asyncio.run(fleet.update_weights(adapter_weights(serving)))
    with closing(VLLMServerEngine(client_of(fleet)._client.url)) as other:
        plain = other.generate(PROMPTS, ENDLESS)  # of a run that has pushed nothing yet
        own = adapted(model, 8)
        other.update_weights(adapter_weights(own))
        drawn = other.generate(PROMPTS, ENDLESS)
        with own.disable_adapter():
            assert largest_gap(own, PROMPTS[0], plain[0]) < 1e-4
        assert largest_gap(own, PROMPTS[0], drawn[0]) < 1e-4
        assert largest_gap(serving, PROMPTS[0], draw(fleet, PROMPTS[0])) < 1e-4
        assert [tuple(span) for span in drawn[0].versions] == [(1, 0, 40)]


def test_agents_of_one_program_have_their_adapters_in_one_server(fleet, model, chatml_tokenizer):
    url, trained = client_of(fleet)._client.url, [adapted(model, seed) for seed in (9, 10)]
    with closing(VLLMServerEngine(url)) as first, closing(VLLMServerEngine(url)) as second:
        own = (vLLMWrapper(engine, tokenizer=chatml_tokenizer) for engine in (first, second))
        policies = AgentPolicies(dict(zip("ab", own, strict=True)))
        assert InProcessUpdater(policies).push(dict(zip("ab", trained, strict=True))) == 1
        drawn = policies.engine.generate([PROMPTS[0]] * 2, ENDLESS, agents=["b", "a"])
        for of_agent, other, model_of in zip(drawn, drawn[::-1], trained[::-1], strict=True):
            assert largest_gap(model_of, PROMPTS[0], of_agent) < 1e-4
            assert largest_gap(model_of, PROMPTS[0], other) > 0.05

        async def main():
            engines = open_async(policies.engine)
            later = adapted(model, 11)
            weights = AgentWeights({"b": adapter_weights(later)})
            await engines.update_weights(weights, version=5)
            asked = (engines.respond(PROMPTS[0], ENDLESS, agent=name) for name in "ab")
            return later, await asyncio.gather(*asked)

        later, (stays, changed) = asyncio.run(main())
        assert largest_gap(trained[0], PROMPTS[0], stays) < 1e-4
        assert largest_gap(later, PROMPTS[0], changed) < 1e-4
        assert [tuple(span) for one in (stays, changed) for span in one.versions] == [
            (5, 0, 40),
            (5, 0, 40),
        ]


@pytest.mark.timeout(600)
def test_a_server_that_was_killed_comes_back_with_the_adapters(fleet, model):
    serving = adapted(model, 6)
    asyncio.run(fleet.update_weights(adapter_weights(serving)))
    version = fleet.version
    socket = client_of(fleet)._client.url.removeprefix("unix://")
    (server,) = [p for p in psutil.Process().children() if socket in p.cmdline()]
    os.kill(server.pid, signal.SIGKILL)

    async def again():
        while True:
            try:
                return await fleet.respond(PROMPTS[0], ENDLESS)
            except RuntimeError:
                await asyncio.sleep(0.2)

    drawn = asyncio.run(again())
    assert fleet.health()[0].num_restarts == 1
    assert [tuple(span) for span in drawn.versions] == [(version, 0, 40)]
    assert largest_gap(serving, PROMPTS[0], drawn) < 1e-4

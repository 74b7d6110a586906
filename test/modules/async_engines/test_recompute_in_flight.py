"""Weights replaced under a response: what is in flight is read again, or its old cache is kept."""

import asyncio
import copy
import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from async_rows import row_log_probs
from torchrl.envs.transforms import Compose

from collectors import Drop, OnPolicy, Replay, StreamingCollector, Wait
from torchrl_envs import ChatEnv, DataLoadingPrimer
from torchrl_modules import (
    EngineFleet,
    EngineLoad,
    SamplingParameters,
    TransformersEngine,
    TransformersWrapper,
    open_async,
    vLLMWrapper,
)
from torchrl_modules.engines.batching_engine import BatchingEngine
from torchrl_modules.transformers_releases import cache_name, with_cache

BUDGET = 90
SAMPLING = {"max_new_tokens": BUDGET, "stop_token_ids": ()}
PARAMS = SamplingParameters(**SAMPLING)
N = 3  # rows of a group


@torch.no_grad()
def kept_log_probs(models, versions, prompt, ids):
    """Of sampled tokens ``[T]``: each version goes on with what those before it have read."""
    tokens = torch.tensor([[*prompt, *ids]])
    cache, logits, begin = None, [], 0
    for version in sorted(set(versions)):
        # What is drawn last by a version is read by the next one.
        end = len(prompt) + max(at for at, one in enumerate(versions) if one == version)
        read = models[version](tokens[:, begin:end], **with_cache(models[version], cache))
        cache, begin = getattr(read, cache_name(models[version])), end
        logits.append(read.logits)
    given = torch.cat(logits, 1)[0, len(prompt) - 1 :].float()
    return given.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]


def read_again_log_probs(models, versions, prompt, ids):
    """Of sampled tokens ``[T]``: each version has read the whole row."""
    own = torch.tensor(versions)
    found = torch.zeros(len(ids))
    for version in set(versions):
        found[own == version] = row_log_probs(models[version], prompt, ids)[own == version]
    return found


def make_env(num_prompts=2):
    rows = [{"prompt": f"question <{i}>"} for i in range(num_prompts)]
    primer = DataLoadingPrimer(rows, group_size=N, num_epochs=1)
    return ChatEnv(batch_size=N).append_transform(Compose(primer))


@pytest.fixture(
    params=[
        "transformers",
        "fleet",
        pytest.param("vllm_engine", marks=pytest.mark.vllm),
        pytest.param("server_engine", marks=pytest.mark.vllm),
    ],
    name="served",
)
def served_fixture(request, chatml_tokenizer, model):
    """A policy, and the asynchronous engine that serves it `model`."""
    arguments = {"tokenizer": chatml_tokenizer, "generate_kwargs": SAMPLING, "write_tokens": False}
    if request.param in ("transformers", "fleet"):
        policy = TransformersWrapper(copy.deepcopy(model), **arguments)
        engine = open_async(policy.engine)
        return policy, EngineFleet([engine]) if request.param == "fleet" else engine
    policy = vLLMWrapper(request.getfixturevalue(request.param), **arguments)
    return policy, open_async(policy.engine)


@pytest.mark.parametrize("recompute", [True, False])
def test_tokens_after_a_push_are_of_the_cache_that_was_asked_for(
    served, model, other_model, recompute
):
    policy, engine = served
    pushed = [copy.deepcopy(other_model).float(), model]
    models, rows = {engine.version: model}, []
    with StreamingCollector(
        make_env(120),
        policy,
        engine=engine,
        groups_per_step=1,
        staleness=Wait(4, recompute=recompute),
    ) as collector:
        for step, batch in enumerate(collector):
            rows += batch.unbind(0)
            time.sleep(0.02 * (step % 3))
            models[collector.update_policy_weights_(pushed[step % 2])] = pushed[step % 2]
            drawn_by = [{*row["policy_versions", "full"].tolist()} for row in rows]
            if step >= 11 and sum(len(each) > 2 for each in drawn_by) > N:  # -1 is of the prompt
                break
    gaps = {"asked for": 0.0, "other": 0.0}
    for row in rows:
        versions = row["policy_versions", "full"].tolist()
        begin = versions.count(-1)
        tokens, drawn = row["tokens", "full"].tolist(), row["log_probs", "full"][begin:]
        own = (models, versions[begin:], tokens[:begin], tokens[begin:])
        both = [kept_log_probs(*own), read_again_log_probs(*own)]
        for key, expected in zip(gaps, both[:: -1 if recompute else 1], strict=True):
            gaps[key] = max(gaps[key], (drawn - expected).abs().max().item())
    assert gaps["asked for"] < 1e-4
    assert gaps["other"] > 0.1


class Unable(BatchingEngine):
    """Draws batches, between which weights are replaced."""


def test_an_engine_that_cannot_keep_caches_is_refused(chatml_tokenizer, make_tiny_model):
    policy = TransformersWrapper(
        make_tiny_model(0), tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 2}
    )
    for staleness in (Wait(4, recompute=False), Drop(4, recompute=False)):
        for engine in (Unable(policy.engine), EngineFleet([Unable(policy.engine)])):
            name = type(engine).__name__
            with (
                closing(engine),
                pytest.raises(ValueError, match=rf"recompute=False.* which {name} can't do"),
            ):
                StreamingCollector(make_env(), policy, engine=engine, staleness=staleness)
    # Replaying asks for what the run before asked for.
    again = Replay([], Wait(4, recompute=False))
    engine = Unable(policy.engine)
    with closing(engine), pytest.raises(ValueError, match="Unable can't do"):
        StreamingCollector(make_env(), policy, engine=engine, staleness=again)


def test_nothing_is_in_flight_on_policy():
    for make in (lambda: Wait(0, recompute=False), lambda: Drop(0, recompute=False)):
        with pytest.raises(ValueError, match=r"max_staleness=0 .* recompute=False can't take"):
            make()
    with pytest.raises(TypeError):
        OnPolicy(recompute=False)
    assert OnPolicy().recompute


def test_a_fleet_tells_of_the_fullest_engine_and_the_preemptions_of_all(exact_model):
    class Told(BatchingEngine):
        tells_load = can_keep_caches = True

        def __init__(self, *loads):
            super().__init__(TransformersEngine(exact_model))
            self.loads = [EngineLoad(*load) for load in loads]

        async def measure_load(self):
            return self.loads.pop(0)

    # They count from the first look: 3 and 40 were before.
    one = Told((0.2, 3), (0.1, 5), (0.3, 2), (0.0, 6))
    two = Told((0.7, 40), (0.3, 40), (0.2, 41), (0.0, 41))

    async def main():
        async with EngineFleet([one, two]) as fleet:
            assert fleet.tells_load
            assert fleet.can_keep_caches
            return [await fleet.measure_load() for _ in range(4)]

    # 5 - 3; then another engine in the place of the first, which counts from 0, and 41 - 40; 6 - 2.
    assert asyncio.run(main()) == [(0.7, 0), (0.3, 2), (0.3, 3), (0.0, 7)]
    with closing(EngineFleet([Told(), Unable(TransformersEngine(exact_model))])) as mixed:
        assert not mixed.tells_load
        assert not mixed.can_keep_caches


@pytest.mark.parametrize(
    "server_engine", [pytest.param(None, marks=pytest.mark.vllm)], indirect=True
)
def test_a_server_tells_its_blocks_and_what_it_reads_again(server_engine, model):
    block = 2 * 2 * 32 * (2 * 32) * 4  # keys and values, layers, tokens, heads x size, bytes
    num_blocks = (64 << 20) // block - 1  # vLLM keeps one
    endless = replace(PARAMS, max_new_tokens=100)

    async def paused(engine):
        """A response in its midst, and the load; one that was over too soon is drawn again."""
        for _ in range(100):
            call = asyncio.create_task(engine.respond([5] * 20, endless))
            while not call.done():
                if (load := await engine.measure_load()).cache_use > 0.0:
                    await engine.pause()
                    await asyncio.wait({call}, timeout=0.3)  # its last token may be on its way
                    if not call.done():
                        return call, load
                    await engine.resume()
        pytest.fail("no response was met in its midst")

    async def main():
        async with open_async(server_engine) as engine:
            assert engine.tells_load
            before = await engine.measure_load()
            call, one = await paused(engine)
            await engine.update_weights(model.state_dict(), recompute=False)
            await engine.resume()
            kept = await call
            between = await engine.measure_load()
            call, _ = await paused(engine)
            await engine.update_weights(model.state_dict())
            await engine.resume()
            spans = [len(one.versions) for one in (kept, await call)]
            return before, one, between, await engine.measure_load(), spans

    before, one, between, after, spans = asyncio.run(main())
    assert spans == [2, 2]
    assert before.cache_use == between.cache_use == after.cache_use == 0.0
    # Of 20 tokens and at most 100 more: from one block of 32 to four.
    assert any(one.cache_use * num_blocks == pytest.approx(n, rel=1e-3) for n in (1, 2, 3, 4))
    assert between.num_preemptions == before.num_preemptions
    assert after.num_preemptions == before.num_preemptions + 1

"""Real vLLM, whose cache is much too small, under a streaming collector: its load, and pushes."""

import asyncio
import copy
import time
import warnings

import pytest
import torch
from async_rows import row_log_probs
from torchrl.envs.transforms import Compose

from collectors import LoadCap, StreamingCollector, Wait
from torchrl_envs import ChatEnv, DataLoadingPrimer
from torchrl_modules import EngineLoad, SamplingParameters, open_async, vLLMWrapper
from torchrl_modules.engines.engine_load import read_load
from torchrl_modules.tiny_model import tiny_qwen3

pytestmark = pytest.mark.vllm
N = 4
BLOCKS = 25  # of 32 tokens, one of which vLLM keeps: 24, so six rows of 128 tokens
FOLLOWS = LoadCap(interval_s=0.02)


@pytest.fixture(scope="module", name="small")
def small_fixture(chatml_tokenizer, tmp_path_factory):
    """An engine with room for six long rows."""
    from torchrl_modules.vllm.engine import VLLMEngine

    folder = tmp_path_factory.mktemp("small")
    tiny_qwen3(len(chatml_tokenizer), head_dim=32).save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own
        engine = VLLMEngine(
            str(folder), max_model_len=128, block_size=32, num_gpu_blocks_override=BLOCKS
        )
    yield engine
    engine.close()


def test_the_engine_tells_its_blocks_and_what_it_put_off(small):
    params = SamplingParameters(max_new_tokens=100, stop_token_ids=())

    async def main():
        async with open_async(small) as engine:
            assert engine.tells_load
            empty = await engine.measure_load()
            call = asyncio.create_task(engine.respond([5] * 20, params))
            while (one := await engine.measure_load()).cache_use == 0.0:
                pass
            await engine.pause()
            weights = tiny_qwen3(small.vocab_size, head_dim=32).state_dict()
            await engine.update_weights(weights)
            after = await engine.measure_load()
            await engine.resume()
            await call
            rows = [engine.respond([5 + i] * 20, params) for i in range(12)]
            await asyncio.gather(*rows)
            return empty, one, after, await engine.measure_load()

    empty, one, after, crowded = asyncio.run(main())
    assert empty == EngineLoad(0.0, 0)
    assert (BLOCKS - 1) * one.cache_use == pytest.approx(1)  # of 20 tokens and the next
    assert one.num_preemptions == after.num_preemptions == 0  # read again, but not put off
    # 12 rows begin with a block each, and 24 blocks hold 6 whole ones.
    assert crowded.cache_use == 0.0
    assert crowded.num_preemptions >= 1


def collect(small, tokenizer, max_inflight_tasks):
    """What 12 groups of rows that fill their budget cost the engine: preemptions, and the end."""
    policy = vLLMWrapper(
        small,
        tokenizer=tokenizer,
        generate_kwargs={"max_new_tokens": 90, "stop_token_ids": ()},
        write_tokens=False,
    )
    rows = [{"prompt": f"question <{i}>"} for i in range(12)]
    primer = DataLoadingPrimer(rows, group_size=N, num_epochs=1)
    engine = open_async(small)
    with StreamingCollector(
        ChatEnv(batch_size=N).append_transform(Compose(primer)),
        policy,
        engine=engine,
        groups_per_step=1,
        staleness=Wait(8, 7, window=1.0),
        max_inflight_tasks=max_inflight_tasks,
    ) as collector:
        batches = list(collector)
        load = asyncio.run(engine.measure_load())
    numbers = [int(row["group_id"]) for batch in batches for row in batch.unbind(0)]
    assert sorted(numbers) == sorted(list(range(12)) * N)
    balance = collector.ledger.balance
    assert balance.trained.groups == 12
    return load.num_preemptions, balance


def test_fewer_rows_are_put_off_where_the_load_is_followed(small, chatml_tokenizer):
    fixed, balance = collect(small, chatml_tokenizer, 32)
    assert not balance.dropped
    followed, balance = collect(small, chatml_tokenizer, FOLLOWS)
    assert set(balance.dropped) <= {"load"}
    assert fixed > 10
    assert followed < 0.5 * fixed


@pytest.fixture
def drawn(monkeypatch):
    """The versions of which an engine has drawn a token, as it draws them."""
    from torchrl_modules.vllm import async_engine

    versions, make = set(), async_engine.Delta

    def note(ids, log_probs, version, *more):
        versions.add(version)
        return make(ids, log_probs, version, *more)

    monkeypatch.setattr(async_engine, "Delta", note)
    return versions


def test_the_gap_to_the_trainer_is_flat_over_twenty_pushes(small, chatml_tokenizer, drawn):
    """Each token's log-prob is that of its version, of the whole row: no cache of older weights."""
    policy = vLLMWrapper(
        small,
        tokenizer=chatml_tokenizer,
        generate_kwargs={"max_new_tokens": 40, "stop_token_ids": ()},
        write_tokens=False,
    )
    shared = "the same words before every question, so that a cache of them could be met "
    rows = [{"prompt": f"{shared}<{i}>"} for i in range(42)]
    primer = DataLoadingPrimer(rows, group_size=N, num_epochs=1)
    env = ChatEnv(batch_size=2 * N).append_transform(Compose(primer))
    torch.manual_seed(0)
    model, models, gaps = tiny_qwen3(len(chatml_tokenizer), head_dim=32), {}, {}
    with StreamingCollector(env, policy, staleness=Wait(2)) as collector:
        collector.update_policy_weights_(model, wait=True)
        models[collector.policy_version] = model
        for batch in collector:
            note_gaps(gaps, models, batch)
            # Two pushes may come between two tokens; of the last ones there may be none.
            late = time.monotonic() + 2
            while collector.policy_version not in drawn and time.monotonic() < late:
                time.sleep(0.002)
            if len(models) <= 20:
                model = copy.deepcopy(model)
                for value in model.parameters():
                    value.data += 0.02 * torch.randn_like(value)
                collector.update_policy_weights_(model, wait=True)
                models[collector.policy_version] = model
    seen = sorted(gaps)
    assert seen == sorted(models)[: len(seen)]
    assert len(seen) >= 20  # the last push may come when all is drawn
    assert max(gaps.values()) < 1e-4


def note_gaps(gaps, models, batch):
    """The largest difference to the log-probs of the model of each version."""
    for row in batch.unbind(0):
        versions, sampled = row["policy_versions", "full"], row["log_probs", "full"]
        for version in set(versions.tolist()) - {-1}:
            ids = row["tokens", "full"].tolist()
            expected = row_log_probs(models[version], ids[:1], ids[1:])
            own = (versions == version)[1:]
            gap = (expected - sampled[1:])[own].abs().max().item()
            gaps[version] = max(gaps.get(version, 0.0), gap)


def test_metrics_of_a_server_are_read():
    text = """
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:num_preemptions_total{engine="1",model_name="m"} 4.0
"""
    assert read_load(text) == EngineLoad(0.75, 7)
    assert read_load(text.replace("vllm:num_", "vllm:old_")) is None

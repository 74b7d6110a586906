"""Real vLLM behind `AsyncEngine`, in this process and as a server: prefixes, versions, aborts."""

import asyncio
import warnings
from dataclasses import replace

import pytest
import torch
from async_rows import LONG, row_log_probs

from torchrl_modules import AsyncEngine, SamplingParameters, open_async

pytestmark = pytest.mark.vllm
PREFIX = [5, 6, 7, 8, 9, 10, 11, 12] * 8  # two blocks of the cache
PARAMS = SamplingParameters(max_new_tokens=12, stop_token_ids=())
UPDATES = 6


@pytest.fixture(
    name="run", params=["in this process", pytest.param("server", marks=pytest.mark.slow)]
)
def run_fixture(request):
    """Run a coroutine function on an asynchronous face of the session's engine."""
    fixture = "vllm_engine" if request.param == "in this process" else "server_engine"
    inside = request.getfixturevalue(fixture)

    def run_on_engine(function):
        async def main():
            async with open_async(inside) as engine:
                assert isinstance(engine, AsyncEngine)
                return await asyncio.wait_for(function(engine), timeout=120)

        return asyncio.run(main())

    return run_on_engine


def gap(model, prompt, drawn):
    """The largest difference to the model's own log-probs, in nats."""
    expected = row_log_probs(model, prompt, drawn.ids)
    return (expected - torch.tensor(drawn.log_probs)).abs().max().item()


def test_a_prefix_of_other_weights_is_never_met(run, model, other_model):
    """Rows that share a prefix, over updates: the gap stays that of the kernels."""

    async def main(engine):
        rows = []
        for update in range(UPDATES):
            prompts = [[*PREFIX, 20 + update, 30 + row] for row in range(4)]
            drawn = await asyncio.gather(
                *(engine.respond(prompt, PARAMS, session=row) for row, prompt in enumerate(prompts))
            )
            rows.append((engine.version, list(zip(prompts, drawn, strict=True))))
            weights = (other_model, model)[update % 2].state_dict()
            await engine.update_weights(weights)
        return rows

    for update, (version, rows) in enumerate(run(main)):
        served, other = (model, other_model) if update % 2 == 0 else (other_model, model)
        for prompt, drawn in rows:
            assert drawn.versions == [(version, 0, 12)]
            assert gap(served, prompt, drawn) < 1e-4
            assert gap(other, prompt, drawn) > 0.1


@pytest.mark.slow
def test_two_engines_of_one_process_draw_at_the_same_time(
    vllm_engine, model, other_model, tmp_path
):
    from torchrl_modules import VLLMEngine

    other_model.save_pretrained(tmp_path)
    sizes = {"max_model_len": 128, "kv_cache_memory_bytes": 64 << 20, "dtype": "float32"}

    async def main(inside):
        async with open_async(inside[0]) as first, open_async(inside[1]) as second:
            asked = [
                engine.respond([20 + row, 30, 40], replace(PARAMS, max_new_tokens=100))
                for row in range(16)
                for engine in (first, second)
            ]
            return await asyncio.wait_for(asyncio.gather(*asked), timeout=120)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own, while it is built
        built = VLLMEngine(str(tmp_path), **sizes)
    with built as beside:
        drawn = asyncio.run(main([vllm_engine, beside]))
    for number, one in enumerate(drawn):
        own, other = (model, other_model) if number % 2 == 0 else (other_model, model)
        prompt = [20 + number // 2, 30, 40]
        assert len(one.ids) == 100
        assert gap(own, prompt, one) < 1e-4
        assert gap(other, prompt, one) > 0.1


def test_a_response_in_flight_says_which_tokens_new_weights_drew(run, model, other_model):
    long = replace(LONG, max_new_tokens=60)

    async def main(engine):
        before = engine.version
        calls = [asyncio.create_task(engine.respond(PREFIX, long)) for _ in range(4)]
        await asyncio.sleep(0.05)
        await engine.update_weights(other_model.state_dict())
        return before, await asyncio.gather(*calls), await engine.respond([9, 10], PARAMS)

    before, drawn, after = run(main)
    assert after.versions == [(before + 1, 0, 12)]
    assert gap(other_model, [9, 10], after) < 1e-4
    models = {before: model, before + 1: other_model}
    for one in drawn:
        *first, last = one.versions  # on a busy machine a response may be over before the update
        assert first == [] or ([first[0].version], last.version) == ([before], before + 1)
        start = last.start
        expected = row_log_probs(models[last.version], PREFIX, one.ids)[start:]
        assert (expected - torch.tensor(one.log_probs)[start:]).abs().max() < 1e-4


def test_cancelling_leaves_nothing_behind(run):
    async def main(engine):
        endless = replace(LONG, max_new_tokens=60)
        for _ in range(5):  # a busy machine may be done before they are cancelled
            calls = [asyncio.create_task(engine.respond([5 + i], endless)) for i in range(4)]
            await asyncio.sleep(0.05)
            running = [call for call in calls[1:] if call.cancel()]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            kinds = [type(one) for one in outcomes[1:]]
            if len(running) == 3 and kinds == [asyncio.CancelledError] * 3:
                break
        assert kinds == [asyncio.CancelledError] * 3
        await engine.pause()
        waits = asyncio.create_task(engine.respond([7], PARAMS))
        done, _ = await asyncio.wait({waits}, timeout=0.3)
        await engine.resume()
        return outcomes[0], done, await waits

    first, done, waited = run(main)
    assert (len(first.ids), len(waited.ids)) == (60, 12)
    assert not done

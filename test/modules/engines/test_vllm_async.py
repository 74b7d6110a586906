"""The real vLLM engine behind asyncio: streams, aborts and updates while requests are in flight."""

import asyncio
import time

import pytest
import torch

from torchrl_modules.engines.engine import EngineDied
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.vllm.async_engine import AsyncVLLMEngine
from torchrl_modules.vllm.generation_stream import Delta, version_spans

PROMPTS = [[5, 6, 7, 8] * 10, [9, 10], [11] * 40, [12, 13, 14]]
ENDLESS = SamplingParameters(max_new_tokens=80, stop_token_ids=())

pytestmark = pytest.mark.vllm


@torch.no_grad()
def log_probs_under(model, prompt, ids):
    """Teacher-forced log-probs ``[T]`` of sampled tokens, at temperature 1."""
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]


def largest_gap(model, prompt, generation, start=0, end=None):
    expected = log_probs_under(model, prompt, generation.ids)
    return (expected - torch.tensor(generation.log_probs))[start:end].abs().max().item()


@pytest.fixture
def run(vllm_engine):
    """Run a coroutine function on an asynchronous face of the session's engine."""

    def run_coroutine(function, **kwargs):
        async def with_engine():
            async with AsyncVLLMEngine(vllm_engine, **kwargs) as engine:
                return await asyncio.wait_for(function(engine), timeout=60)

        return asyncio.run(with_engine())

    return run_coroutine


def test_responses_drawn_at_once_are_each_from_their_own_prompt(run, model):
    async def main(engine):
        return await asyncio.gather(*(engine.generate(prompt, ENDLESS) for prompt in PROMPTS * 4))

    for prompt, (generation, versions) in zip(PROMPTS * 4, run(main), strict=True):
        assert generation.finish_reason == "length"
        assert [(span.start, span.end) for span in versions] == [(0, 80)]
        assert largest_gap(model, prompt, generation) < 5e-5


def test_tokens_stream_as_they_are_drawn(run):
    async def main(engine):
        async with engine.submit(PROMPTS[1], ENDLESS, max_new_tokens=20) as stream:
            deltas = [delta async for delta in stream]
            return deltas, (await stream.result()).generation

    deltas, generation = run(main)
    assert len(deltas) > 10
    assert [token for delta in deltas for token in delta.ids] == generation.ids
    assert [value for delta in deltas for value in delta.log_probs] == generation.log_probs
    assert len(generation.ids) == len(generation.log_probs) == 20


def test_a_short_response_does_not_wait_for_a_long_one(run):
    async def main(engine):
        long = asyncio.create_task(engine.generate(PROMPTS[0], ENDLESS))
        await engine.generate(PROMPTS[1], ENDLESS, max_new_tokens=2)
        finished_first = not long.done()
        await long
        return finished_first

    assert run(main)


def test_a_bad_prompt_alone_is_marked(run):
    async def main(engine):
        return await asyncio.gather(
            engine.generate([], ENDLESS),
            engine.generate([337], ENDLESS),
            engine.generate(PROMPTS[1], ENDLESS, max_new_tokens=0),
            engine.generate(PROMPTS[1], ENDLESS, max_new_tokens=1),
        )

    reasons = [result.generation.finish_reason for result in run(main)]
    assert reasons == ["error", "error", "error", "length"]


def test_an_abort_keeps_the_tokens_so_far(run, vllm_engine, model):
    async def main(engine):
        other = asyncio.create_task(engine.generate(PROMPTS[0], ENDLESS))
        async with engine.submit(PROMPTS[1], ENDLESS) as stream:
            await anext(stream)
            stream.abort()
            aborted = await stream.result()
        return aborted.generation, (await other).generation

    aborted, other = run(main)
    assert aborted.finish_reason == "abort"
    assert 1 <= len(aborted.ids) < 80
    assert largest_gap(model, PROMPTS[1], aborted) < 5e-5
    assert other.finish_reason == "length"
    assert not vllm_engine._llm.llm_engine.has_unfinished_requests()


def test_cancelling_a_caller_aborts_its_request(run, vllm_engine):
    async def main(engine):
        task = asyncio.create_task(engine.generate(PROMPTS[0], ENDLESS))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.pause()  # after the abort, in order
        return vllm_engine._llm.llm_engine.has_unfinished_requests()

    assert not run(main)


def test_a_paused_engine_draws_nothing_and_goes_on_after(run):
    async def main(engine):
        async with engine.submit(PROMPTS[0], ENDLESS) as stream:
            await anext(stream)
            await engine.pause()
            waiting = asyncio.create_task(stream.result())
            await asyncio.sleep(0.1)
            before = len(stream._deltas)
            await asyncio.sleep(2.5)
            paused = len(stream._deltas) == before and not waiting.done()
            await engine.resume()
            return paused, (await waiting).generation

    paused, generation = run(main, stall_timeout_s=1.0)  # a pause is no stall
    assert paused
    assert len(generation.ids) == 80


async def update_in_flight(engine, prompt, state_dict, **kwargs):
    async with engine.submit(prompt, ENDLESS) as stream:
        for _ in range(10):
            await anext(stream)
        await engine.update_weights(state_dict, **kwargs)
        return await stream.result()


def test_an_update_in_flight_changes_the_further_tokens(run, model, other_model):
    async def main(engine):
        in_flight = [update_in_flight(engine, PROMPTS[0], other_model.state_dict(), version=10**6)]
        in_flight += [engine.generate(prompt, ENDLESS) for prompt in PROMPTS]
        results = await asyncio.gather(*in_flight)
        return results, await engine.generate(PROMPTS[0], ENDLESS), engine.version

    results, fresh, version = run(main)
    assert version == 10**6
    for prompt, (generation, versions) in zip([PROMPTS[0], *PROMPTS], results, strict=True):
        old, new = versions
        assert old.version < new.version == version
        assert (old.start, old.end, new.end) == (0, new.start, 80)
        # Exact at the token: each part under the weights that its span names.
        assert largest_gap(model, prompt, generation, end=old.end) < 5e-5
        assert largest_gap(other_model, prompt, generation, start=new.start) < 5e-5
    assert [span.version for span in fresh.versions] == [version]
    assert largest_gap(other_model, PROMPTS[0], fresh.generation) < 5e-5


def test_an_update_may_keep_the_old_cache_of_what_is_in_flight_only(run, model, other_model):
    async def main(engine):
        weights = other_model.state_dict()
        kept = await update_in_flight(engine, PROMPTS[0], weights, recompute=False)
        return kept, await engine.generate(PROMPTS[0], ENDLESS)

    (generation, (old, new)), fresh = run(main)
    assert largest_gap(model, PROMPTS[0], generation, end=old.end) < 5e-5
    assert largest_gap(other_model, PROMPTS[0], generation, start=new.start) > 0.1
    assert largest_gap(other_model, PROMPTS[0], fresh.generation) < 5e-5


class SlowWeights(dict):
    """A state dict that takes its time."""

    def __iter__(self):
        time.sleep(1.0)
        return super().__iter__()


def test_an_update_that_takes_its_time_is_no_stall(run, other_model):
    async def main(engine):
        weights = SlowWeights(other_model.state_dict())
        return await update_in_flight(engine, PROMPTS[0], weights)

    generation, versions = run(main, stall_timeout_s=0.3)
    assert len(generation.ids) == 80
    assert len(versions) == 2

    async def too_slow(engine):
        weights = SlowWeights(other_model.state_dict())
        with pytest.raises(EngineDied, match="raise update_timeout_s"):
            await update_in_flight(engine, PROMPTS[0], weights)

    run(too_slow, stall_timeout_s=0.1, update_timeout_s=0.3)


def test_a_wrong_update_is_refused_and_nothing_is_disturbed(run, vllm_engine, model):
    wrong = {**model.state_dict(), "model.norm.weight": torch.ones(3)}

    async def main(engine):
        with pytest.raises(ValueError, match=r"shape \(3,\)"):
            await update_in_flight(engine, PROMPTS[0], wrong)
        return await engine.generate(PROMPTS[0], ENDLESS), engine.version

    version = vllm_engine.version
    result, version_after = run(main)
    assert version_after == version
    assert largest_gap(model, PROMPTS[0], result.generation) < 5e-5


def test_closing_aborts_what_is_in_flight_and_gives_the_engine_back(vllm_engine, model):
    async def main():
        async with AsyncVLLMEngine(vllm_engine) as engine:
            with pytest.raises(RuntimeError, match="in use by AsyncVLLMEngine"):
                vllm_engine.generate(PROMPTS, ENDLESS)
            stream = engine.submit(PROMPTS[0], ENDLESS)
            await anext(stream)
        engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            engine.submit(PROMPTS[0], ENDLESS)
        with pytest.raises(RuntimeError, match="closed"):
            await engine.pause()
        return await stream.result()

    assert asyncio.run(main()).generation.finish_reason == "abort"
    (row,) = vllm_engine.generate(PROMPTS[:1], ENDLESS)
    assert largest_gap(model, PROMPTS[0], row) < 5e-5


def test_an_update_that_fails_in_the_middle_ends_it_and_the_engine_can_be_repaired(
    vllm_engine, model, other_model, monkeypatch
):
    def fails(*args, **kwargs):
        raise MemoryError("no room")

    async def main():
        async with AsyncVLLMEngine(vllm_engine) as engine:
            stream = engine.submit(PROMPTS[0], ENDLESS)
            await anext(stream)
            with pytest.raises(MemoryError):
                await engine.update_weights(other_model.state_dict())
            with pytest.raises(RuntimeError, match="no room"):
                await stream.result()
            with pytest.raises(RuntimeError, match="no room"):
                engine.submit(PROMPTS[0], ENDLESS)

    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine._llm, "collective_rpc", fails)
        asyncio.run(main())
    vllm_engine.update_weights(model.state_dict())
    (row,) = vllm_engine.generate(PROMPTS[:1], ENDLESS)
    assert largest_gap(model, PROMPTS[0], row) < 5e-5


def test_a_stuck_engine_is_noticed(run, vllm_engine, monkeypatch):
    llm_engine = vllm_engine._llm.llm_engine

    def stuck():
        time.sleep(1.0)
        return type(llm_engine).step(llm_engine)

    async def main(engine):
        with pytest.raises(RuntimeError, match="made no step"):
            await engine.generate(PROMPTS[0], ENDLESS)

    with monkeypatch.context() as patch:
        patch.setattr(llm_engine, "step", stuck)
        run(main, stall_timeout_s=0.2)


def test_a_dead_engine_fails_every_caller(run, vllm_engine, monkeypatch):
    def dies():
        raise RuntimeError("out of memory")

    async def main(engine):
        results = await asyncio.gather(
            *(engine.generate(prompt, ENDLESS) for prompt in PROMPTS), return_exceptions=True
        )
        with pytest.raises(RuntimeError, match="out of memory"):
            await engine.pause()
        return results

    llm_engine = vllm_engine._llm.llm_engine
    with monkeypatch.context() as patch:
        patch.setattr(llm_engine, "step", dies)
        results = run(main)
    assert len(results) == len(PROMPTS)
    assert all("out of memory" in str(result) for result in results)
    with pytest.raises(RuntimeError, match="out of memory"):
        vllm_engine.generate(PROMPTS, ENDLESS)
    # Nothing was really wrong: give the session its engine back.
    llm_engine.abort_request(list(llm_engine.output_processor.external_req_ids))
    vllm_engine.fail("")


def test_neighbouring_deltas_of_one_version_are_one_span():
    deltas = [Delta([1, 2], [0.0, 0.0], 3), Delta([4], [0.0], 3), Delta([5], [0.0], 4)]
    assert version_spans(deltas) == [(3, 0, 3), (4, 3, 4)]
    assert version_spans([]) == []

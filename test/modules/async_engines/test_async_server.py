"""A server behind asyncio: versions, cancelling, pausing, dying; the server is a fake one."""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchrl_modules import AsyncEngine, EngineDied, SamplingParameters, open_async
from torchrl_modules.vllm.server_engine import VLLMServerEngine

FAKE = Path(__file__).parents[1] / "engines/fake_engine.py"
PARAMS = SamplingParameters(max_new_tokens=10, stop_token_ids=())
WEIGHTS = {"a": torch.ones(4, 3), "b": torch.zeros(3)}


@pytest.fixture(name="run")
def run_fixture(tmp_path):
    """Run a coroutine function on an engine over a server with the given faults."""

    def run_on_server(function, faults=None, **settings):
        path = tmp_path / "socket"
        command = [sys.executable, "-S", str(FAKE), str(path), json.dumps(faults or {})]

        async def main():
            client = VLLMServerEngine(f"unix://{path}", wait_s=20, **settings)
            try:
                async with open_async(client) as engine:
                    assert isinstance(engine, AsyncEngine)
                    return await asyncio.wait_for(function(engine), timeout=60)
            finally:
                client.close()

        with subprocess.Popen(command) as process:
            try:
                return asyncio.run(main())
            finally:
                process.kill()

    return run_on_server


def test_responses_say_which_version_drew_them(run):
    async def main(engine):
        call = asyncio.create_task(engine.respond([1, 2], replace(PARAMS, max_new_tokens=60)))
        await asyncio.sleep(0.2)
        await engine.update_weights(WEIGHTS, version=4)
        return await call, await engine.respond([3], PARAMS), await engine.respond([], PARAMS)

    during, after, bad = run(main, {"token_s": 0.02})
    assert [span.version for span in during.versions] == [0, 4]
    assert during.versions[1].start == during.versions[0].end > 0
    assert after.versions == [(4, 0, 10)]
    assert bad.finish_reason == "error"


def test_rows_end_before_new_weights_come_where_a_server_does_not_tell_its_versions(run, caplog):
    """So each has one version, that of all its tokens; those that come meanwhile wait."""

    async def main(engine):
        answers = []
        ask = engine._inside._rows.ask

        async def asking(*request):
            answers.append(await ask(*request))
            return answers[-1]

        engine._inside._rows.ask = asking
        calls = []
        for number in range(12):
            length = replace(PARAMS, max_new_tokens=5 + number)
            calls.append(asyncio.create_task(engine.respond([number], length)))
            await asyncio.sleep(0.02)
            if number in (4, 8):
                calls.append(asyncio.create_task(engine.update_weights(WEIGHTS, version=number)))
        drawn = [one for one in await asyncio.gather(*calls) if one is not None]
        with pytest.raises(ValueError, match="names or shapes"):
            await engine.update_weights({"a": torch.ones(4, 3)})
        return drawn, answers, await engine.respond([3], PARAMS)

    drawn, answers, after = run(main, {"silent": True, "token_s": 0.01})
    answers = [answer for answer in answers if "choices" in answer[1]]
    told = {tuple(answer["choices"][0]["token_ids"]): answer["choices"][0] for _, answer in answers}
    assert len(drawn) == len(told) - 1 == 12
    for one in drawn:
        ((label, *_),) = (list(span.values()) for span in told[tuple(one.ids)]["spans"])
        version = 0 if label == "default" else int(label)
        assert one.versions == [(version, 0, len(one.ids))]
    found = {one.versions[0].version for one in drawn}
    assert {0, 4} <= found <= {0, 4, 8}  # a busy machine may be late with the last update
    assert after.versions == [(8, 0, 10)]
    assert "does not say which weights drew a token" in caplog.text


def test_another_client_of_such_a_server_is_noticed(run):
    async def main(engine):
        other = VLLMServerEngine(engine._inside._client.url)
        call = asyncio.create_task(engine.respond([1], replace(PARAMS, max_new_tokens=40)))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(other.update_weights, WEIGHTS)
        other.close()
        with pytest.raises(RuntimeError, match=r"by the weights \['1'\], not by \['default'\]"):
            await call
        await engine.update_weights(WEIGHTS, version=2)
        return await engine.respond([1], PARAMS)

    assert run(main, {"silent": True, "token_s": 0.01}).versions == [(2, 0, 10)]


def test_a_pause_lasts_over_an_update_of_such_a_server_too(run):
    async def main(engine):
        first = asyncio.create_task(engine.respond([1], PARAMS))
        await asyncio.sleep(0.05)
        await engine.pause()
        call = asyncio.create_task(engine.respond([1], PARAMS))
        await engine.update_weights(WEIGHTS)
        done, _ = await asyncio.wait({call}, timeout=1)
        assert not done
        await engine.resume()
        return await first, await call

    before, after = run(main, {"silent": True, "token_s": 0.01})
    assert (before.versions, after.versions) == ([(0, 0, 10)], [(1, 0, 10)])


def test_rows_that_wait_for_an_update_end_with_its_server(run):
    async def main(engine):
        long = replace(PARAMS, max_new_tokens=30)
        calls = [asyncio.create_task(engine.respond([1], long))]
        await asyncio.sleep(0.1)
        calls.append(asyncio.create_task(engine.update_weights(WEIGHTS)))
        await asyncio.sleep(0.1)
        calls.append(asyncio.create_task(engine.respond([2], long)))
        return await asyncio.gather(*calls, return_exceptions=True)

    faults = {"silent": True, "token_s": 0.01, "die_in_update": True}
    before, update, waits = run(main, faults, stall_timeout_s=2.0)
    assert before.versions == [(0, 0, 30)]
    assert isinstance(update, EngineDied)
    assert isinstance(waits, (EngineDied, RuntimeError))


def test_many_callers_have_the_responses_that_a_batch_has(run):
    prompts = [[1, 2], [3], [4, 5, 6], [8]] * 8

    async def main(engine):
        calls = (engine.respond(prompt, replace(PARAMS, seed=5)) for prompt in prompts)
        expected = engine._inside.generate(prompts, PARAMS, seeds=PARAMS_SEEDS * len(prompts))
        return await asyncio.gather(*calls), expected

    drawn, expected = run(main)
    assert [one.ids for one in drawn] == [one.ids for one in expected]


PARAMS_SEEDS = replace(PARAMS, seed=5).row_seeds(1)


def test_cancelling_ends_one_request_alone(run):
    async def main(engine):
        calls = [
            asyncio.create_task(engine.respond([number], replace(PARAMS, max_new_tokens=50)))
            for number in (1, 2, 3)
        ]
        await asyncio.sleep(0.2)
        calls[1].cancel()
        since = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await calls[1]
        while engine._inside._watch._num_waiting > 2:  # until its thread does not wait any more
            await asyncio.sleep(0.01)
        waited = time.monotonic() - since
        left = [await calls[0], await calls[2]]
        return waited, [len(one.ids) for one in left], await engine.respond([9], PARAMS)

    waited, lengths, after = run(main, {"token_s": 0.02})
    assert waited < 0.5
    assert lengths == [50, 50]
    assert after.finish_reason == "length"


def test_a_pause_lasts_over_an_update_and_is_no_stall(run):
    async def main(engine):
        await engine.pause()
        call = asyncio.create_task(engine.respond([1], PARAMS))
        await asyncio.sleep(0.2)
        await engine.update_weights(WEIGHTS)
        done, _ = await asyncio.wait({call}, timeout=2.5)
        assert not done
        await engine.resume()
        return await call

    drawn = run(main, stall_timeout_s=1.0)
    assert drawn.versions == [(1, 0, 10)]


def test_an_update_needs_no_connection_of_the_rows_that_wait_for_it(run):
    async def main(engine):
        long = replace(PARAMS, max_new_tokens=30)
        calls = [asyncio.create_task(engine.respond([number], long)) for number in range(6)]
        await asyncio.sleep(0.2)  # two are drawn, and hold both connections
        await engine.update_weights(WEIGHTS, version=1)
        return await asyncio.gather(*calls)

    drawn = run(main, {"token_s": 0.02}, num_connections=2, timeout_s=10)
    assert [len(one.ids) for one in drawn] == [30] * 6
    assert sorted(len(one.versions) for one in drawn) == [1, 1, 1, 1, 2, 2]


def test_a_server_that_dies_ends_all_calls(run):
    async def main(engine):
        calls = [engine.respond([number], PARAMS) for number in range(6)]
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = run(main, {"die_after": 5, "token_s": 0.01}, stall_timeout_s=2.0)
    assert all(isinstance(one, EngineDied) for one in outcomes)


def test_what_is_closed_takes_no_more(run):
    async def main(engine):
        call = asyncio.create_task(engine.respond([1], replace(PARAMS, max_new_tokens=50)))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(engine.close)
        engine.close()
        with pytest.raises(EngineDied):
            await call
        with pytest.raises(RuntimeError, match="AsyncServerEngine is closed"):
            await engine.respond([1], PARAMS)

    run(main, {"token_s": 0.05})

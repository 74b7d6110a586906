"""A fleet of engines: who draws what, and what becomes of all when one of them dies."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_modules import (
    AsyncEngine,
    EngineDied,
    EngineFleet,
    Generation,
    SamplingParameters,
    TransformersEngine,
    open_async,
    vLLMWrapper,
)
from torchrl_modules.engines.checked_generation import checked
from torchrl_modules.engines.engine import VersionSpan
from torchrl_modules.engines.session_router import SessionRouter
from torchrl_modules.engines.supervision import EngineState
from torchrl_modules.vllm.bridges import OwnServerEngine
from torchrl_modules.weights.expected_weights import UpdateRefused

pytestmark = pytest.mark.usefixtures("no_leaks")
FAKE = Path(__file__).parents[1] / "engines/fake_engine.py"
PARAMS = SamplingParameters(max_new_tokens=10, stop_token_ids=())
LONG = replace(PARAMS, max_new_tokens=200)
WEIGHTS = {"a": torch.ones(4, 3), "b": torch.zeros(3)}
WRONG = {"a": torch.ones(4, 4), "b": torch.zeros(3)}


class Server:
    """Starts fake servers one after the other, with one set of faults each."""

    def __init__(self, folder, *faults):
        self.folder = folder
        self.faults = list(faults)
        self.processes = []

    @contextmanager
    def __call__(self):
        path = self.folder / f"socket{len(self.processes)}"
        faults = self.faults.pop(0) if len(self.faults) > 1 else self.faults[0]
        command = [sys.executable, "-S", str(FAKE), str(path), json.dumps(faults)]
        with subprocess.Popen(command) as process:
            self.processes.append(process)
            try:
                yield f"unix://{path}"
            finally:
                process.kill()

    def kill(self):
        os.kill(self.processes[-1].pid, signal.SIGKILL)


@pytest.fixture
def servers(tmp_path):
    """Makes functions that start fake servers."""

    def make(*faults):
        made = []
        for number, each in enumerate(faults):
            folder = tmp_path / str(number)
            folder.mkdir()
            made.append(Server(folder, *(each if isinstance(each, tuple) else (each,))))
        return made

    return make


def run(main, engines, **options):
    async def with_fleet():
        options.setdefault("probe_interval_s", 0.1)
        async with EngineFleet(engines, **options) as fleet:
            assert isinstance(fleet, AsyncEngine)
            return await asyncio.wait_for(main(fleet), timeout=60)

    return asyncio.run(with_fleet())


def opened(servers, **settings):
    settings = {"wait_s": 20, "stall_timeout_s": 2.0} | settings
    return [partial(OwnServerEngine, each, **settings) for each in servers]


async def until(fleet, *states, num_restarts=0):
    """Until the engines are in these states, and so many were replaced."""
    while [each.state for each in fleet.health()] != list(states) or num_restarts > sum(
        each.num_restarts for each in fleet.health()
    ):
        await asyncio.sleep(0.01)


HEALTHY, SUSPECT, STALE, DEAD = (
    EngineState.HEALTHY,
    EngineState.SUSPECT,
    EngineState.STALE,
    EngineState.DEAD,
)


class TestRouting:
    @given(
        st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 3), min_size=1)), max_size=30)
    )
    def test_a_session_stays_while_its_engine_serves(self, calls):
        router, homes = SessionRouter(), {}
        for session, serving in calls:
            engine = router.choose(session, dict.fromkeys(serving, 0))
            assert engine == homes.get(session) or homes.get(session) not in serving
            homes[session] = engine

    def test_a_new_one_goes_where_the_fewest_tokens_are_outstanding(self):
        router = SessionRouter(max_sessions=2)
        assert router.choose("a", {0: 7, 1: 3, 2: 3}) == 1
        assert router.choose("a", {0: 0, 1: 9}) == 1
        assert router.choose("a", {0: 0, 2: 9}) == 0
        assert router.choose(None, {0: 5, 2: 4}) == 2
        for session in "bc":
            router.choose(session, {0: 0})
        assert router.choose("a", {1: 0}) == 1  # forgotten, as the oldest
        assert router.end("a") == 1
        assert router.end("a") is None


class TestInProcess:
    def test_two_models_draw_what_one_draws_and_share_the_load(self, exact_model, other_model):
        engine = TransformersEngine(exact_model)
        prompts = [[5 + n, 6, 7] for n in range(8)]
        seeded = [replace(PARAMS, seed=n) for n in range(8)]

        async def draw(served):
            calls = (
                served.respond(prompt, params, session=n)
                for n, (prompt, params) in enumerate(zip(prompts, seeded, strict=True))
            )
            return [one.ids for one in await asyncio.gather(*calls)]

        async def main(fleet):
            first = await draw(fleet)
            await fleet.update_weights(other_model.state_dict(), version=3)
            homes = Counter(fleet._router._engines.values())
            for number in range(8):
                fleet.end_session(number)
            return first, await draw(fleet), fleet.version, homes, fleet.health()

        async def alone():
            async with open_async(engine) as one:
                first = await draw(one)
                await one.update_weights(other_model.state_dict())
                return first, await draw(one)

        one = asyncio.run(alone())
        first, second, version, homes, health = run(main, [partial(open_async, engine)] * 2)
        assert (first, second) == one
        assert version == 3
        assert homes == {0: 4, 1: 4}
        assert [(each.state, each.version, each.outstanding_tokens) for each in health] == [
            (HEALTHY, 3, 0),
            (HEALTHY, 3, 0),
        ]

    def test_one_that_breaks_comes_back_with_the_weights_of_the_others(
        self, exact_model, other_model
    ):
        engine = TransformersEngine(exact_model)

        async def main(fleet):
            await fleet.update_weights(other_model.state_dict(), version=7)
            broken = fleet._members[0].engine
            calls = [asyncio.create_task(fleet.respond([5, n], LONG, session=n)) for n in range(4)]
            while not all(each.num_requests for each in fleet.health()):
                await asyncio.sleep(0.01)
            broken._thread.put(lambda: 1 / 0, print)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            await until(fleet, HEALTHY, HEALTHY)
            assert fleet._members[0].engine is not broken
            seeded = replace(PARAMS, seed=1)
            again = [await fleet.respond([9], seeded, session=name) for name in "ab"]
            return outcomes, again, fleet.health()

        outcomes, again, health = run(main, [partial(open_async, engine)] * 2)
        assert Counter(type(one) for one in outcomes)[EngineDied] == 2
        assert [len(one.ids) for one in outcomes if not isinstance(one, EngineDied)] == [200] * 2
        assert again[0] == again[1]
        assert again[0].versions == [(7, 0, 10)]
        assert [each.num_restarts for each in health] == [1, 0]


class TestServers:
    def test_E01_a_killed_engine_loses_its_own_and_serves_after_an_update(self, servers):
        pair = servers({"token_s": 0.01}, {"token_s": 0.01})

        async def main(fleet):
            await fleet.update_weights(WEIGHTS, version=4)
            calls = [
                asyncio.create_task(
                    fleet.respond([n], replace(LONG, max_new_tokens=150), session=n)
                )
                for n in range(6)
            ]
            await asyncio.sleep(0.3)
            killed_s = time.monotonic()
            pair[0].kill()
            lost = [n for n in range(6) if fleet._router._engines[n] == 0]
            with pytest.raises(EngineDied, match="engine 0"):
                await calls[lost[0]]
            lost_s = time.monotonic() - killed_s
            await fleet.update_weights(WEIGHTS, version=5)  # with the one that is left
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            await until(fleet, HEALTHY, HEALTHY)
            after = [await fleet.respond([7], PARAMS) for _ in range(2)]
            return lost_s, lost, outcomes, after, fleet.health()

        lost_s, lost, outcomes, after, health = run(main, opened(pair))
        assert lost_s < 5
        assert [n for n in range(6) if isinstance(outcomes[n], EngineDied)] == lost
        assert len(lost) == 3
        kept = [one for one in outcomes if not isinstance(one, EngineDied)]
        assert {span.version for one in kept for span in one.versions} == {4, 5}
        assert [one.versions for one in after] == [[(5, 0, 10)]] * 2
        assert [each.num_restarts for each in health] == [1, 0]

    def test_E02_a_stopped_engine_is_suspected_then_replaced(self, servers):
        pair = servers({}, ({"token_s": 0.01}, {}))

        async def main(fleet):
            os.kill(pair[1].processes[0].pid, signal.SIGSTOP)
            await until(fleet, HEALTHY, SUSPECT)
            asked = [await fleet.respond([1], PARAMS) for _ in range(4)]
            await until(fleet, HEALTHY, HEALTHY)
            return asked, fleet.health()[1].num_restarts

        engines = opened(pair, stall_timeout_s=1.0)
        asked, num_restarts = run(main, engines, suspect_timeout_s=2.0)
        assert [one.finish_reason for one in asked] == ["length"] * 4
        assert num_restarts == 1

    def test_what_none_takes_is_refused_as_a_whole(self, servers):
        async def main(fleet):
            await fleet.update_weights(WEIGHTS)
            with pytest.raises(UpdateRefused):
                await fleet.update_weights(WRONG)
            with pytest.raises(UpdateRefused, match="not above the present one"):
                await fleet.update_weights(WEIGHTS, version=1)
            return fleet.version, await fleet.respond([1], PARAMS), fleet.health()

        version, drawn, health = run(main, opened(servers({}, {})))
        assert version == 1
        assert drawn.versions == [(1, 0, 10)]
        assert [each.state for each in health] == [HEALTHY] * 2

    def test_E04_one_that_refuses_serves_nothing_until_it_takes_a_later_one(self, servers):
        async def main(fleet):
            # Another client has been there before: it does not go down to the fleet's version.
            await fleet._members[1].engine.update_weights(WEIGHTS, version=8)
            await fleet.update_weights(WEIGHTS, version=7)
            states = [each.state for each in fleet.health()]
            drawn = [await fleet.respond([n], PARAMS) for n in range(4)]
            await fleet.update_weights(WEIGHTS, version=9)
            await until(fleet, HEALTHY, HEALTHY)
            calls = (fleet.respond([n], PARAMS, session=n) for n in range(2))
            return states, drawn, await asyncio.gather(*calls)

        states, drawn, after = run(main, opened(servers({}, {})))
        assert states == [HEALTHY, STALE]
        assert {one.versions[0].version for one in drawn} == {7}
        assert {one.versions[0].version for one in after} == {9}

    def test_E04_engines_that_die_over_an_update_take_it_when_they_are_back(self, servers):
        pair = servers(*[({"die_in_update": True}, {})] * 2)

        async def main(fleet):
            await fleet.update_weights(WEIGHTS, version=2)
            return await fleet.respond([1], PARAMS), fleet.version

        drawn, version = run(main, opened(pair))
        assert drawn.versions == [(2, 0, 10)]
        assert version == 2

    def test_a_pause_holds_those_who_come_back_too(self, servers):
        pair = servers({}, {})

        async def main(fleet):
            await fleet.pause()
            pair[0].kill()
            await until(fleet, HEALTHY, HEALTHY, num_restarts=1)
            calls = [asyncio.create_task(fleet.respond([n], PARAMS, session=n)) for n in range(2)]
            done, _ = await asyncio.wait(calls, timeout=0.5)
            assert not done
            await fleet.resume()
            return [one.finish_reason for one in await asyncio.gather(*calls)]

        assert run(main, opened(pair)) == ["length"] * 2

    def test_when_all_are_given_up_everybody_hears_of_it(self, servers):
        pair = servers({}, {})

        async def main(fleet):
            for each in pair:
                each.kill()
            await until(fleet, DEAD, DEAD)
            with pytest.raises(EngineDied, match=r"serves any more: engine 0: .*; engine 1: .*"):
                await fleet.respond([1], PARAMS)
            with pytest.raises(EngineDied, match="no engine serves"):
                await fleet.update_weights(WEIGHTS)
            return fleet.health()

        health = run(main, opened(pair), max_restarts=0)
        assert [each.state for each in health] == [DEAD] * 2

    def test_urls_make_a_fleet_and_a_policy_over_it_draws_batches(self, servers, chatml_tokenizer):
        pair = servers({"token_s": 0.002}, {})
        with pair[0]() as one, pair[1]() as other:
            for url in (one, other):
                open_async(url, wait_s=20).close()
            policy = vLLMWrapper(
                [one, other], tokenizer=chatml_tokenizer, generate_kwargs={"stop_token_ids": ()}
            )
            fleet = open_async(policy.engine)
            assert isinstance(fleet, EngineFleet)
            assert [each.name for each in fleet.health()] == [one, other]
            params = replace(PARAMS, max_new_tokens=40, seed=3)
            rows = policy.engine.generate([[1], [2], [3], [4]], params)
            pair[0].kill()  # its rows are drawn again by the other
            again = policy.engine.generate([[1], [2], [3], [4]], params)
            policy.engine.close()
        assert rows == again
        assert [len(row.ids) for row in rows] == [40] * 4


def test_what_cannot_be_a_fleet_is_refused(servers):
    with pytest.raises(ValueError, match="a list of engines or URLs"):
        EngineFleet([])
    with pytest.raises(ValueError, match="stands there twice"):
        EngineFleet(["unix:///a", "unix:///a"])
    with pytest.raises(ValueError, match="suspect_timeout_s must be a finite number in"):
        EngineFleet(["unix:///a"], suspect_timeout_s=0)
    with pytest.raises(ConnectionError):
        EngineFleet([*opened(servers({}), wait_s=20), "unix:///nowhere"])


class LateServer:
    """Draws with new weights at once, and acknowledges them only when it is let."""

    vocab_size = 100

    def __init__(self, *, tells=True):
        self.version, self.tells = 0, tells
        self.acknowledges, self.dies = asyncio.Event(), False

    async def respond(self, prompt, params, *, max_new_tokens=None, session=None):
        await asyncio.sleep(0)
        spans = [VersionSpan(self.version, 0, 2)] if self.tells else ()
        return Generation([1, 2], [-0.5, -0.5], "stop", versions=spans)

    async def update_weights(self, weights, *, version=None):
        self.version = version
        await self.acknowledges.wait()
        if self.dies:
            raise EngineDied("it is gone")

    async def pause(self): ...

    async def resume(self): ...

    def end_session(self, session): ...

    def close(self): ...


class TestVersions:
    @pytest.mark.parametrize("tells", [True, False])
    @pytest.mark.parametrize("dies", [False, True])
    def test_no_response_is_refused_while_an_update_is_under_way(self, tells, dies):
        late, early = LateServer(tells=tells), LateServer(tells=tells)
        early.acknowledges.set()
        late.dies = dies

        async def main(fleet):
            push = asyncio.create_task(fleet.update_weights({}, version=1))
            while late.version == 0:
                await asyncio.sleep(0.001)
            drawn = [await fleet.respond([1], PARAMS, session=n) for n in range(8)]
            for each in drawn:
                checked(fleet, [each], PARAMS, 1)
            assert {v for each in drawn for v in each.token_versions(-1)} == {1}
            late.acknowledges.set()
            await push
            for each in drawn:  # its engine may be gone
                checked(fleet, [each], PARAMS, 1)
            assert fleet.version == 1

        run(main, [late, early])

    def test_a_refused_update_leaves_the_version(self):
        class Refuses(LateServer):
            async def update_weights(self, weights, *, version=None):
                raise UpdateRefused("no")

        async def main(fleet):
            with pytest.raises(UpdateRefused):
                await fleet.update_weights({}, version=1)
            assert fleet.version == 0
            assert (await fleet.respond([1], PARAMS)).token_versions(-1) == [0, 0]

        run(main, [Refuses(tells=False)])

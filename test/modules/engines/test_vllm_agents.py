"""Adapters of several agents in one vLLM engine of this process, and over servers in common."""

import asyncio
import os
import signal
import warnings
from contextlib import closing, contextmanager
from functools import partial

import psutil
import pytest
import torch
from adapted_models import adapted, largest_gap

from collectors.weight_update.adapters_alone import adapter_weights
from collectors.weight_update.in_process_updater import InProcessUpdater
from collectors.weight_update.plain_weights import gathered_state_dict
from torchrl_modules import (
    AgentPolicies,
    EngineFleet,
    VLLMEngine,
    engines_over_one_base,
    open_async,
    vLLMWrapper,
)
from torchrl_modules.engines.shared_server import SharedServer
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.vllm.bridges import OwnServerEngine
from torchrl_modules.vllm.server import start_server
from torchrl_modules.weights.agent_weights import AgentWeights
from torchrl_modules.weights.expected_weights import UpdateRefused

pytestmark = [
    pytest.mark.vllm,
    # Building an engine collects garbage, whoever left it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PROMPT = [5, 6, 7, 8] * 10  # more than a block, which the prefix cache keeps
ENDLESS = SamplingParameters(max_new_tokens=40, stop_token_ids=())
SETTINGS = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
    "dtype": "float32",
}
NAMES = ("writer", "critic", "judge")


@pytest.fixture(scope="module")
def engine(model_directory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own, while it is imported and built
        built = VLLMEngine(model_directory, max_loras=4, **SETTINGS)
    with built:
        yield built


@pytest.fixture
def policies(engine, chatml_tokenizer):
    engines = engines_over_one_base(engine, NAMES, frozen=["judge"])
    own = {n: vLLMWrapper(each, tokenizer=chatml_tokenizer) for n, each in engines.items()}
    yield AgentPolicies(own)
    for each in engines.values():
        if each.adapters is not None:
            engine.drop_adapters(each.adapters)


def check_drawn_by(models, drawn):
    """Each response is one of its agent's model, and of no other agent's."""
    for name, generation in drawn.items():
        for other, model in models.items():
            gap = largest_gap(model, PROMPT, generation)
            assert gap < 1e-4 if name == other else gap > 0.05, (name, other, gap)


def draw(policies, agents):
    given = policies.engine.generate([PROMPT] * len(agents), ENDLESS, agents=agents)
    return dict(zip(agents, given, strict=True))


def test_each_agent_draws_by_its_adapters_and_the_frozen_one_by_the_base(
    engine, policies, model, monkeypatch
):
    counts, generate = [], engine.generate
    count = lambda prompts, *args, **more: (  # noqa: E731
        counts.append(len(prompts)) or generate(prompts, *args, **more)
    )
    monkeypatch.setattr(engine, "generate", count)
    updater, models = InProcessUpdater(policies), {"judge": model}
    for seeds in ((1, 2), (3, 4)):
        trained = {n: adapted(model, seed) for n, seed in zip(NAMES[:2], seeds, strict=True)}
        version = updater.push(trained)
        drawn = draw(policies, ["critic", "judge", "writer"])
        check_drawn_by(models | trained, drawn)
        assert {tuple(s) for one in drawn.values() for s in one.versions} == {(version, 0, 40)}
        again = draw(policies, ["writer", "critic", "judge"])  # with what the cache has by now
        check_drawn_by(models | trained, again)
    assert counts == [3] * 4  # all agents in one batch
    assert version == 2

    # One alone: the other stays, and its tokens have the version of all.
    later = adapted(model, 5)
    assert updater.push({"critic": later}) == 3
    drawn = draw(policies, ["writer", "critic"])
    check_drawn_by(models | trained | {"critic": later}, drawn)
    assert {tuple(s) for one in drawn.values() for s in one.versions} == {(3, 0, 40)}
    assert len(engine._adapters._loaded) == 2  # those before are let go

    with pytest.raises(UpdateRefused, match="takes the adapters of each alone, got dict"):
        policies.update_weights(AgentWeights({"writer": gathered_state_dict(model)}))
    check_drawn_by(models | trained | {"critic": later}, draw(policies, ["writer", "judge"]))


def test_beside_training_responses_keep_the_adapters_that_they_began_with(engine, policies, model):
    old, new, other = (adapted(model, seed) for seed in (6, 7, 8))

    async def main():
        async with open_async(policies.engine) as engines:
            first = {"writer": adapter_weights(old), "critic": adapter_weights(other)}
            await engines.update_weights(AgentWeights(first), version=4)
            call = engines.respond(PROMPT, ENDLESS, agent="writer", max_new_tokens=150)
            begun = asyncio.ensure_future(call)
            while not engines.by_agent["writer"]._adapters._in_use.total():
                await asyncio.sleep(0.001)
            weights = AgentWeights({"writer": adapter_weights(new)})
            await engines.update_weights(weights, version=5)
            assert not begun.done()
            asked = (engines.respond(PROMPT, ENDLESS, agent=name) for name in NAMES)
            drawn = dict(zip(NAMES, await asyncio.gather(*asked), strict=True))
            held = len(engine._adapters._loaded)
            load = await engines.measure_load()
            last = await begun
            await engines.update_weights(weights, version=6)
            return drawn, last, held, load

    drawn, begun, held, load = asyncio.run(main())
    assert largest_gap(old, PROMPT, begun) < 1e-4
    assert [tuple(span) for span in begun.versions] == [(4, 0, 150)]
    check_drawn_by({"writer": new, "critic": other, "judge": model}, drawn)
    assert {tuple(s) for one in drawn.values() for s in one.versions} == {(5, 0, 40)}
    assert 0 < load.cache_use < 1
    assert (held, len(engine._adapters._loaded)) == (3, 2)  # none of the first, once it is over
    # The engine is given back with the adapters that it had last.
    check_drawn_by({"writer": new, "critic": other, "judge": model}, draw(policies, [*NAMES]))


def test_an_engine_that_sleeps_is_told_so_once_and_wakes_for_all_agents(
    engine, policies, model, monkeypatch
):
    """A CPU lends no memory: what an engine of a GPU would be told is noted."""
    told, asleep = [], []
    inside = engine._llm.llm_engine
    monkeypatch.setattr(inside, "sleep", lambda level: (told.append(level), asleep.append(1)))
    monkeypatch.setattr(inside, "is_sleeping", lambda: bool(asleep))
    monkeypatch.setattr(inside, "wake_up", lambda: (told.append("wake"), asleep.clear()))
    policies.engine.sleep()
    with pytest.raises(RuntimeError, match="it sleeps"):
        draw(policies, ["judge"])
    trained = {name: adapted(model, seed) for name, seed in (("writer", 9), ("critic", 10))}
    InProcessUpdater(policies).push(trained)
    assert told == [1, "wake"]  # level 1: the base waits in the host's memory
    check_drawn_by(trained | {"judge": model}, draw(policies, [*NAMES]))


def test_a_server_in_common_runs_once_and_the_one_that_died_ends_before_the_next():
    events = []

    @contextmanager
    def start():
        number = sum(kind == "start" for kind, _ in events)
        events.append(("start", number))
        yield f"unix:///{number}"
        events.append(("end", number))

    server = SharedServer(start)
    first, second, third = server(), server(), server()
    assert [first.__enter__(), second.__enter__()] == ["unix:///0"] * 2
    first.__exit__(None, None, None)  # it has seen it die; the other one has not yet
    assert events == [("start", 0)]
    assert third.__enter__() == "unix:///1"
    assert events[1:] == [("end", 0), ("start", 1)]
    second.__exit__(None, None, None)
    with server() as url:  # it joins the one that runs, though the old one was left again
        assert url == "unix:///1"
    third.__exit__(None, None, None)
    assert events[3:] == [("end", 1)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def servers_here():
    """Servers that this process has started; another test may have one, too."""
    children = psutil.Process().children()
    return {each.pid for each in children if "torchrl_modules.vllm.server" in each.cmdline()}


def test_agents_over_servers_that_are_started_for_them_come_back_when_one_is_killed(
    model, model_directory, chatml_tokenizer
):
    before = servers_here()
    start = SharedServer(partial(start_server, model_directory, max_loras=8, **SETTINGS))
    fleet = EngineFleet([partial(OwnServerEngine, start, stall_timeout_s=60)])
    own = [vLLMWrapper(fleet, tokenizer=chatml_tokenizer)]
    own += [vLLMWrapper(fleet.beside(), tokenizer=chatml_tokenizer) for _ in NAMES[1:]]
    policies = AgentPolicies(dict(zip(NAMES, own, strict=True)))
    with closing(policies.engine):
        trained = {name: adapted(model, seed) for name, seed in (("writer", 12), ("critic", 13))}
        InProcessUpdater(policies).push(trained)
        check_drawn_by(trained | {"judge": model}, draw(policies, [*NAMES]))
        (started,) = servers_here() - before
        os.kill(started, signal.SIGKILL)
        drawn = draw(policies, [*NAMES])  # rows of an engine that died are drawn again
        check_drawn_by(trained | {"judge": model}, drawn)
        assert {tuple(s) for one in drawn.values() for s in one.versions} == {(1, 0, 40)}
    assert servers_here() <= before


def test_seeds_of_rows_stay_with_their_rows_in_one_batch(policies, model):
    """Rows of three agents in another order: each has the tokens that its own seed gives."""
    trained = {name: adapted(model, seed) for name, seed in (("writer", 14), ("critic", 15))}
    InProcessUpdater(policies).push(trained)
    torch.manual_seed(0)

    def ids(order):
        seeds = {"writer": 1, "critic": 2, "judge": 3}
        given = policies.engine.generate(
            [PROMPT] * 3, ENDLESS, agents=order, seeds=[seeds[name] for name in order]
        )
        return {name: one.ids for name, one in zip(order, given, strict=True)}

    assert ids(["writer", "critic", "judge"]) == ids(["judge", "writer", "critic"])


def test_an_engine_that_takes_no_adapters_or_has_some_is_refused(vllm_engine, engine, model):
    with pytest.raises(ValueError, match=r"VLLMEngine takes no adapters\. Build a"):
        engines_over_one_base(vllm_engine, ["a"])
    with pytest.raises(ValueError, match="adapters of 2"):
        engine.generate([PROMPT], ENDLESS, adapters=[None, None])
    assert engine.version == 0
    engine.update_weights(adapter_weights(adapted(model, 11)))  # the last one in this file
    with pytest.raises(ValueError, match="the engine has weights 1"):
        engines_over_one_base(engine, ["a"])

"""Agents with weights of their own on a real local Ray: pushes of some reach every collector."""

import sys
import time
import warnings
from copy import deepcopy

import openai
import pytest
import torch
from forked_ray_workers import forked_workers
from peft import LoraConfig
from torchrl.envs.transforms import Compose

from collectors import RayLLMCollector, Wait
from torchrl_envs import AgentProgram, ChatEnv, DataLoadingPrimer
from torchrl_modules import AgentPolicies, TransformersWrapper, models_over_one_base
from torchrl_modules.weights.expected_weights import UpdateRefused

# Ray's own clean-up closes sockets and pipes late.
pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLING = {"max_new_tokens": 6, "seed": 3}
CONFIG = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


async def game(endpoint, *, prompt):
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        for player in ("first", "second"):
            await client.chat.completions.create(
                model=endpoint.model,
                messages=[{"role": "user", "content": f"{prompt} {player}"}],
                extra_headers={"x-agent-name": player},
            )
    return {"first": 1.0, "second": 0.0}


def make_env():
    rows = [{"prompt": f"What is {i} + 2?"} for i in range(4)]
    program = AgentProgram(game, agents=["first", "second"], timeout_s=60)
    parts = Compose(DataLoadingPrimer(rows, group_size=2), program)
    return ChatEnv(batch_size=4).append_transform(parts)


@pytest.fixture(scope="module")
def ray():
    """One Ray for all tests of this file; its workers get the functions of this file by value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray = pytest.importorskip("ray")
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        with forked_workers():
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=100 << 20,
            )
            yield ray
            ray.shutdown()
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def trained(model):
    """Change its adapter as a step of training does."""
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.3 * torch.randn_like(value) * value.requires_grad)
    return model


def bytes_held(worker):
    """Of all storages in what draws in a collector, each counted once."""
    models = [engine.model for engine in worker._policy.engine.by_agent.values()]
    values = [x for model in models for x in (*model.parameters(), *model.buffers())]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in values}
    return sum(storages.values())


def wait_for_collectors(supervisor, incarnation):
    while any(k.incarnation < incarnation or not k.may_serve for k in supervisor.known):
        time.sleep(0.05)


def check_rows(collector, version, models, reference_log_probs):
    """Rows of this version are of the models of now."""
    agents = set()
    for _ in range(3):
        for row in collector.collect().unbind(0):
            if row["policy_version"] < version:
                continue
            ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
            reference = reference_log_probs(models[row["agent"]], ids.tolist())
            assert (row["log_probs", "full"] - reference)[mask].abs().max() < 1e-4
            agents.add(row["agent"])
    assert agents == {"first", "second"}


@pytest.mark.parametrize("from_factory", [True, False])
def test_pushes_of_some_agents_reach_collectors_that_come_later_too(
    ray, chatml_tokenizer, make_tiny_model, reference_log_probs, from_factory
):
    base = make_tiny_model()
    expected = sum(x.nbytes for x in (*base.parameters(), *base.buffers()))
    models = models_over_one_base(base, {"first": CONFIG, "second": CONFIG})
    expected += sum(x.nbytes for m in models.values() for x in m.parameters() if x.requires_grad)

    def make_policy():
        own = {"tokenizer": chatml_tokenizer, "generate_kwargs": SAMPLING}
        return AgentPolicies({n: TransformersWrapper(m, **own) for n, m in models.items()})

    which = {"policy_factory": make_policy} if from_factory else {"policy": make_policy()}
    with RayLLMCollector(make_env, staleness=Wait(1), num_collectors=2, **which) as collector:
        supervisor = collector._supervisor

        wait_for_collectors(supervisor, 1)
        for worker in supervisor.workers:
            assert ray.get(worker.__ray_call__.remote(bytes_held)) == expected
        collector.collect()
        assert collector.update_policy_weights_({"first": trained(models["first"])}) == 1
        collector.collect()
        second = {"second": trained(models["second"])}
        assert collector.update_policy_weights_(second, wait=True) == 2
        sent = ray.get([*supervisor.weights.references.values()])
        assert all("lora_" in name for own in sent for name in own)
        check_rows(collector, 2, models, reference_log_probs)
        for worker in supervisor.workers:
            ray.kill(worker)
        wait_for_collectors(supervisor, 2)
        check_rows(collector, 2, models, reference_log_probs)
        if from_factory:  # one engine of each collector takes its weights, and one does not
            bad = deepcopy(models)
            trained(bad["first"])
            for value in bad["second"].parameters():
                if value.requires_grad:
                    value.data.fill_(torch.nan)
            with pytest.raises(UpdateRefused, match=r"\['second'\] have not"):
                collector.update_policy_weights_(bad, wait=True)
            assert collector.policy_version == 2
            check_rows(collector, 2, models, reference_log_probs)

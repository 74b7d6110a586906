"""Adapters over one base: the base is in memory once in what draws, and a push leaves it alone."""

import asyncio
from copy import deepcopy

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer

from collectors.weight_update.in_process_updater import InProcessUpdater
from torchrl_modules import (
    AgentPolicies,
    SamplingParameters,
    TransformersEngine,
    TransformersWrapper,
    models_over_one_base,
)
from torchrl_modules.engines import cast_weights
from torchrl_modules.engines.agent_engines import AgentEngines, AsyncAgentEngines
from torchrl_modules.weights.agent_weights import AgentWeights

CONFIG = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
PARAMS = SamplingParameters(max_new_tokens=60, seed=3, stop_token_ids=())


def num_bytes(*models):
    """Of all storages that models hold, each counted once."""
    values = [x for model in models for x in (*model.parameters(), *model.buffers())]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in values}
    return sum(storages.values())


def adapters_of(model):
    return {name: x for name, x in model.named_parameters() if "lora_" in name}


@pytest.fixture
def models(make_tiny_model):
    torch.manual_seed(0)
    return models_over_one_base(make_tiny_model(), {"first": CONFIG, "second": CONFIG})


@pytest.mark.parametrize("is_cast", [False, True])
def test_what_draws_has_the_base_once(models, make_tiny_model, is_cast, monkeypatch):
    monkeypatch.setattr(cast_weights, "_KINDS", {"cpu"})
    dtype = torch.bfloat16 if is_cast else None
    engines = {name: TransformersEngine(m, autocast_dtype=dtype) for name, m in models.items()}
    base, adapters = make_tiny_model(), [adapters_of(model) for model in models.values()]
    matrices = [each.weight for each in base.modules() if type(each) is torch.nn.Linear]
    of_adapters = sum(4 * x.numel() for own in adapters for x in own.values())
    expected = num_bytes(base) + 2 * of_adapters  # of each model, and joined
    if is_cast:  # half as wide, and once, too
        expected += sum(2 * x.numel() for x in matrices) + of_adapters // 2
    with AsyncAgentEngines(AgentEngines(engines)) as drawing:
        (joined,) = {each._over.joined for each in drawing.by_agent.values()}
        own = [each.model for each in drawing.by_agent.values()]
        held = [*own, joined.inside, joined.drawing_model()]
        assert num_bytes(*held) == expected
        trained = {x.data_ptr() for model in models.values() for x in model.parameters()}
        assert trained.isdisjoint(x.data_ptr() for model in held for x in model.parameters())


def test_a_push_of_one_agent_leaves_the_other_as_it_is(models, reference_log_probs):
    old, new = models["first"], deepcopy(models["first"])
    with torch.no_grad():
        for value in adapters_of(new).values():
            value.add_(0.3 * torch.randn_like(value))

    async def run(engine):
        tasks = {
            name: asyncio.create_task(engine.respond([1, 2, 3], PARAMS, agent=name))
            for name in models
        }
        while engine.by_agent["first"]._over.num_tokens_drawn < 10:
            await asyncio.sleep(0)
        await engine.pause()  # both are in the middle of their responses
        await engine.update_weights(AgentWeights({"first": adapters_of(new)}))
        await engine.resume()
        return {name: await task for name, task in tasks.items()}

    engines = AgentEngines({name: TransformersEngine(model) for name, model in models.items()})
    with AsyncAgentEngines(engines) as engine:
        before = {n: x.clone() for n, x in engine.by_agent["second"].model.named_parameters()}
        drawn = asyncio.run(run(engine))
        assert engine.version == 1
        for name, value in engine.by_agent["second"].model.named_parameters():
            assert torch.equal(value, before[name])

    def gaps(name, model):
        row = torch.tensor(drawn[name].log_probs)
        return (row - reference_log_probs(model, [1, 2, 3, *drawn[name].ids])[3:]).abs()

    (_, _, cut), last = drawn["first"].versions
    assert last == (1, cut, 60)
    assert gaps("first", old)[:cut].max() < 1e-4
    assert gaps("first", new)[cut:].max() < 1e-4
    assert gaps("first", old)[cut:].max() > 0.01
    assert drawn["second"].versions == [(1, 0, 60)]  # whose weights stay have the newest version
    assert gaps("second", models["second"]).max() < 1e-4


def test_a_push_has_the_adapters_alone_or_says_why_not(models, chatml_tokenizer):
    agents = AgentPolicies(
        {name: TransformersWrapper(m, tokenizer=chatml_tokenizer) for name, m in models.items()}
    )
    updater = InProcessUpdater(agents)
    sent = updater._gathered({"first": models["first"]}, agents.engine)["first"]
    assert sent.keys() == {
        name for name in models["first"].state_dict() if "lora_A" in name or "lora_B" in name
    }
    later = deepcopy(models["first"])
    with torch.no_grad():
        for value in adapters_of(later).values():
            value.mul_(2)
    assert updater.push({"first": later}) == 1
    for name, value in adapters_of(models["first"]).items():
        assert torch.equal(value, later.get_parameter(name))
    for layer in later.modules():
        if isinstance(layer, LoraLayer):
            layer.set_scale("default", 7.0)
    with pytest.raises(ValueError, match="their scale is another one"):
        updater.push({"first": later})
    with later.disable_adapter(), pytest.raises(ValueError, match="switched off"):
        updater.push({"first": later})
    with pytest.raises(ValueError, match="has no base_model"):
        updater.push({"first": later.get_base_model()})
    models["second"].get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"trains base_model\.model\.lm_head\.weight"):
        updater.push({"second": models["second"]})
    assert agents.policy_version == 1


def test_a_frozen_model_that_others_stand_on_is_never_pushed(make_tiny_model, chatml_tokenizer):
    base = make_tiny_model()
    models = {"base": base, **models_over_one_base(base, {"first": CONFIG})}
    agents = AgentPolicies(
        {name: TransformersWrapper(m, tokenizer=chatml_tokenizer) for name, m in models.items()}
    )
    with pytest.raises(ValueError, match="nothing to push"):
        InProcessUpdater(agents).push({"base": base})

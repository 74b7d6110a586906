"""Under autocast a model draws with matrices that were cast once, and what it draws is the same."""

import asyncio
import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_modules import AsyncTransformersEngine, SamplingParameters, TransformersEngine
from torchrl_modules.engines import cast_weights, step_graph
from torchrl_modules.tiny_model import tiny_qwen3

PARAMS = SamplingParameters(max_new_tokens=12, seed=3, stop_token_ids=())
PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7, 8]]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    monkeypatch.setattr(cast_weights, "_KINDS", {"cpu"})


def engine_of(model, **options):
    return TransformersEngine(model, autocast_dtype=torch.bfloat16, **options)


def drawn(engine):
    return [(one.ids, one.log_probs) for one in engine.generate(PROMPTS, PARAMS)]


def without(monkeypatch, model):
    """What the model itself draws, which casts its matrices for every token."""
    with monkeypatch.context() as patch:
        patch.setattr(cast_weights, "_KINDS", set())
        return drawn(engine_of(model))


class Casts(TorchDispatchMode):
    """Counts how often each weight is cast."""

    def __init__(self, model):
        super().__init__()
        self.places = {x.data_ptr() for x in model.parameters()}
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default:
            self.count += args[0].data_ptr() in self.places
        return function(*args, **(kwargs or {}))


def test_it_draws_the_same_and_casts_no_matrix_again(monkeypatch):
    model = tiny_qwen3(100).requires_grad_(False)  # autocast keeps no cast of what has no gradient
    expected = without(monkeypatch, model)
    engine = engine_of(model)
    assert drawn(engine) == expected
    assert engine.drawing_model() is not model
    with Casts(model) as casts:
        assert drawn(engine) == expected
    assert casts.count == 0
    with monkeypatch.context() as patch, Casts(model) as casts:
        patch.setattr(cast_weights, "_KINDS", set())
        drawn(engine_of(model))
    assert casts.count >= 12 * 7 * len(model.model.layers)
    # All but the matrices is the model's own.
    own = {x.data_ptr() for x in model.parameters()}
    others = [x for x in engine.drawing_model().parameters() if x.data_ptr() not in own]
    assert {x.dtype for x in others} == {torch.bfloat16}
    assert len(others) == sum(type(each) is torch.nn.Linear for each in model.modules())


def test_it_follows_weights_that_are_trained_in_place_or_replaced(monkeypatch):
    model = tiny_qwen3(100)
    engine = engine_of(model)
    before = drawn(engine)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.5 * torch.randn_like(weight))
    after = drawn(engine)
    assert after != before
    assert after == without(monkeypatch, model)
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(
        *reversed(model.model.layers[0].mlp.up_proj.weight.shape), bias=False
    )
    assert drawn(engine) == without(monkeypatch, model)
    engine.update_weights({name: 0.5 * x for name, x in model.state_dict().items()})
    assert drawn(engine) == without(monkeypatch, model)


def test_adapters_are_cast_and_act_as_they_are_set(monkeypatch):
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(tiny_qwen3(100), config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    engine = engine_of(model)
    found = drawn(engine)
    assert found == without(monkeypatch, model)
    with model.disable_adapter():
        alone = drawn(engine)
        assert alone == without(monkeypatch, model)
    assert alone != found
    assert drawn(engine) == found


@pytest.mark.parametrize("captures", [False, True])
def test_a_model_with_hooks_draws_itself(monkeypatch, captures):
    def capture(run, _):
        logits = run().clone()
        return lambda: logits.copy_(run())

    if captures:  # The reader is kept, with its steps.
        monkeypatch.setitem(step_graph.CAPTURES, "cpu", capture)
    model, seen = tiny_qwen3(100), []
    engine = engine_of(model)
    drawn(engine)
    handle = model.model.norm.register_forward_hook(lambda *_: seen.append(1))
    drawn(engine)
    assert len(seen) >= 12
    handle.remove()
    del seen[:]
    drawn(engine)
    assert not seen


def test_copies_and_training_keep_nothing_of_it(monkeypatch):
    model = tiny_qwen3(100)
    engine = engine_of(model)
    expected = drawn(engine)
    kept = engine.drawing_model()
    engine.make_room()
    assert engine.drawing_model() is kept
    monkeypatch.setattr("torchrl_modules.engines.transformers._KEPT_BESIDE_TRAINING", 0)
    engine.make_room()
    assert engine.drawing_model() is not kept
    for one in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        assert drawn(one) == expected


def test_an_engine_that_streams_draws_by_the_weights_of_each_update(monkeypatch):
    model = tiny_qwen3(100)
    other = {name: 0.5 * x for name, x in model.state_dict().items()}

    async def run(engine):
        first = await engine.respond(PROMPTS[0], PARAMS)
        await engine.update_weights(other, recompute=False)
        second = await engine.respond(PROMPTS[0], PARAMS)
        return [(one.ids, one.log_probs) for one in (first, second)]

    found = []
    for kinds in ({"cpu"}, set()):
        monkeypatch.setattr(cast_weights, "_KINDS", kinds)
        engine = AsyncTransformersEngine(engine_of(model))
        try:
            found.append(asyncio.run(run(engine)))
        finally:
            engine.close()
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]

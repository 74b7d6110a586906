"""A step over rows of several adapters is one graph, of which the host reads nothing."""

import pytest
import torch
from peft import LoraConfig

from torchrl_modules import SamplingParameters, TransformersEngine, models_over_one_base
from torchrl_modules.engines import step_graph
from torchrl_modules.engines.joined_engine import JoinedEngine

PARAMS = SamplingParameters(max_new_tokens=30, seed=5, stop_token_ids=())


@pytest.fixture
def engines(device_waits):
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"target_modules": "all-linear", "init_lora_weights": False}
    configs = {name: LoraConfig(r=r, **options) for name, r in (("first", 4), ("second", 2))}
    models = models_over_one_base(device_waits.tiny_models()["Qwen3"], configs)
    return [TransformersEngine(model) for model in models.values()]


@torch.no_grad()
def test_a_decoding_step_compiles_without_a_break(device_waits, engines):
    joined = JoinedEngine(engines)
    model, prompts = joined.drawing_model(), device_waits.prompts_of(4)
    marks = torch.tensor([joined.mark(number) for number in (0, 1, 1, 0)])
    marked = [[x + mark for x in p] for p, mark in zip(prompts, marks.tolist(), strict=True)]
    reader, other = joined.reader(model), joined.reader(model)
    tokens = reader.read(marked).argmax(-1)
    assert torch.equal(other.read(marked).argmax(-1), tokens)
    step = torch.compile(reader.advance, fullgraph=True, backend="eager")
    for _ in range(3):
        logits = other.advance(tokens + marks)
        assert torch.equal(step(tokens + marks), logits)
        tokens = logits.argmax(-1)


def test_a_graph_serves_whichever_models_the_rows_are_of(device_waits, engines, monkeypatch):
    prompts, seeds = device_waits.prompts_of(4), [1, 2, 3, 4]
    orders = [(0, 1, 1, 0), (1, 1, 0, 1)]
    expected = [
        [
            engines[number].generate([prompt], PARAMS, seeds=[seed])[0].ids
            for number, prompt, seed in zip(order, prompts, seeds, strict=True)
        ]
        for order in orders
    ]
    replays = []

    def capture(run, _):  # a replay runs the step again, into the same logits
        logits = run().clone()
        return lambda: replays.append(1) or logits.copy_(run())

    monkeypatch.setitem(step_graph.CAPTURES, "cpu", capture)
    joined = JoinedEngine(engines)
    for order, ids in zip(orders, expected, strict=True):
        drawn = joined.generate(prompts, PARAMS, models=order, seeds=seeds)
        assert [one.ids for one in drawn] == ids
    assert len(replays) > 40
    assert engines[0]._steps is joined._steps
    assert joined._steps.take(None).has_graphs  # one for both orders, of one reader

"""Steps over slots of which attention reads what their rows have draw what steps with masks do."""

import math
import warnings
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from torchrl_modules import SamplingParameters, TransformersEngine, compiled_layers
from torchrl_modules.compilation import Compiled
from torchrl_modules.engines import readers, slot_reader
from torchrl_modules.engines.readers import PrefixSlotReader
from torchrl_modules.engines.slot_reader import SlotReader
from torchrl_modules.scoring import slot_attention as slot_attention_module
from torchrl_modules.scoring.slot_attention import (
    PrefixPlan,
    SlotPlan,
    length_mask,
    slot_attention,
)

NUM_ROWS, NUM_SLOTS, NUM_COLUMNS, SIZE = 3, 5, 11, 4
PARAMS = SamplingParameters(max_new_tokens=40, seed=5, stop_token_ids=(*range(30, 34), 150))


pytestmark = pytest.mark.usefixtures("attention_of_a_gpu")


@pytest.mark.parametrize("way", ["in a loop", "by the kernel for CPUs"])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_each_row_sees_what_it_has_and_nothing_behind_it(monkeypatch, groups, shares, way):
    if way == "by the kernel for CPUs":
        monkeypatch.setattr(slot_attention_module, "_has_cpu_kernel", lambda _: True)
    draw = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(NUM_SLOTS, NUM_COLUMNS, 2, SIZE, generator=draw, dtype=torch.float64)
        for _ in range(2)
    )
    query = torch.randn(NUM_ROWS, 2 * groups, SIZE, generator=draw, dtype=torch.float64)
    lengths = (1, 7, NUM_COLUMNS)
    for row, length in enumerate(lengths):  # what nobody may read
        values[row, length:] = keys[row, length:] = 1e6
    numbers = torch.arange(NUM_ROWS + 1, dtype=torch.int32)
    ends = torch.tensor(lengths, dtype=torch.int32)
    plan = SlotPlan(ends, numbers, NUM_COLUMNS * numbers, 13, mask=length_mask(ends))
    start, num_shared = 3 * NUM_COLUMNS + 5, 13  # behind the slots, and longer than one
    if shares:
        order, has_any = torch.tensor([0, 2, 1]), torch.tensor([True, False, True])
        of_prefixes = [[0, 2, 2, 3], [start, start, start, start], [num_shared, 0, 0]]
        of_prefixes = [torch.tensor(some, dtype=torch.int32) for some in of_prefixes]
        plan = plan._replace(prefixes=PrefixPlan(order, order, has_any, *of_prefixes))
    found = slot_attention(query, keys.transpose(1, 2), values.transpose(1, 2), plan, 0.3)
    shared = slice(start, start + num_shared)
    for row, length in enumerate(lengths):
        for head in range(2 * groups):
            k, v = (x[row, :length, head // groups] for x in (keys, values))
            if shares and row != 1:
                ahead = [x.flatten(0, 1)[shared, head // groups] for x in (keys, values)]
                k, v = torch.cat([ahead[0], k]), torch.cat([ahead[1], v])
            weights = [math.exp(0.3 * float(query[row, head] @ key)) for key in k]
            expected = sum(w * x for w, x in zip(weights, v, strict=True)) / sum(weights)
            # A GPU joins what it has read in float32.
            is_exact = not shares or way == "by the kernel for CPUs"
            tolerance = 1e-12 if is_exact else 1e-5
            torch.testing.assert_close(found[row, head], expected, rtol=tolerance, atol=tolerance)


def test_the_mask_hides_what_a_row_has_not():
    assert length_mask(torch.tensor([4, 4], dtype=torch.int32)) is None
    mask = length_mask(torch.tensor([1, 3, 2], dtype=torch.int32))
    assert mask[:, 0, 0].tolist() == [
        [0, -math.inf, -math.inf],
        [0, 0, 0],
        [0, 0, -math.inf],
    ]


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_rows_that_come_and_go_draw_the_same(device_waits, monkeypatch, name):
    model = device_waits.tiny_models()[name]
    prompts, budgets = device_waits.prompts_of(7), [40 - 5 * row for row in range(7)]
    found = {}
    for kinds in ({"cpu"}, set()):
        monkeypatch.setattr(readers, "_SHARING", kinds)
        engine = TransformersEngine(model)
        assert engine.reader is (PrefixSlotReader if kinds else SlotReader)
        rows = engine.generate(prompts, PARAMS, max_new_tokens=budgets)
        rows += [one.generation() for one in device_waits.draw_continuously(engine, PARAMS, 5)]
        found[bool(kinds)] = rows
    for here, there in zip(found[True], found[False], strict=True):
        assert (here.ids, here.finish_reason) == (there.ids, there.finish_reason)
        assert here.log_probs == pytest.approx(there.log_probs, abs=1e-5, rel=1e-4)


@pytest.mark.weekly
def test_all_layers_and_all_steps_are_one_compiled_form(device_waits, monkeypatch):
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compiled_layers, "_KINDS", {"cpu"})
    monkeypatch.setattr(compiled_layers, "Compiled", partial(Compiled, backend="aot_eager"))
    model = device_waits.tiny_models()["Llama"]
    prompts, budgets = device_waits.prompts_of(6), [40 - 5 * row for row in range(6)]
    expected = TransformersEngine(model).generate(prompts, PARAMS, max_new_tokens=budgets)
    engine = TransformersEngine(model, compile_layers=True)
    found = engine.generate(prompts, PARAMS, max_new_tokens=budgets)
    assert [one.ids for one in found] == [one.ids for one in expected]
    assert not counters["graph_break"]
    # A norm of prompts, of a token of each row, and of one row; a layer of some rows, and of one.
    assert counters["stats"]["unique_graphs"] <= 5


@pytest.mark.parametrize("by_length", [False, True])
def test_a_model_that_does_not_hand_on_the_slots_is_read_with_masks(
    device_waits, monkeypatch, by_length
):
    model = device_waits.tiny_models()["Qwen3"]
    layer = model.model.layers[1]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **{**kwargs, "slots": None})
    if by_length:
        with pytest.warns(UserWarning, match="are drawn by SlotReader, which is slower"):
            assert TransformersEngine(model).reader is SlotReader
    else:
        monkeypatch.setattr(slot_reader, "_BY_LENGTH", set())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert TransformersEngine(model).reader is SlotReader

"""Layers that are compiled for packed rows score as they do themselves."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from torchrl_modules import SamplingParameters, TransformersEngine, compiled_layers
from torchrl_modules.compilation import Compiled
from torchrl_modules.scoring import packed_attention
from torchrl_modules.scoring.scorer import PackedScorer
from torchrl_modules.tiny_model import tiny_qwen3


@pytest.fixture
def compiles(monkeypatch):
    """On a CPU, by a backend that takes no time."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compiled_layers, "_KINDS", {"cpu"})
    monkeypatch.setattr(packed_attention, "_APART", {"cpu"})
    compiled = partial(Compiled, backend="aot_eager")
    monkeypatch.setattr(compiled_layers, "Compiled", compiled)


def batches():
    draw = torch.Generator().manual_seed(0)
    for sizes in ((5, 7, 9), (12, 3), (6, 6, 6, 8)):
        prompt = torch.randint(1, 90, (6,), generator=draw)
        rows = [torch.cat([prompt, torch.randint(1, 90, (n,), generator=draw)]) for n in sizes]
        mask = torch.cat([torch.arange(len(row)) >= 6 for row in rows])
        yield torch.cat(rows), torch.tensor([len(row) for row in rows]), mask


def results(model, scorer):
    for batch in batches():
        model.zero_grad()
        scores = scorer.score_packed(*batch).log_prob
        (scores * torch.arange(len(scores))).sum().backward()
        yield scores.detach(), torch.cat([x.grad.flatten() for x in model.parameters()])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.weekly), True])
def test_scores_and_gradients_are_those_of_the_layers_themselves(compiles, checkpointing):
    model = tiny_qwen3(100)
    if checkpointing:
        model.gradient_checkpointing_enable()
    other = copy.deepcopy(model)
    expected = [*results(other, PackedScorer(other))]
    found = [*results(model, PackedScorer(model, compile_layers=True))]
    for (scores, slopes), (own, own_slopes) in zip(found, expected, strict=True):
        torch.testing.assert_close(scores, own, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(slopes, own_slopes, atol=1e-4, rtol=1e-4)
    # A layer is two graphs, before its attention and behind it, for all layers and batches.
    assert 2 <= counters["stats"]["unique_graphs"] <= 16
    assert all("packed" in key or "disable" in key for key in counters["graph_break"])


def test_drawing_takes_the_norms_and_copies_take_nothing(compiles):
    model, params = tiny_qwen3(100), SamplingParameters(max_new_tokens=12, temperature=0.0)
    expected = TransformersEngine(model).generate([[5, 6, 7]], params)
    engine = TransformersEngine(model, compile_layers=True)
    assert engine.generate([[5, 6, 7]], params)[0].ids == expected[0].ids
    assert counters["stats"]["unique_graphs"] >= 1
    assert isinstance(model.model.norm._compiled_call_impl, compiled_layers._CompiledCall)
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert one.model.norm._compiled_call_impl is None


class Off(Compiled):
    """A compiler that is wrong."""

    def __call__(self, module, *args, **kwargs):
        return 1.1 * module._call_impl(*args, **kwargs)


class Fails(Compiled):
    """A compiler that is not there."""

    def __call__(self, module, *args, **kwargs):
        raise RuntimeError("no C compiler")


@pytest.mark.parametrize(("cls", "why"), [(Off, "it is off by 0.1"), (Fails, "no C compiler")])
def test_what_is_compiled_wrongly_is_told_and_not_used(compiles, monkeypatch, cls, why):
    model = tiny_qwen3(100)
    other = copy.deepcopy(model)
    expected = [*results(other, PackedScorer(other))]
    monkeypatch.setattr(compiled_layers, "Compiled", cls)
    with pytest.warns(UserWarning, match=f"Qwen3ForCausalLM is not compiled.*{why}") as told:
        found = [*results(model, PackedScorer(model, compile_layers=True))]
    assert len(told) == 2  # a layer, a norm
    for (scores, slopes), (own, own_slopes) in zip(found, expected, strict=True):
        assert torch.equal(scores, own)
        assert torch.equal(slopes, own_slopes)


def test_it_is_refused_where_nothing_is_gained():
    with pytest.raises(ValueError, match="compile_layers=True, but Qwen3ForCausalLM is on a cpu"):
        PackedScorer(tiny_qwen3(100), compile_layers=True)
    with pytest.raises(ValueError, match="compile_layers=True"):
        TransformersEngine(tiny_qwen3(100), compile_layers=True)

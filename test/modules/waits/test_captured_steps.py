"""A decoding step and a layer are one graph each, and a captured step draws what others draw."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchrl_modules import SamplingParameters, TransformersEngine
from torchrl_modules.engines import slot_reader, step_graph
from torchrl_modules.engines.readers import find_prompt_reader
from torchrl_modules.engines.slot_reader import SlotReader
from torchrl_modules.scoring.packed_attention import use_packed_attention
from torchrl_modules.scoring.trie_attention import build_trie

MODELS = (pytest.param("Llama", marks=pytest.mark.weekly), "Qwen3", "Gemma3")
"""With every change those that have more: norms of queries and keys, or a window."""


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    torch._dynamo.reset()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_decoding_step_compiles_without_a_break(device_waits, name):
    model = device_waits.tiny_models()[name]
    cls, prompts = find_prompt_reader(model), device_waits.prompts_of(3)
    reader, other = cls(model), cls(model)
    tokens = reader.read(prompts).argmax(-1)
    assert torch.equal(other.read(prompts).argmax(-1), tokens)
    step = torch.compile(reader.advance, fullgraph=True, backend="eager")
    for _ in range(3):
        logits = other.advance(tokens)
        assert torch.equal(step(tokens), logits)
        tokens = logits.argmax(-1)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        # Rows that share are read by a trie, and windows are one model's: each alone has its own.
        *(("Qwen3", rows) for rows in ("packed", "shared")),
        *(("Gemma3", rows) for rows in ("shared", "longer than the window")),
        *(
            pytest.param(name, rows, marks=pytest.mark.weekly)
            for name, every in {
                "Llama": ("padded", "packed", "shared", "longer than the window"),
                "Qwen3": ("padded", "longer than the window"),
                "Gemma3": ("padded", "packed"),
            }.items()
            for rows in every
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
def test_a_layer_compiles_without_a_break_forward_and_backward(device_waits, name, rows):
    model = device_waits.tiny_models()[name]
    use_packed_attention(model)
    sizes = [12, 6, 6] if rows == "longer than the window" else [8, 8, 8]
    ids = torch.tensor(
        [at if at < 5 else row + at for row, n in enumerate(sizes) for at in range(n)]
    )
    lengths, trie, positions = torch.tensor(sizes), None, torch.arange(8)[None]
    if rows != "padded":
        trie = build_trie(ids, lengths, lengths, share=rows == "shared")
        positions = trie.positions[None]
        assert (len(trie.ids) < len(ids)) == (rows == "shared")
    hidden = torch.randn(1, positions.shape[1], 32, requires_grad=True)
    kind = ("sliding_attention",) if name == "Gemma3" else ()
    rotary = model.model.rotary_emb(hidden, positions, *kind)

    def layer(x):
        given = {"attention_mask": None, "position_embeddings": rotary, "trie": trie}
        found = model.model.layers[0](x, **given)
        return found[0] if isinstance(found, tuple) else found

    outputs, gradients = [], []
    for compute in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        outputs.append(compute(hidden))
        gradients += torch.autograd.grad(outputs[-1].square().sum(), hidden)
    assert torch.equal(*outputs)
    assert torch.equal(*gradients)


class Captures:
    """In the place of CUDA's: a replay runs the step again, into the same logits."""

    def __init__(self, off=0.0):
        self.off, self.num_captured, self.num_replayed = off, 0, 0

    def __call__(self, run, _):
        self.num_captured += 1
        logits = run().clone()

        def replay():
            self.num_replayed += 1
            return logits.copy_(run()).add_(self.off)

        return replay


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_captured_steps_draw_the_same_while_rows_come_and_go(device_waits, monkeypatch, name):
    model = device_waits.tiny_models()[name]
    params = SamplingParameters(max_new_tokens=70, seed=5, stop_token_ids=(*range(30, 34), 150))
    prompts = device_waits.prompts_of(7)
    budgets = [70 - 9 * row for row in range(7)]
    monkeypatch.setattr(slot_reader, "_EXPECTED_BYTES", 0)
    monkeypatch.setattr(step_graph, "_GRAPH_COLUMNS", 16)
    monkeypatch.setattr(slot_reader, "_STEPS_BEFORE_A_SMALLER_GRAPH", 4)
    # Reserved columns run out on the way, and rows leave and join.
    expected = TransformersEngine(model).generate(prompts, params, max_new_tokens=budgets)
    more = device_waits.draw_continuously(TransformersEngine(model), params, 5)
    captures = Captures()
    monkeypatch.setitem(step_graph.CAPTURES, "cpu", captures)
    found = TransformersEngine(model).generate(prompts, params, max_new_tokens=budgets)
    assert captures.num_captured >= 2
    assert captures.num_replayed >= 30
    for here, there in zip(found, expected, strict=True):
        assert (here.ids, here.finish_reason) == (there.ids, there.finish_reason)
        assert here.log_probs == pytest.approx(there.log_probs, abs=1e-5, rel=1e-4)
    again = device_waits.draw_continuously(TransformersEngine(model), params, 5)
    assert [row.drawn for row in again] == [row.drawn for row in more]


def test_a_second_call_captures_nothing_unless_the_model_is_another(device_waits, monkeypatch):
    model = device_waits.tiny_models()["Qwen3"]
    params = SamplingParameters(max_new_tokens=30, seed=5, stop_token_ids=())
    first, second = device_waits.prompts_of(5), device_waits.prompts_of(3)
    expected = [TransformersEngine(model).generate(rows, params) for rows in (first, second)]
    captures = Captures()
    monkeypatch.setitem(step_graph.CAPTURES, "cpu", captures)
    engine = TransformersEngine(model)
    found = [engine.generate(rows, params) for rows in (first, second)]
    assert [[row.ids for row in rows] for rows in found] == [
        [row.ids for row in rows] for rows in expected
    ]
    assert captures.num_captured == 1  # fewer rows are drawn by the graph of more
    with torch.no_grad():
        model.lm_head.weight.add_(0.5 * torch.randn_like(model.lm_head.weight))  # in its place
    changed = engine.generate(first, params)
    assert captures.num_captured == 1
    assert [row.ids for row in changed] == [
        row.ids for row in TransformersEngine(model).generate(first, params)
    ]
    assert captures.num_captured == 2  # of the other engine
    weight = model.model.norm.weight
    model.model.norm.weight = torch.nn.Parameter(weight.detach().clone())
    engine.generate(first, params)
    assert captures.num_captured == 3
    engine.forget()
    engine.generate(first, params)
    assert captures.num_captured == 4


def test_hooks_are_called_for_each_token_and_nothing_is_captured(device_waits, monkeypatch):
    model, seen = device_waits.tiny_models()["Qwen3"], []
    params = SamplingParameters(max_new_tokens=20, seed=5, stop_token_ids=())
    monkeypatch.setitem(step_graph.CAPTURES, "cpu", captures := Captures())
    engine, prompts = TransformersEngine(model), device_waits.prompts_of(3)
    engine.generate(prompts, params)
    assert captures.num_captured == 1
    handle = model.model.norm.register_forward_hook(lambda *_: seen.append(1))
    replayed = captures.num_replayed
    engine.generate(prompts, params)
    assert len(seen) >= 20
    assert (captures.num_captured, captures.num_replayed) == (1, replayed)
    handle.remove()
    engine.generate(prompts, params)
    assert captures.num_captured == 2


class Storages(TorchDispatchMode):
    """What operators are given that none of them has made."""

    def __init__(self):
        super().__init__()
        self.given, self.made = {}, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs)):
            if isinstance(one, torch.Tensor):
                place = one.untyped_storage().data_ptr()
                if place not in self.made:
                    self.given[place] = StorageWeakRef(one.untyped_storage())
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor):
                self.made.add(one.untyped_storage().data_ptr())
        return found


def test_what_a_graph_reads_lives_as_long_as_it_does(device_waits, monkeypatch):
    model = device_waits.tiny_models()["Qwen3"]
    read = []

    def capture(run, _):
        run()  # what is made once
        with Storages() as storages:
            run()
        read.extend(storages.given.values())
        return run

    monkeypatch.setitem(step_graph.CAPTURES, "cpu", capture)
    made = []
    own_init = step_graph.StepGraph.__init__

    def init(self, *args):
        own_init(self, *args)
        self._replay = None  # nothing is held by the function itself, as on a GPU
        made.append(self)

    reader = find_prompt_reader(model)(model)
    tokens = reader.read(device_waits.prompts_of(3)).argmax(-1)
    monkeypatch.setattr(step_graph.StepGraph, "__init__", init)
    reader._reserve(4, 256)
    reader._captured(step_graph.GraphShape(4, 256, 0), tokens)
    gc.collect()
    assert len(made) == 1
    assert len(read) > 10
    assert not any(one.expired() for one in read)


def refuse(*_):
    raise RuntimeError("operation not permitted")


def do_nothing_again(run, _):
    logits = run()
    return lambda: logits


@pytest.mark.parametrize(
    ("capture", "why"),
    [
        pytest.param(refuse, "RuntimeError: operation not permitted", id="refused"),
        pytest.param(Captures(off=1e3), "its logits are off by 1e\\+03", id="wrong"),
        pytest.param(do_nothing_again, "its logits are off by", id="does nothing"),
    ],
)
def test_what_cannot_be_captured_goes_on_without_and_says_why_once(
    device_waits, monkeypatch, capture, why
):
    model = device_waits.tiny_models()["Qwen3"]
    params = SamplingParameters(max_new_tokens=24, seed=5)
    engine, prompts = TransformersEngine(model), device_waits.prompts_of(3)
    expected = engine.generate(prompts, params)
    monkeypatch.setitem(step_graph.CAPTURES, "cpu", capture)
    engine.forget()
    with pytest.warns(UserWarning, match=f"can't be captured as a graph.*{why}") as told:
        found = engine.generate(prompts, params)
    assert len(told) == 1
    engine.forget()
    assert [one.ids for one in found] == [one.ids for one in expected]
    assert engine.generate(prompts, params) == found  # not tried again, and not told again


def test_a_graph_is_only_made_where_a_device_captures():
    assert {*step_graph.CAPTURES} == {"cuda"}
    assert SlotReader.reads_past_ends

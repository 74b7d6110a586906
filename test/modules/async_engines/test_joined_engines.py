"""Rows of several adapters over one base in one batch: each is drawn by its own model."""

import asyncio
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_modules import SamplingParameters, TransformersEngine, models_over_one_base
from torchrl_modules.engines import cast_weights, joined_engine
from torchrl_modules.engines.agent_engines import AgentEngines, AsyncAgentEngines
from torchrl_modules.engines.joined_engine import joined_groups
from torchrl_modules.weights.agent_weights import AgentWeights

PROMPTS = [[1, 2, 3], [1, 2, 3], [1, 2, 3], [*range(5, 14)], [*range(5, 14)], [9]]
AGENTS = ["wide", "narrow", "base"] * 2
SEEDS = [1, 1, 1, 2, 2, 3]
PARAMS = SamplingParameters(max_new_tokens=12, seed=3, stop_token_ids=(), temperature=0.7)


def config(rank=4, targets="all-linear", **more):
    return LoraConfig(r=rank, target_modules=targets, init_lora_weights=False, **more)


@pytest.fixture
def models(make_tiny_model):
    """Of other ranks, scales and layers, and one without adapters."""
    torch.manual_seed(0)
    base = make_tiny_model().double()
    configs = {"wide": config(), "narrow": config(2, ["q_proj", "down_proj"], lora_alpha=7)}
    return {**models_over_one_base(base, configs), "base": base}


def engines_of(models, **options):
    own = {id(model): TransformersEngine(model, **options) for model in models.values()}
    return AgentEngines({name: own[id(model)] for name, model in models.items()})


def draw(engines, params=PARAMS):
    return engines.generate(PROMPTS, params, agents=AGENTS, seeds=SEEDS)


def alone(models, params=PARAMS):
    """Each row by an engine that nobody else has."""
    return [
        TransformersEngine(models[name]).generate([prompt], params, seeds=[seed])[0]
        for name, prompt, seed in zip(AGENTS, PROMPTS, SEEDS, strict=True)
    ]


def check_same(drawn, expected, tolerance=1e-9):
    for one, other in zip(drawn, expected, strict=True):
        assert one.ids == other.ids
        assert one.log_probs == pytest.approx(other.log_probs, abs=tolerance)


def joined_of(engines):
    return [joined for joined, _ in engines._joined.places(engines._engines()).values()]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stop_token_ids": (3, 50, 90, 120), "top_k": 40, "untempered_log_probs": True},
        {"repetition_penalty": 1.4, "presence_penalty": 0.4, "min_tokens": 3},
    ],
    ids=["plain", "stops", "penalties"],
)
def test_each_row_is_what_its_model_draws_alone(models, more):
    params = SamplingParameters(**{"max_new_tokens": 12, "stop_token_ids": ()} | more)
    engines, before = engines_of(models), torch.get_rng_state()
    check_same(draw(engines, params), alone(models, params))
    assert torch.equal(torch.get_rng_state(), before)  # rows have seeds
    assert len(set(map(id, joined_of(engines)))) == 1


class HeadProducts(TorchDispatchMode):
    """Counts products with one matrix."""

    def __init__(self, weight):
        super().__init__()
        self.storage, self.count = weight.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "addmm", "linear", "bmm", "mv"):
            given = [x for x in args if isinstance(x, torch.Tensor)]
            self.count += self.storage in [x.untyped_storage().data_ptr() for x in given]
        return func(*args, **kwargs or {})


def test_the_base_is_read_once_for_all(models, monkeypatch):
    engines = engines_of(models)
    draw(engines)  # by which it is tried
    with HeadProducts(models["base"].lm_head.weight) as found:
        draw(engines)
    # Prompts of 3, 9 and 1 tokens are a pass or a few; then a pass for each of 11 tokens.
    assert 12 <= found.count <= 14
    with (
        pytest.MonkeyPatch.context() as patch,
        HeadProducts(models["base"].lm_head.weight) as apart,
    ):
        patch.setattr(joined_engine, "_alike", lambda _: [])
        draw(engines)
    assert 3 * 12 <= apart.count <= 3 * 14


def test_turns_go_on_from_what_the_same_model_has_read(models):
    engines = engines_of(models)
    first = draw(engines)
    later = [[*prompt, *one.ids, 7, 8] for prompt, one in zip(PROMPTS, first, strict=True)]
    # All six conversations are known by now; the others' first turns are no beginnings of these.
    agents = ["narrow", "wide", "base", *AGENTS[3:]]
    drawn = engines.generate(later, PARAMS, agents=agents, seeds=SEEDS)
    for name, prompt, seed, one in zip(agents, later, SEEDS, drawn, strict=True):
        (expected,) = TransformersEngine(models[name]).generate([prompt], PARAMS, seeds=[seed])
        check_same([one], [expected])
    (joined, *_) = joined_of(engines)
    assert joined._kept.num_tokens > 0
    with torch.no_grad():
        for x in models["narrow"].parameters():
            x.add_(0.1) if x.requires_grad else None
    check_same(draw(engines), alone(models))


def test_what_changes_a_model_is_drawn_with(models):
    engines = engines_of(models)
    before = draw(engines)
    with models["wide"].disable_adapter():
        off = draw(engines)
        check_same(off, alone(models))
        assert off[0].ids != before[0].ids
    check_same(draw(engines), before)
    models["narrow"].add_adapter("other", config(8))
    models["narrow"].set_adapter("other")
    check_same(draw(engines), alone(models))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda models: models | made(models, use_dora=True), "DoRA"),
        (lambda models: models | made(models, targets=["embed_tokens"]), "layer.Embedding"),
        (lambda models: models | made(models, lora_bias=True), "a bias"),
        (lambda models: hooked(models), "hooks"),
    ],
    ids=["DoRA", "embedding", "bias", "hooks"],
)
@pytest.mark.filterwarnings("ignore:.lora_bias=True", "ignore:Model has .tie_word_embeddings")
def test_what_cannot_be_joined_is_warned_of_and_drawn_apart(models, spoil, reason):
    models = spoil(models)
    engines = engines_of(models)
    with pytest.warns(UserWarning, match=reason):
        drawn = draw(engines)
    check_same(drawn, alone(models))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(engines)  # told once


def made(models, targets="all-linear", **more):
    return models_over_one_base(models["base"], {"wide": config(4, targets, **more)})


def hooked(models):
    models["base"].lm_head.register_forward_hook(lambda *_: None)
    return models


def test_engines_over_other_models_are_left_alone(make_tiny_model, models):
    other = TransformersEngine(make_tiny_model(1).double())
    engines = [*engines_of(models).by_agent.values(), other]
    (group,) = joined_groups(engines)
    assert other not in group.engines
    assert len(group.engines) == 3
    assert joined_groups([engines[0], other, TransformersEngine(engines[1].model)]) != []
    invariant = TransformersEngine(make_tiny_model(), batch_invariant=True)
    assert joined_groups([invariant, other]) == []


@pytest.mark.parametrize("copy_model", [True, False])
def test_asyncio_draws_the_same_with_one_thread(models, copy_model):
    engines = engines_of(models)

    async def run(served):
        asked = zip(AGENTS, PROMPTS, SEEDS, strict=True)
        # One name for all conversations: those with two models are two nevertheless.
        return await asyncio.gather(
            *(
                served.respond(prompt, replace(PARAMS, seed=seed), session="s", agent=name)
                for name, prompt, seed in asked
            )
        )

    with AsyncAgentEngines(engines, copy_model=copy_model) as served:
        threads = Counter(id(each._over._thread) for each in served._engines())
        drawn = asyncio.run(run(served))
        assert list(threads.values()) == [3]
    expected = [
        TransformersEngine(models[name]).generate([prompt], replace(PARAMS, seed=seed))[0]
        for name, prompt, seed in zip(AGENTS, PROMPTS, SEEDS, strict=True)
    ]
    check_same(drawn, expected)
    assert {*map(tuple, (one.versions for one in drawn))} == {((0, 0, 12),)}


def test_a_push_of_one_model_is_drawn_with_from_its_token_on(models, reference_log_probs):
    engines = engines_of(models)
    new = {n: x + 0.3 for n, x in models["wide"].named_parameters() if x.requires_grad}
    state = models["wide"].state_dict()
    pushed = {name: new.get(name, value) for name, value in state.items() if "lora_" in name}
    params = replace(PARAMS, max_new_tokens=60, temperature=1.0)

    async def run(served):
        tasks = {
            name: asyncio.create_task(served.respond([1, 2, 3], params, agent=name))
            for name in models
        }
        over = served.by_agent["wide"]._over
        while over.num_tokens_drawn < 15:
            await asyncio.sleep(0)
        await served.pause()
        await served.update_weights(AgentWeights({"wide": pushed}))
        await served.resume()
        return {name: await task for name, task in tasks.items()}

    with AsyncAgentEngines(engines) as served:
        drawn = asyncio.run(run(served))
        models["wide"].load_state_dict(pushed, strict=False)
        for name, one in drawn.items():
            log_p = reference_log_probs(models[name], [1, 2, 3, *one.ids])[3:]
            cut = one.versions[-1].start
            gaps = (log_p - torch.tensor(one.log_probs, dtype=log_p.dtype)).abs()
            assert gaps[cut:].max() < 1e-6
            assert (gaps[:cut].max() > 0.01) if name == "wide" else (gaps.max() < 1e-6)
        assert 0 < drawn["wide"].versions[-1].start < 60
        assert [drawn[name].versions for name in ("narrow", "base")] == [[(1, 0, 60)]] * 2


def test_under_autocast_the_base_is_cast_once_for_all(make_tiny_model, monkeypatch):
    monkeypatch.setattr(cast_weights, "_KINDS", {"cpu"})
    torch.manual_seed(0)
    base = make_tiny_model()
    models = {**models_over_one_base(base, {"wide": config(), "narrow": config(2)}), "base": base}
    engines = engines_of(models, autocast_dtype=torch.bfloat16)
    drawn = draw(engines)
    (joined, *_) = joined_of(engines)
    drawing = joined.drawing_model()
    assert drawing is not joined.inside
    assert {x.dtype for n, x in drawing.named_parameters() if "proj" in n} == {torch.bfloat16}
    for name, prompt, one in zip(AGENTS, PROMPTS, drawn, strict=True):
        ids = torch.tensor([prompt + one.ids])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = models[name](input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        own = (logits / 0.7).log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert own.tolist() == pytest.approx(one.log_probs, abs=0.1)

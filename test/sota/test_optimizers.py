"""Optimizers by name: Muon for the matrices, 8-bit AdamW, and what they remember in checkpoints."""

import importlib.util
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from collectors import CheckpointStore, RunState
from collectors.resume.sharded import ShardedModel, ShardedOptimizer
from torchrl_agents import optimizers
from torchrl_agents.optimizers import MuonWithAdamW, matrices_of
from torchrl_agents.settings.schema import OptimConfig

HAS_8BIT = importlib.util.find_spec("bitsandbytes") is not None
NAMES = [
    "muon",
    pytest.param("adamw8bit", marks=pytest.mark.skipif(not HAS_8BIT, reason="bitsandbytes")),
]


@pytest.fixture
def build(make_tiny_model):
    def build(name, **settings):
        # Wide enough for moments of 8 bits: a matrix of fewer than 4,096 elements has none.
        model = make_tiny_model(hidden_size=64, head_dim=32)
        cfg = OptimConfig(name=name, learning_rate=1e-2, **settings)
        return model, optimizers.build_optimizer(cfg, model.parameters(), model)

    return build


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, model.config.vocab_size, (2, 8), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_first_step_of_muon_is_that_of_the_orthogonal_matrix():
    # Of a multiple of the identity, Newton-Schulz goes on as one number does: 1/sqrt(2), and then
    # s -> 3.4445 s - 4.775 s^3 + 2.0315 s^5, five times, in bfloat16.
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = MuonWithAdamW([weight], [], lr=0.1)
    weight.grad = 7.0 * torch.eye(2)
    optimizer.step()
    s = 1 / math.sqrt(2)
    for _ in range(5):
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    rms = 0.2 * math.sqrt(2)  # the size of AdamW's updates, for a matrix of 2 x 2
    torch.testing.assert_close(weight.data, -0.1 * rms * s * torch.eye(2), rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_heads_norms_and_biases_stay_with_adamw(make_tiny_model, tied):
    config = make_tiny_model().config
    config.tie_word_embeddings = tied
    model = Qwen3ForCausalLM(config)
    found = {id(value) for value in matrices_of(model)}
    names = {name for name, value in model.named_parameters() if id(value) in found}
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    layers = range(model.config.num_hidden_layers)
    rooms = {name: "self_attn" if name[0] in "qkvo" else "mlp" for name in linear}
    assert names == {f"model.layers.{i}.{rooms[n]}.{n}.weight" for i in layers for n in linear}
    others = {name for name, _ in model.named_parameters()} - names
    assert "model.embed_tokens.weight" in others
    assert ("lm_head.weight" in others) is not tied
    assert all("norm" in name or "embed" in name or "head" in name for name in others)


def test_the_two_do_what_each_does_by_itself(build):
    model, optimizer = build("muon", momentum=0.8, beta2=0.97, weight_decay=0.1)
    alone = build("muon")[0]
    matrices = matrices_of(alone)
    taken = {id(value) for value in matrices}
    others = [value for value in alone.parameters() if id(value) not in taken]
    muon = torch.optim.Muon(
        matrices, lr=1e-2, weight_decay=0.1, momentum=0.8, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.97), eps=1e-8)
    train(model, optimizer, range(3))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, alone.config.vocab_size, (2, 8), generator=generator)
        alone(input_ids=ids, labels=ids).loss.backward()
        for each in (muon, adamw):
            each.step()
        alone.zero_grad()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(found, expected)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
    before = [value.clone() for value in model.parameters()]
    train(model, optimizer, range(2))  # the learning rate of the schedule is that of both
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_goes_on_makes_the_steps_that_it_would_have_made(build, tmp_path, name):
    model, optimizer = build(name)
    train(model, optimizer, range(3))
    with CheckpointStore(tmp_path) as store:
        parts = {"model": ShardedModel(model), "optimizer": ShardedOptimizer(model, optimizer)}
        RunState(**parts).save(store, 3)
        train(model, optimizer, range(3, 6))
        again, other = build(name)
        parts = {"model": ShardedModel(again), "optimizer": ShardedOptimizer(again, other)}
        RunState(**parts).restore(store)
    train(again, other, range(3, 6))
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    fresh, begun = build(name)  # without what was remembered the steps would be others
    fresh.load_state_dict(again.state_dict())
    train(fresh, begun, range(6, 7))
    train(again, other, range(6, 7))
    assert not all(map(torch.equal, fresh.parameters(), again.parameters()))


@pytest.mark.skipif(not HAS_8BIT, reason="bitsandbytes is not installed")
def test_moments_of_large_matrices_take_a_byte(build):
    model, optimizer = build("adamw8bit")
    train(model, optimizer, range(1))
    for parameter in model.parameters():
        moments = [optimizer.state[parameter][name] for name in ("state1", "state2")]
        kind = torch.uint8 if parameter.numel() >= 4096 else torch.float32
        assert [each.dtype for each in moments] == [kind] * 2


@pytest.mark.parametrize(
    "name",
    # What the other remembers comes back above, and the recipe's way there is the same.
    ["muon", pytest.param("adamw8bit", marks=[*NAMES[1].marks, pytest.mark.weekly])],
)
def test_the_recipe_trains_with_it_and_goes_on_where_it_was_stopped(run_script, tmp_path, name):
    own = (
        *("debug=tiny", "logger=none", f"optim={name}", "optim.schedule=constant"),
        *(
            "evaluate.num_shown=0",
            "optim.learning_rate=1e-2",
            "task.num_demonstrations=64",
            "task.num_rows=64",
        ),
        *("data.num_held_out=8", "checkpoint.every=1"),
    )
    for folder, *more in (
        ["whole", "train.num_steps=4"],
        ["stopped", "train.num_steps=2"],
        ["stopped", "train.num_steps=4", "resume=stopped"],
    ):
        where = [] if len(more) == 2 else [f"hydra.run.dir={folder}"]
        done = run_script(*own, *more, *where, cwd=tmp_path, name="sft")
        assert done.returncode == 0, done.stderr
    paths = [tmp_path / name / "model" for name in ("whole", "stopped")]
    whole, stopped = (load_file(path / "model.safetensors") for path in paths)
    assert whole.keys() == stopped.keys()
    assert all(torch.equal(whole[key], stopped[key]) for key in whole)


def test_what_can_not_take_effect_is_refused(run_script, tmp_path):
    def refused(*settings, **environment):
        done = run_script("debug=tiny", *settings, cwd=tmp_path, **environment)
        assert done.returncode == 1
        return done.stderr

    assert "optim.momentum is for optim.name=muon" in refused("optim.momentum=0.5")
    for name, value in {"momentum": 0.5, "beta2": 0.5, "eps": 0.1}.items():
        assert f"optim.{name} is " in refused("optim=sgd", f"optim.{name}={value}")
    warm = "warm_start.learning_rate is of no use without warm_start.num_steps"
    assert warm in refused("warm_start.num_steps=0", "warm_start.learning_rate=1.0")
    assert "train.parallel=ddp" in refused("optim=muon", WORLD_SIZE="2")
    if not HAS_8BIT:
        words = refused("optim=adamw8bit")
        assert "needs the package bitsandbytes" in words
        assert "pip install 'torchrl-agents[adamw8bit]'" in words
    with pytest.raises(ValueError, match="no matrix to train"):
        MuonWithAdamW([], [torch.nn.Parameter(torch.zeros(2))], lr=0.1)

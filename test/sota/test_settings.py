"""Settings: every choice composes and builds; what makes no sense is refused before any loading."""

import io
import json
import math
import re
import sys
from dataclasses import asdict, dataclass, is_dataclass
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import get_args, get_type_hints

import gguf
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import TensorDict, lazy_stack

from collectors import Drop, LoadCap, Wait
from torchrl_agents import optimizers, start
from torchrl_agents.collection import staleness_of, tasks_of
from torchrl_agents.settings import command_line, rules
from torchrl_agents.settings.arguments import name_of, settings_text
from torchrl_agents.settings.command_line import compose_config, groups, prepare
from torchrl_agents.settings.defaults import defaults_of, fill_in
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.field_rules import (
    AT_LEAST_1,
    broken_rules,
    interval,
    rule_of,
    setting,
)
from torchrl_agents.settings.setting_files import with_files
from torchrl_agents.settings.task_settings import store_task, task_settings
from torchrl_agents.settings.text_arguments import with_texts
from torchrl_agents.setup import build_task
from torchrl_envs.tasks import TASKS

NEEDED = {"openenv": ["task.base_url=http://x"], "environment": ["task.factory=a.b:c"]}
"""Settings that a choice can't do without."""
ADAPTERS_ALONE = "engine.engine_kwargs.enable_lora=true"


@pytest.fixture
def grpo(script):
    return script("grpo")


@pytest.fixture
def training(grpo):
    return sys.modules["build"]


@pytest.fixture
def compose(grpo):
    for name in [*TASKS, "textarena/2048-v0", "reasoning_gym/countdown"]:
        store_task(name)
    return lambda *overrides: OmegaConf.to_object(compose_config(grpo.RECIPE, list(overrides)))


@pytest.fixture
def check(compose, grpo):
    def check(*overrides):
        cfg = compose(*overrides)
        start.check_config(grpo.RECIPE, cfg)
        return cfg

    return check


def test_every_choice_of_every_group_composes_and_builds(check, grpo, training, monkeypatch):
    monkeypatch.setattr(rules, "find_spec", lambda _: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tried = 0
    for group, choices in groups(grpo.RECIPE).items():
        for choice in choices:
            cfg = check(f"{group}={choice}", *NEEDED.get(choice, ()))
            actor = start.NoActor()
            loss = training.build_loss(cfg.loss, actor, temperature=1.0, max_tokens=7)
            policy_loss = loss.streams["rl"] if cfg.loss.observation_coeff else loss
            assert type(policy_loss).__name__ == training.PRESETS[cfg.loss.name]
            training.build_advantage(cfg.loss, cfg.collector.group_size)
            tried += 1
    assert tried > 30


def test_the_page_names_every_choice(grpo):
    page = (Path(__file__).parents[2] / "docs/script.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    for group, choices in groups(grpo.RECIPE).items():
        named = set(re.findall(r"`([\w.]+)`", page if group == "task" else rows[group]))
        assert set(choices) - named == set(), group


def test_settings_reach_the_parts(check, training):
    cfg = check(
        *(
            "loss=dr_grpo",
            "loss.clip_epsilon=[0.2,0.3]",
            "loss.kl_to_ref_coeff=0.1",
            "loss.kl_estimator=k2",
        ),
        *("optim=sgd", "optim.learning_rate=0.5", "optim.beta1=0.7", "optim.schedule=linear"),
        *("optim.num_warmup_steps=4",),
    )
    loss = training.build_loss(cfg.loss, start.NoActor(), temperature=0.7, max_tokens=77)
    assert loss.options.clip_epsilon == (0.2, 0.3)
    assert (loss.max_tokens, loss.temperature) == (77, 0.7)
    assert (loss.options.kl_to_ref_coeff, loss.options.kl_estimator) == (0.1, "k2")
    assert training.build_advantage(cfg.loss, 4).estimator.scale == "none"
    optimizer = optimizers.build_optimizer(cfg.optim, [torch.zeros(1, requires_grad=True)])
    assert optimizer.param_groups[0]["momentum"] == 0.7
    rates = [optimizers.set_learning_rate(cfg.optim, optimizer, s, 10) for s in (1, 4, 6, 10)]
    assert rates == pytest.approx([0.125, 0.35, 0.25, 0.05])
    assert optimizer.param_groups[0]["lr"] == rates[-1]


def test_the_newer_losses_are_settings(check, training):
    def build(*overrides):
        cfg = check(*overrides)
        loss = training.build_loss(cfg.loss, start.NoActor(), temperature=1.0, max_tokens=7)
        return cfg, loss

    assert build("loss=dppo_kl")[1].options.surrogate.divergence == "kl"
    moved = build("loss=ipo", "+loss.surrogate_settings.threshold=0.3")[1].options.surrogate
    assert (moved.divergence, moved.threshold, moved.one_sided) == ("tv", 0.3, False)
    cfg, _ = build("loss=maxrl")
    assert type(training.build_advantage(cfg.loss, 4).estimator).__name__ == "MaxRL"
    cfg, _ = build("loss.length_penalty=0.1", "loss.advantage_scale=none")
    penalty = training.build_advantage(cfg.loss, 4).estimator
    assert (penalty.coeff, penalty.estimator.scale) == (0.1, "none")
    cfg, _ = build("loss.credit=agent", "loss.advantage=rloo")
    credit = training.build_advantage(cfg.loss, 4).estimator
    assert [type(each).__name__ for each in (credit, credit.estimator)] == [
        "AgentCredit",
        "LeaveOneOut",
    ]
    cfg, _ = build("loss.credit=math:pow", "loss.length_penalty=0.1")
    credit = training.build_advantage(cfg.loss, 4).estimator
    assert (credit.function, type(credit.estimator).__name__) == (math.pow, "LengthPenalty")
    for wrong, said in (
        (["loss.credit=agent", "loss.advantage=gdpo"], "AgentCredit compares parts"),
        (["loss.credit=rows"], "credit must be one of"),
        (["loss.credit=mine:f"], "can't be found"),
        (["loss.credit=branch", "loss.advantage=batch_mean", "collector.group_size=1"], "has one"),
    ):
        with pytest.raises(SettingsError, match=said):
            check(*wrong)
    corrected = ("loss.sampler_correction.level=k3", "loss.sampler_correction.max_k3=0.01")
    correction = build(
        *(*corrected, "loss.sampler_correction.normalize=true", "train.num_epochs=1")
    )[1].options.sampler_correction
    assert (correction.level, correction.max_k3, correction.normalize) == ("k3", 0.01, True)
    cfg, loss = build("loss=echo")
    assert sorted(loss.streams) == ["ce", "rl"]
    rows = lazy_stack(
        [TensorDict({"masks": {"all_assistant_mask": torch.tensor([False, True, False])}})]
    )
    rows = training.build_postproc(cfg, None)(rows)
    torch.testing.assert_close(rows["streams", "ce"], torch.tensor([[0.0, 0.0, 0.05]]))
    cfg, _ = build("train.drop_solved_at=0.9")
    assert training.build_pools(cfg).settings["easy_at"] == 0.9
    cfg, _ = build(
        "train.drop_solved_at=0.9", "+train.pools.solved_at=0.8", "+train.pools.admit_hard=0.5"
    )
    wanted = {"easy_at": 0.9, "hard_at": 0, "admit_easy": 0, "admit_hard": 0.5, "solved_at": 0.8}
    assert training.build_pools(cfg).settings == wanted


def test_what_is_asked_of_the_engine_reaches_the_collector(check):
    cfg = check("collector=streaming", "engine=vllm").collector
    assert staleness_of(cfg) == Wait(4)
    assert tasks_of(cfg) == -1
    cfg = check(
        *("collector=ray", "engine=vllm", "collector.staleness_policy=drop"),
        *("collector.recompute=false", "collector.follow_load=true"),
        "collector.max_inflight_tasks=96",
    ).collector
    assert staleness_of(cfg) == Drop(4, recompute=False)
    assert tasks_of(cfg) == LoadCap(96)


@pytest.mark.parametrize(
    ("overrides", "bonus"),
    [
        pytest.param(["task=calculator"], 0.01, id="the recipe's"),
        pytest.param(["task=catch"], 0.0, id="the task's own"),
        pytest.param(["task=catch", "loss.entropy_coeff=0.3"], 0.3, id="as it is set"),
    ],
)
def test_a_task_has_its_own_entropy_bonus(compose, grpo, overrides, bonus):
    cfg = compose(*overrides, "evaluate.num_prompts=8", "collector.num_prompts=1")
    settings = {"num_rows": 64, "num_demonstrations": 32}
    build_task(grpo.RECIPE, cfg, settings)
    assert cfg.loss.entropy_coeff == bonus


@pytest.mark.parametrize(
    ("given", "rate", "steps"), [(None, 1e-3, 600), ("org/model", 1e-6, 0)], ids=["own", "given"]
)
def test_defaults_fit_the_model(compose, given, rate, steps):
    cfg = compose(*([f"policy.model={given}"] if given else []))
    fill_in(cfg, defaults_of(cfg, {}, {}, origin=given))
    assert (cfg.optim.learning_rate, cfg.warm_start.num_steps) == (rate, steps)
    assert cfg.policy.gradient_checkpointing is (given is not None)
    assert cfg.policy.max_new_tokens == (512 if given else None)
    chosen = compose("optim.learning_rate=0.1")
    own = defaults_of(chosen, {}, {}, origin=None)
    fill_in(chosen, {**own, "warm_start.num_steps": 0})
    assert (chosen.optim.learning_rate, chosen.warm_start.num_steps) == (0.1, 0)


def test_the_same_model_has_the_same_defaults_whatever_it_is_called(compose, tmp_path):
    shape = {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536}
    for name, width in (("mine", 576), ("other", 64)):
        (tmp_path / name).mkdir()
        config = {"model_type": "llama", **shape, "hidden_size": width}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    writer = gguf.GGUFWriter(tmp_path / "mine.gguf", "llama")
    writer.add_embedding_length(576)
    writer.add_block_count(30)
    writer.add_feed_forward_length(1536)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

    def defaults(model):
        cfg = compose("experiment=smollm2", f"policy.model={model}")
        fill_in(cfg, defaults_of(cfg, {}, {}, origin=model))
        cfg.policy.model = None
        return cfg

    want = defaults("smollm2")
    assert (want.warm_start.learning_rate, want.optim.learning_rate) == (5e-5, 4e-5)
    for same in ("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path / "mine", tmp_path / "mine.gguf"):
        assert defaults(str(same)) == want
    plain = compose(f"policy.model={tmp_path / 'mine'}")
    fill_in(plain, defaults_of(plain, {}, {}, origin=plain.policy.model))
    assert plain.optim.learning_rate == 3e-5
    other = compose(f"policy.model={tmp_path / 'other'}")
    fill_in(other, defaults_of(other, {}, {}, origin=other.policy.model))
    assert other.optim.learning_rate == 1e-6


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optim.num_warmup_steps=-3"], "num_warmup_steps must be at least 0"),
        (
            ["seed=9223372036854775808"],
            r"seed must be from 0 to 2\*\*63 - 1, got 9223372036854775808",
        ),
        (["warm_start.num_steps=-1"], "warm_start.num_steps must be at least 0"),
        (["evaluate.num_shown=-1"], "num_shown must be at least 0"),
        (["policy.max_new_tokens=0"], "max_new_tokens must be at least 1"),
        (["optim.learning_rate=inf"], "learning_rate must be positive and finite"),
        (["collector.group_size=1"], "group of one never has a signal"),
        (["engine.num_engines=2"], "num_engines and devices are for engine=vllm"),
        (["engine.colocate=true"], "engine.colocate lends the memory of engine=vllm"),
        (
            ["engine=vllm", "engine.colocate=true", "collector=streaming"],
            "engine.colocate.*needs collector=sync",
        ),
        (["engine=vllm", f"+{ADAPTERS_ALONE}"], "enable_lora needs policy.lora_rank"),
        (
            ["engine=vllm", f"+{ADAPTERS_ALONE}", "policy.lora_rank=4", "engine.url=a"],
            "start the servers with --enable-lora",
        ),
        (
            ["engine=vllm", f"+{ADAPTERS_ALONE}", "policy.lora_rank=4", "warm_start.num_steps=9"],
            "warm_start.num_steps=9 trains the model before it gets adapters",
        ),
        (["engine=vllm", "engine.url=a", "engine.urls=[b]"], "give one of them"),
        (
            ["engine=vllm", "engine.url=a", "policy.max_model_len=64"],
            "policy.max_model_len=64: a server at engine.url has the length",
        ),
        (
            ["engine=vllm", "engine.num_engines=2", "engine.devices=[1,2,3]"],
            r"engine.devices=\[1, 2, 3\] are shared out to engine.num_engines=2",
        ),
        (["engine=vllm", "engine.nodes=1"], "--engine-nodes=1, and there are none here"),
        (["engine.nodes=1"], "engine.nodes is for engine=vllm or sglang"),
        (["engine=vllm", "engine.nodes=1", "engine.url=a"], "and nodes: give one of them"),
        (["engine=vllm", "engine.nodes=1", "engine.num_engines=2"], "counted by engine.per_node"),
        (
            ["engine=vllm", "engine.nodes=1", "engine.colocate=true"],
            "colocate is for servers on th",
        ),
        (
            ["engine=vllm", "engine.nodes=1", "collector=ray"],
            "it is for collector=sync or streaming",
        ),
        (["engine=sglang", "engine.nodes=1"], "needs a policy.model, which all nodes see"),
        (["engine=vllm", "engine.per_node=2"], "engine.per_node=2 is for engine.nodes"),
        (
            ["engine=vllm", "engine.num_engines=2", "+engine.engine_kwargs.weight_transfer=file"],
            "weight_transfer is for a server that runs already",
        ),
        (["engine=sglang", "collector=ray"], "engine=sglang is for collector=sync or streaming"),
        (
            ["engine=sglang", f"+{ADAPTERS_ALONE}", "policy.lora_rank=4"],
            "enable_lora is for engine=vllm: SGLang is sent whole weights",
        ),
        (
            ["engine=sglang", "engine.url=a", "policy.max_model_len=64"],
            "SGLang's --context-length",
        ),
        (["engine=sglang", "engine.batch_invariant=true"], "for engine=transformers or vllm"),
        (["collector.num_collectors=2"], "num_collectors and remote_config are for collector=ray"),
        (["collector=ray", "engine=vllm", "engine.url=a"], "engine.url: on Ray each collector st"),
        (["collector=ray", "engine=vllm", "engine.devices=[1]"], "engine.devices: on Ray each"),
        (
            ["collector=ray", "engine=vllm", "engine.num_engines=3", "collector.num_collectors=2"],
            "engine.num_engines=3 are shared out to collector.num_collectors=2",
        ),
        (
            ["collector=ray", "engine=vllm", "+engine.engine_kwargs.max_model_len=64"],
            "bounds episodes by policy.max_model_len",
        ),
        (["collector.recompute=false"], "collector.recompute is for collector=streaming"),
        (
            ["collector=streaming", "collector.recompute=false", "collector.max_staleness=0"],
            "collector: Wait: with max_staleness=0 nothing is in flight",
        ),
        (["collector.follow_load=true"], "collector.follow_load is for collector=streaming"),
        (["collector.verify_every=0"], "collector.verify_every must be at least 1"),
        (["record.stop_on=[one]"], r"record.stop_on\[0\] must be one of reward_jump, wrong_is"),
        (
            ["record.check_every=null", "record.stop_on=[repetition]"],
            "what record.check_every finds",
        ),
        (["record.kept_counts=true"], "record.kept_counts is for policy.top_k, top_p or min_p"),
        (["record.kept_counts=true", "engine=vllm"], "kept_counts needs engine=transformers"),
        (["engine.batch_invariant=true", "policy.dtype=bfloat16"], "got policy.dtype=bfloat16"),
        (["engine.batch_invariant=true", "policy.device=cuda"], "got policy.device=cuda"),
        (["engine.batch_invariant=true", "train.autocast=true"], "got train.autocast=true"),
        (
            ["engine.batch_invariant=true", "policy.gradient_checkpointing=true"],
            "set policy.gradient_checkpointing=false",
        ),
        (
            ["engine.batch_invariant=true", "engine=vllm", "engine.url=http://localhost:1"],
            "start it with VLLM_BATCH_INVARIANT=1",
        ),
        (["record.replay=false"], "record.replay=false leaves out what policy.sampling_mask and"),
        (
            ["policy.routed_experts=true", "collector=streaming"],
            "policy.routed_experts is for engine=transformers and collector=sync",
        ),
        (
            ["policy.routed_experts=true", "policy.gradient_checkpointing=true"],
            "set policy.gradient_checkpointing=false",
        ),
        (["policy.sampling_mask=true"], "policy.sampling_mask is for policy.top_k, top_p or min_p"),
        (
            [
                "policy.sampling_mask=true",
                "policy.top_p=0.9",
                "engine=vllm",
                "engine.num_engines=2",
            ],
            "policy.sampling_mask needs an engine of this process",
        ),
        (["collector=ray", "collector.follow_load=true"], "follow_load needs engine=vllm"),
        (["loss.clip_epsilon=-1.0"], "loss: .*clip_low"),
        (
            ["loss=cispo", "loss.clip_epsilon=0.1"],
            "loss: clip_epsilon=0.1 has no effect on surrogate Cispo",
        ),
        (["loss=dppo", "loss.clip_epsilon=[0.2,0.3]"], "no effect on surrogate Divergence"),
        (["loss.kl_estimator=k2"], "kl_estimator='k2' has no effect without"),
        (["+loss.surrogate_settings.divergence=kl"], "surrogate_settings of .*divergence"),
        (["loss=dppo", "+loss.surrogate_settings.divergence=js"], "divergence must be one of"),
        (["loss.sampler_correction.mode=drop"], "mode must be one of"),
        (["loss.filters.top_entropy_fraction=2"], r"top_entropy_fraction must be .*\(0, 1\]"),
        (["loss.old_policy=recomputed"], "this recipe does not compute"),
        (["loss.old_policy=current"], "old_policy=current goes with train.num_epochs=1"),
        (["loss.aggregation=none"], "aggregation"),
        (["loss.sampler_correction.level=token"], "goes with train.num_epochs=1, got None"),
        (["loss=maxrl", "loss.length_penalty=0.1"], "MaxRL needs returns of at least 0"),
        (["train.drop_solved_at=1.5"], "easy_at"),
        (["+train.pools.easy=0.9"], "train.pools: .*'easy'"),
        (["train.drop_solved_at=0.5", "+train.pools.easy_at=1"], "multiple values .*'easy_at'"),
        (["loss.name=gpro"], "loss.name must be one of"),
        (["policy.top_p=2"], r"policy.top_p must be in \(0, 1\], got 2.0"),
        (["policy.temperature=0"], "temperature must be positive"),
        (["policy.device=gpu0"], "no device of torch"),
        (["policy.dtype=float8"], "policy.dtype must be one of"),
        (["train.micro_batch_tokens=0"], "micro_batch_tokens must be at least 1"),
        (["collector.max_episode_tokens=4"], "leaves no room for a turn"),
        (["engine.url=http://x"], "are for engine=vllm"),
        (["logger=trackio"], "pip install trackio"),
        (["optim.schedule=cosin"], "schedule must be one of"),
        (["train.reduce=never"], "train.reduce must be one of auto, step, micro_batch"),
        (["train.num_replicas=2"], "train.num_replicas is for several ranks"),
        (["train.cpu_offload=true"], "train.cpu_offload is for several ranks"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_refused(check, overrides, words):
    with pytest.raises(SettingsError, match=words):
        check(*overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.num_replicas=2"], "train.num_replicas is for train.parallel=fsdp2, got auto"),
        (["train.parallel=fsdp2", "train.num_replicas=3"], "has to divide the 4 ranks"),
        (["train.parallel=fsdp2", "train.cpu_offload=true"], "torch finds no GPU"),
    ],
)
def test_settings_of_shards_that_can_take_no_effect_are_refused(
    check, monkeypatch, overrides, words
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    check("train.parallel=fsdp2", "train.num_replicas=2")
    with pytest.raises(SettingsError, match=words):
        check(*overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tensor_parallel_size=3"], "tensor_parallel_size=3 has to divide the 4 ranks"),
        (["expert_parallel_size=0"], "expert_parallel_size must be at least 1, got 0"),
        (["expert_parallel_size=3"], "has to be a multiple of train.tensor_parallel_size=1, and"),
        (["tensor_parallel_size=4", "expert_parallel_size=2"], "a multiple of .*size=4, and"),
        (["tensor_parallel_size=2", "parallel=ddp"], "train.parallel=ddp does not go with"),
        (["tensor_parallel_size=2", "num_replicas=2", "parallel=fsdp2"], "num_replicas does not"),
        (["tensor_parallel_size=2", "compile_layers=true"], "train.compile_layers does not go"),
        (["tensor_parallel_size=2", "policy.lora_rank=4"], "policy.lora_rank does not go with"),
        (
            ["expert_parallel_size=2", "policy.routed_experts=true"],
            "routed_experts does not",
        ),
        (["tensor_parallel_size=2", "engine.batch_invariant=true"], "batch_invariant does not go"),
        (["tensor_parallel_size=2", "optim=muon"], "optim.name=muon needs whole parameters"),
    ],
)
def test_settings_that_do_not_go_with_a_split_model_are_refused(
    check, monkeypatch, overrides, words
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    check("train.tensor_parallel_size=2", "train.expert_parallel_size=4")
    with pytest.raises(SettingsError, match=words):
        check(*(each if "." in each or "optim" in each else f"train.{each}" for each in overrides))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.context_parallel_size=3"], "context_parallel_size=3 has to divide the 4 ranks"),
        (["train.tensor_parallel_size=2"], "expert_parallel_size does not go with train.context"),
        (["engine.batch_invariant=true"], "engine.batch_invariant does not go with train.context"),
    ],
)
def test_settings_that_do_not_go_with_shared_rows_are_refused(check, monkeypatch, overrides, words):
    monkeypatch.setenv("WORLD_SIZE", "4")
    shared = "train.context_parallel_size=2"
    check(shared, "train.parallel=fsdp2", "train.num_replicas=2", "policy.lora_rank=4")
    with pytest.raises(SettingsError, match=words):
        check(shared, *overrides)


def test_a_split_model_needs_several_ranks(check):
    with pytest.raises(SettingsError, match="context_parallel_size is for several ranks"):
        check("train.context_parallel_size=2")
    with pytest.raises(SettingsError, match="tensor_parallel_size is for several ranks"):
        check("train.tensor_parallel_size=2")


def test_a_recipe_that_trains_nothing_is_refused_on_ranks(script, monkeypatch):
    evaluate = script("evaluate").RECIPE
    prepare(evaluate, ["task=gcd"])
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun sets it
    with pytest.raises(SettingsError, match=r"evaluate trains nothing .* started 2 of them"):
        prepare(evaluate, ["task=gcd"])


def test_a_generators_own_settings_are_settings(compose, grpo):
    overrides = ["task=gcd", "task.config.max_value=7", "task.num_rows=30"]
    prepare(grpo.RECIPE, overrides)
    settings = task_settings(compose_config(grpo.RECIPE, overrides))
    assert settings["config"] == {"max_value": 7}
    assert settings["num_rows"] == 30
    assert compose("task=textarena/2048-v0").task.id == "textarena/2048-v0"
    assert compose("task=reasoning_gym/countdown").task.id == "reasoning_gym/countdown"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["evaluate.ks=[9]"], r"evaluate.ks must be from 1 to evaluate.num_samples=8, got \[9\]"),
        (["engine=chat"], "engine=chat needs engine.url=http://.../v1 and policy.model="),
        (["engine=transformers", "engine.url=x"], "are for engine=vllm"),
    ],
)
def test_an_evaluation_that_makes_no_sense_is_refused(script, overrides, words):
    module = script("evaluate")

    def begin():
        prepare(module.RECIPE, overrides)
        cfg = OmegaConf.to_object(compose_config(module.RECIPE, overrides))
        start.check_config(module.RECIPE, cfg)
        build_task(module.RECIPE, cfg, {})

    with pytest.raises(SettingsError, match=words):
        begin()


# Rules of single settings.

RECIPES = (
    *("grpo", "sft", "dpo", "kto", "reward", "distillation", "evaluate", "self-play"),
    *("expert-iteration", "online-dpo"),
)
WITHOUT_RULE = {
    "grpo": {
        "train.drop_solved_at": "DifficultyPools refuses it when the settings are tried",
        "train.pools": "so it does with these",
    }
}
"""Numbers that have no rule of their own, and why. Those of ``loss`` are the loss's own options,
with which one is made before a model is loaded."""


def number_settings(kind, prefix=""):
    """Paths of the settings that are numbers, or hold some, with their data class and name."""
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            yield from number_settings(hint, f"{prefix}{name}.")
        elif {int, float} & {hint, *get_args(hint), *chain(*map(get_args, get_args(hint)))}:
            yield f"{prefix}{name}", kind, name


@pytest.mark.parametrize("name", RECIPES)
def test_every_number_has_a_rule_or_is_named_as_one_without(script, name):
    found = list(number_settings(script(name).RECIPE.config))
    assert len(found) > 20
    bare = {path for path, kind, key in found if rule_of(kind, key) is None}
    assert {path for path in bare if not path.startswith("loss.")} == {*WITHOUT_RULE.get(name, ())}


@pytest.mark.parametrize("name", RECIPES)
def test_what_none_stands_for_keeps_the_rules(script, name):
    recipe = script(name).RECIPE
    for origin in (None, "org/model", "smollm2"):
        cfg = OmegaConf.to_object(compose_config(recipe, []))
        fill_in(cfg, defaults_of(cfg, recipe.embedded, recipe.pretrained, origin=origin))
        assert list(broken_rules(cfg)) == []


REFUSED = {
    "grpo": [
        ("policy.temperature=-1", "policy.temperature must be at least 0 and finite"),
        ("policy.temperature=nan", "policy.temperature must be at least 0 and finite"),
        ("policy.top_p=0", "policy.top_p must be in (0, 1], got 0.0."),
        ("policy.top_k=-1", "policy.top_k must be at least 0, got -1."),
        ("policy.min_p=1.5", "policy.min_p must be in [0, 1], got 1.5."),
        ("engine.name=vllm engine.devices=[0,-1]", "engine.devices[1] must be at least 0"),
        ("collector.max_draws=0", "collector.max_draws must be at least 1, got 0."),
        ("record.every=0", "record.every must be at least 1, got 0."),
        ("record.max_groups_per_step=-1", "record.max_groups_per_step must be at least"),
        ("evaluate.level=1", "evaluate.level must be in (0, 1), got 1.0."),
        ("evaluate.level=nan", "evaluate.level must be in (0, 1), got nan."),
        ("evaluate.solved_at=nan", "evaluate.solved_at must be a finite number"),
        ("evaluate.ks=[1,0]", "evaluate.ks[1] must be at least 1, got 0."),
        ("evaluate.ks=[2]", "evaluate.ks must be from 1 to evaluate.num_samples=1"),
        ("train.stop_at=inf", "train.stop_at must be a finite number, got inf."),
        ("train.num_replicas=0", "train.num_replicas must be at least 1, got 0."),
    ],
    "sft": [
        ("data.num_held_out=0", "data.num_held_out must be at least 1, got 0."),
        ("train.batch_size=0", "train.batch_size must be at least 1, got 0."),
        ("train.num_steps=0", "train.num_steps must be at least 1, got 0."),
        ("engine.name=vllm", "engine.name must be one of transformers, got 'vllm'."),
    ],
    "dpo": [
        ("data.num_held_out=0", "data.num_held_out must be at least 1, got 0."),
        ("train.batch_size=0", "train.batch_size must be at least 1, got 0."),
        ("train.num_steps=0", "train.num_steps must be at least 1, got 0."),
    ],
    "reward": [
        ("train.num_steps=-1", "train.num_steps must be at least 0, got -1."),
        ("policy.temperature=0.5", "policy.temperature=0.5 has no effect: a reward model samples"),
        ("episodes.max_turns=3", "episodes.max_turns=3 has no effect: nothing acts in the task"),
        ("evaluate.num_samples=2", "evaluate.num_samples=2 has no effect: data.num_held_out"),
        ("engine.batch_invariant=true", "engine.batch_invariant=True has no effect: the model"),
        ("policy.load_in_4bit=true", "policy.load_in_4bit=True has no effect"),
        ("train.context_parallel_size=2", "train.context_parallel_size=2 has no effect"),
    ],
    "kto": [
        ("train.batch_size=0", "train.batch_size must be at least 1, got 0."),
    ],
    "evaluate": [
        ("episodes.max_turns=0", "episodes.max_turns must be at least 1, got 0."),
    ],
    "distillation": [
        ("train.num_steps=0", "train.num_steps must be at least 1, got 0."),
        ("train.clip_epsilon=-1", "train.clip_epsilon must be in [0, 1], got"),
        ("teacher.timeout_s=0", "teacher.timeout_s must be positive and finite"),
        ("teacher.ema_decay=2", "teacher.ema_decay must be in (0, 1], got 2.0."),
    ],
    "self-play": [
        ("train.kl_to_ref_coeff=-1", "train.kl_to_ref_coeff must be at least 0 and"),
        ("train.baseline_decay=1", "train.baseline_decay must be in [0, 1), got 1"),
        ("opponents.share=2", "opponents.share must be in (0, 1], got 2.0."),
        ("opponents.max_size=0", "opponents.max_size must be at least 1, got 0."),
    ],
    "expert-iteration": [
        ("train.top_k=0", "train.top_k must be at least 1, got 0."),
        ("train.keep_above=best", "must be mean, median, any or a finite nu"),
        ("train.keep_above=nan", "must be mean, median, any or a finite nu"),
    ],
    "online-dpo": [
        ("train.min_difference=-1", "train.min_difference must be at least 0 and finite"),
        ("collector.group_size=1", "collector.group_size must be at least 2"),
        ("collector.num_roots=2", "collector.num_roots: online_dpo trains whole rollouts"),
    ],
}
"""Settings of each recipe that break a rule, and what is said of them."""
TAKEN = {
    "grpo": [
        "policy.top_p=1 policy.min_p=1 policy.top_k=0 evaluate.level=0.99",
        "record.max_groups_per_step=0 train.stop_at=-1 evaluate.every=1",
    ],
    "reward": ["train.num_steps=0 loss.center_coeff=0"],
    "evaluate": ["policy.temperature=0 evaluate.num_samples=4 evaluate.ks=[1,4]"],
    "distillation": ["teacher.ema_decay=1 train.clip_epsilon=0"],
    "self-play": ["opponents.every=1 opponents.share=1 train.kl_to_ref_coeff=0"],
    "expert-iteration": ["train.keep_above=any", "train.keep_above=-0.5"],
    "online-dpo": ["train.min_difference=0 collector.group_size=2"],
}
"""Settings at the bounds of their rules."""


@pytest.mark.parametrize("name", RECIPES)
def test_values_that_break_a_rule_are_refused_and_those_at_its_bound_are_taken(script, name):
    recipe = script(name).RECIPE
    usual = compose_config(recipe, [])

    def check(overrides):
        changed = OmegaConf.merge(usual, OmegaConf.from_dotlist(overrides.split()))
        rules.check_rules(recipe, OmegaConf.to_object(changed))

    for overrides, words in REFUSED[name]:
        with pytest.raises(SettingsError, match=re.escape(words)):
            check(overrides)
    for overrides in TAKEN.get(name, ()):
        check(overrides)


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ("seed=0,1", None),
        ("policy.dtype=float32,'bfloat16'", None),
        ("policy.top_p=${policy.temperature},0.5", None),
        ("policy.lora_rank=choice(1,2)", None),
        ("policy.top_p=interval(0,1)", None),
        ("loss.filters.trust_region=0.1,0.2", None),
        ("loss.filters.trust_region=0.1,x", "trust_region: Value 'x' of type 'str' could not be"),
        ("policy.model_kwargs={a:1},{b:2}", None),
        ("hydra.sweep.dir=a,b", None),
        ("+collector.remote_config.num_gpus=1,2", None),
        ("engine.name=vllm,mine:Engine", None),
        ("engine.name=vllm,lmdeploy", "or mine:Engine, one of yours, got 'lmdeploy'."),
        ("evaluate.ks=[1],[0]", "evaluate.ks[0] must be at least 1, got 0."),
        ("optim.learning_rate=1e-3,0", "optim.learning_rate must be positive and finite, got 0"),
        ("optim.schedule=linear,'cosin'", "must be one of trapezoid, constant, linear, cosine"),
        ("loss.name=dapo,gpro", "loss.name must be one of bnpo, cispo"),
        ("train.num_steps=1,x", "train.num_steps: Value 'x' of type 'str' could not be converted"),
    ],
)
def test_each_value_of_several_runs_is_checked_before_the_first(grpo, sweep, words):
    if words is None:
        assert prepare(grpo.RECIPE, ["--multirun", sweep]) is None
        return
    with pytest.raises(SettingsError, match=re.escape(words)):
        prepare(grpo.RECIPE, ["--multirun", sweep])


@dataclass
class Ruled:
    """Settings with rules, for the tests of rules."""

    count: int | None = setting(3, AT_LEAST_1)
    shares: list[float] = setting([0.5], interval("(0, 1]"))
    free: float = 1.0


@dataclass
class Changed(Ruled):
    """Other defaults, and a rule of its own."""

    count: int | None = 7
    free: float = setting(2.0, interval("[2, 3)"))


def test_a_default_that_a_subclass_changes_keeps_the_rule():
    assert list(broken_rules(Changed())) == []
    assert Ruled().shares is not Ruled().shares
    wrong = Changed(count=0, shares=[1.0, 0.0, 2.0], free=3.0)
    assert list(broken_rules(wrong, "x.")) == [
        "x.count must be at least 1, got 0.",
        "x.shares[1] must be in (0, 1], got 0.0.",
        "x.shares[2] must be in (0, 1], got 2.0.",
        "x.free must be in [2, 3), got 3.0.",
    ]
    assert list(broken_rules(Ruled(count=None, free=-9.0))) == []
    assert rule_of(Ruled, "free") is None


def test_the_help_says_what_a_setting_may_be(script):
    lines = prepare(script("distillation").RECIPE, ["--help"]).splitlines()
    told = {line.split("=")[0].strip(): line for line in lines if "=" in line}
    assert told["train.num_steps"].endswith("=60                           At least 1.")
    assert told["optim.beta2"].endswith(" In [0, 1).")
    assert told["policy.dtype"].endswith(". One of float32, bfloat16, float16.")
    assert told["train.num_epochs"].endswith(" At least 1. [embedded model: 4; given model: 1]")
    assert told["collector.staleness_policy"].endswith("or drop (what is too old is drawn again).")


# Files of settings, and texts as they are typed.

TEXTS = ("name", "task.system_prompt", "task.split", "policy.model", "logger.project")


@pytest.fixture
def typed(grpo):
    """Gives the settings that arguments stand for, as the command line reads them."""
    recipe, composed = grpo.RECIPE, {}

    def chosen(choices):  # each once, as for a command
        lines = tuple(each.input_line for each in choices)
        if lines not in composed:
            composed[lines] = command_line._chosen(recipe, choices)
        return composed[lines]

    def read(*arguments):
        listed, _ = with_files(recipe, arguments)
        listed = with_texts(recipe, listed, chosen)
        cfg = compose_config(recipe, listed)
        return OmegaConf.to_object(cfg)

    return read


@given(st.lists(st.text(min_size=1), min_size=len(TEXTS), max_size=len(TEXTS)))
@example(
    ["Answer, please, with it's number.", "50% = ${x} \\${y", "\n'", "ünï [a", '"Yes" or "no"']
)
@example(["true", "007", "1_000", " padded ", "a\\"])
@example(["{a: 1}", "[1,2]", "choice(a,b)", "${seed", "\\\\${seed}"])
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_text_arrives_as_it_was_typed(typed, texts):
    special = re.compile(
        r"""(?is)null|\?\?\?|@.*|'([^'\\]|\\.)*'|"([^"\\]|\\.)*"|.*\$\{\w+[:}].*"""
    )
    texts = ["a text" if special.fullmatch(text) else text for text in texts]
    cfg = typed("task=gsm8k", *(f"{name}={text}" for name, text in zip(TEXTS, texts, strict=True)))
    task, policy, logger = cfg.task, cfg.policy, cfg.logger
    assert [cfg.name, task.system_prompt, task.split, policy.model, logger.project] == texts


def test_what_means_something_in_a_text_still_does(typed, tmp_path):
    (tmp_path / "prompt.txt").write_text("It's, 'so'\n\n")
    cfg = typed("name='it\\'s'", f"logger.project=@{tmp_path}/prompt.txt", "policy.model=${name}")
    assert (cfg.name, cfg.logger.project, cfg.policy.model) == ("it's", "It's, 'so'\n", "it's")
    cfg = typed("policy.model_kwargs={revision: main}", "train.pools={easy_at: 0.9}")
    assert (cfg.policy.model_kwargs, cfg.train.pools) == ({"revision": "main"}, {"easy_at": 0.9})
    cfg = typed("name=null", "logger.project=@@home", "task=gsm8k", "task.dataset=a (1),b.jsonl")
    assert (cfg.name, cfg.logger.project, cfg.task.dataset) == (None, "@home", "a (1),b.jsonl")
    with pytest.raises(SettingsError, match=r"name=@nofile: the file .* is name=@@"):
        typed("name=@nofile")


def test_values_of_a_sweep_are_several(grpo):
    chosen = partial(command_line._chosen, grpo.RECIPE)
    sweep = ["--multirun", "name=a,b", "seed=0,1", "logger.project=it's, so"]
    assert with_texts(grpo.RECIPE, sweep, chosen) == [*sweep[:3], "logger.project='it\\'s, so'"]
    assert with_texts(grpo.RECIPE, ["name=a,b"], chosen) == ["name='a,b'"]


@pytest.mark.parametrize("name", RECIPES)
def test_the_settings_that_a_run_wrote_down_are_given_back_as_they_are(script, tmp_path, name):
    recipe = script(name).RECIPE
    own = [
        "name='it\\'s, ${x'",
        "policy.stop=['a,b',\"'\"]",
        "resume=auto",
        "policy.temperature=1e-5",
    ]
    own = [each for each in own if recipe.why_unused(name_of(each)) is None]
    own = with_texts(recipe, own, partial(command_line._chosen, recipe))
    cfg = OmegaConf.to_object(compose_config(recipe, own))
    cfg.policy.chat_template = "{{ '${a}' }}\n{% for m in messages %}\\n{% endfor %}\\"
    cfg.policy.model = "org/model"
    cfg.policy.model_kwargs = {"a-b": [1, None, {"c": "d: '"}], "e.f": 0.1}
    path = tmp_path / "config.yaml"
    path.write_text(settings_text(cfg), encoding="utf-8")
    read, _ = with_files(recipe, [str(path)])
    read = with_texts(recipe, read, partial(command_line._chosen, recipe))
    assert prepare(recipe, [each for each in read if "chat_template=" not in each]) is None
    cfg.resume = None  # of one start
    assert asdict(OmegaConf.to_object(compose_config(recipe, read))) == asdict(cfg)


@pytest.mark.parametrize(
    ("file", "arguments", "wanted"),
    [
        ("{train: {num_steps: 7}}", ["own.yaml"], {"train.num_steps": 7}),
        ("{train.num_steps: 7}", ["own.yaml"], {"train.num_steps": 7}),
        ("{train: {num_steps: 7}}", ["train.num_steps=8", "own.yaml"], {"train.num_steps": 8}),
        ("{loss: dr_grpo}", ["own.yaml"], {"loss.advantage_scale": "none"}),
        ("{loss: dr_grpo}", ["own.yaml", "loss=dapo"], {"loss.advantage_scale": None}),
        ("{defaults: [override /loss: dr_grpo, _self_]}", ["own.yaml"], {"loss.name": "dr_grpo"}),
        (
            "{experiment: smollm2, train: {num_steps: 7}}",
            ["own.yaml"],
            {"train.num_steps": 7, "policy.min_p": 0.05},
        ),
        (
            "{collector: {num_prompts: 3}}",
            ["own.yaml", "collector=streaming"],
            {"collector.num_prompts": 3, "collector.mode": "streaming"},
        ),
        ("{train: {num_steps: 7}}", ["own.yaml", "experiment=smollm2"], {"train.num_steps": 20}),
        ("{train: {num_steps: 7}}", ["experiment=smollm2", "own.yaml"], {"train.num_steps": 7}),
        (
            "{task: {id: gsm8k, split: own}}",
            ["own.yaml", "task=math"],
            {"task.id": "math", "task.split": None},
        ),
        (
            "{task: {id: gsm8k, split: own}}",
            ["own.yaml", "task=gsm8k"],
            {"task.id": "gsm8k", "task.split": "own"},
        ),
        ("{optim.learning_rate: 1e-3}", ["own.yaml"], {"optim.learning_rate": 1e-3}),
        ("{optim.learning_rate: '${optim.eps}'}", ["own.yaml"], {"optim.learning_rate": 1e-8}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_of_settings_and_what_is_typed_beside_it(
    typed, tmp_path, monkeypatch, file, arguments, wanted
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(file)
    cfg = typed(*arguments)
    assert {name: attrgetter(name)(cfg) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("file", "arguments", "words"),
    [
        ("{loss: {name: dapo}}", ["loss=dr_grpo"], "loss=dr_grpo: it chooses loss=dr_grpo, and own"
         r".yaml says loss.name=dapo\. .* type loss.name=dr_grpo loss.advantage_scale=none"),
        ("{policy: {model: a}}", ["experiment=smollm2"], "experiment=smollm2: it chooses policy="),
        ("{seed: 1}", ["experiment=control,smollm2", "name=x"], None),
        ("{train: {num_steps: 1}}", ["experiment=control,smollm2"], "smollm2 sets train.num_steps"),
        ("- 1", [], "own.yaml has no settings"),
        ("", [], "own.yaml has no settings"),
        ("{a: [}", [], "own.yaml is no YAML: "),
        ("{a: 1, a: 2}", [], "own.yaml is no YAML: .*duplicate key"),
        ("{policy: {model_kwargs: {'a b\\tü': 1}}}", [], "own.yaml: policy.model_kwargs can't be"),
        ("{defaults: [x]}", [], "own.yaml: a default is '- override /group: choice', got x"),
    ],
)  # fmt: skip
def test_files_that_can_not_be_meant(grpo, tmp_path, monkeypatch, file, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(file)
    if words is None:
        assert with_files(grpo.RECIPE, ["own.yaml", *arguments])[0] == ["seed=1", *arguments]
    else:
        with pytest.raises(SettingsError, match=words):
            with_files(grpo.RECIPE, ["own.yaml", *arguments])


def test_a_recipe_prints_what_its_output_lacks_as_an_escape(grpo, monkeypatch):
    """A policy may say any letter: with an output in ASCII a run ended as it showed one."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(SystemExit):
        command_line.read_command_line(grpo.RECIPE)
    sys.stdout.write("\N{LATIN SMALL LETTER U WITH DIAERESIS}")
    sys.stdout.flush()
    assert written.getvalue().endswith(b"\\xfc")

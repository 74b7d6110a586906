"""Agents with weights of their own in a run: trained, frozen, saved, resumed, verified, gone on."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from weighted_agents import AGENTS, PROGRAM, TASK, TINY, check_adapters, rewrite, samples

from objectives import Ranks
from torchrl_agents.models.agents import pushed_models
from torchrl_agents.parallel import parallel_kind
from torchrl_agents.settings.command_line import prepare
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.start import check_config
from torchrl_agents.verify import main as verify
from torchrl_modules import AgentPolicies, TransformersWrapper, models_over_one_base


@pytest.fixture
def run(run_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("own_talk.py").write_text(PROGRAM)
    lines = [json.dumps({"prompt": f"Number {n}, please."}) for n in range(8)]
    Path("rows.jsonl").write_text("\n".join(lines))

    def run(*arguments):
        return Path(run_recipe("grpo", *TASK, *AGENTS, *TINY, *arguments)["output_dir"])

    return run


def test_adapters_of_agents_are_trained_saved_resumed_and_verified(run, tmp_path, capsys):
    more = ("policy.lora_rank=4", "loss.kl_to_ref_coeff=0.1", "collector.verify_every=1")
    whole = run(*more, "name=whole")
    check_adapters(whole)

    # Those of the frozen one are no rows of the training, and the others are.
    trained = {(row["agent"], row["is_trained"]) for row in samples(whole, 1)}
    assert trained == {("writer", True), ("critic", True), ("judge", False)}

    # Each is compared with itself as it was: the same at first, and then another one.
    metrics = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert abs(metrics[0]["kl_to_ref"]) < 1e-7 < metrics[1]["kl_to_ref"]
    for step in metrics:
        assert step["verify/tokens"] > 0 == step["verify/at_fault"]
        of_both = [step[f"agents/{name}/loss"] for name in ("writer", "critic")]
        assert sum(of_both) == pytest.approx(step["loss"], abs=1e-6)
        counts = [step[f"agents/{name}/trained_tokens"] for name in ("writer", "critic")]
        assert sum(counts) == step["trained_tokens"]
        assert min(counts) > 0
    assert not [key for key in metrics[0] if "agents/judge" in key]

    # A run that was cut leaves the same bytes.
    cut = run(*more, "name=cut", "train.num_steps=1")
    record = json.loads((cut / "run.json").read_text())
    (cut / "run.json").write_text(json.dumps(record | {"status": "interrupted"}))
    assert run(*more, "name=cut", "resume=auto") == cut
    for name in ("writer", "critic"):
        file = f"agents/{name}/adapter/adapter_model.safetensors"
        assert (cut / file).read_bytes() == (whole / file).read_bytes()

    # Each token is one of its agent's weights, and no token is another one's.
    capsys.readouterr()
    for name in ("writer", "critic", "judge"):
        assert verify([str(whole), "--agent", name]) == 0
        assert "version 2: the checkpoint of step 1" in capsys.readouterr().out
    assert verify([str(whole)]) == 2
    assert "say whose rows are verified, --agent=" in capsys.readouterr().err
    other = {"writer": "critic", "critic": "writer", "judge": "judge"}
    mixed = Path(shutil.copytree(whole, tmp_path / "mixed"))
    rewrite(mixed, 2, lambda row: row.update(agent=other[row["agent"]]))
    assert verify([str(mixed), "--agent", "writer", "--step", "2"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [True, False])
def test_a_run_goes_on_with_what_another_one_left_of_its_agents(run, run_recipe, adapters):
    rank = ["policy.lora_rank=4"] if adapters else []
    first = run(*rank, "name=first", "collector=streaming")
    # At such a rate no bit changes: the models that a run begins with.
    second = run(*rank, f"policy.model={first}", "optim.learning_rate=1e-30", "name=second")
    for name in ("writer", "critic"):
        own, other = (
            load_file(each / f"agents/{name}/model/model.safetensors") for each in (first, second)
        )
        assert own.keys() == other.keys()
        assert all(torch.equal(own[key], other[key]) for key in own)
    assert verify([str(second), "--agent", "critic", "--step", "1"]) == 0
    if adapters:  # an agent that was frozen gets adapters of its own, which are trained
        every = ["agents.trained=[writer,critic,judge]", "agents.frozen=[]", "train.num_steps=1"]
        third = run(*rank, f"policy.model={first}", *every, "name=third")
        own = load_file(third / "agents/judge/adapter/adapter_model.safetensors")
        assert any(bool(value.any()) for key, value in own.items() if "lora_B" in key)
    # One of them is a model like any other; and all are evaluated together.
    evaluation = (*TASK, "task.dataset=rows.jsonl", "evaluate.solved_by=reward")
    few = ("evaluate.num_prompts=2", "evaluate.num_samples=1", "evaluate.num_shown=0")
    alone = f"policy.model={first}/agents/writer"
    found = [
        run_recipe("evaluate", *evaluation, *few, model)["estimates"]
        for model in (f"policy.model={second}", alone)
    ]
    assert found[0]["reward"] != found[1]["reward"]
    for model, words in (
        (f"policy.model={first}", "give agents.trained= of grpo, or the model of one of them"),
        (f"policy.model={first} agents.trained=[poet,critic,judge,writer]", "none that are called"),
        (f"policy.model={first} agents.trained=[writer,critic,judge] policy.lora_rank=7", "rank"),
    ):
        named = [] if "agents" not in model else ["task.agents=[]"]
        agents = [] if named else ["agents.trained=[]", "agents.frozen=[]"]
        chosen = ["loss.credit=episode", "agents.frozen=[]"] if named else agents
        with pytest.raises(SystemExit, match=words):
            run_recipe("grpo", *TASK, *AGENTS, *TINY, *chosen, *named, *model.split())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["agents.trained=[writer,writer]"], r"\['writer'\] are there twice"),
        (["agents.otherwise=poet"], "agents.otherwise must be one of writer, critic, judge"),
        (["agents.trained=[]"], "agents.frozen and agents.otherwise are for agents.trained"),
        (["agents.trained=['a b']"], "must be 1 to 60 letters"),
        (
            ["collector=ray", "engine=vllm"],
            "collector=ray draws for agents with engine=transformers",
        ),
        (["loss.advantage=gae", "loss.credit=episode"], "loss.advantage=gae does not go with"),
        (["push_to_hub=a/b"], "push_to_hub does not go with agents.trained"),
        (["engine=sglang"], "agents.trained is for engine=transformers or vllm"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_agents_with_weights_can_not_have_is_refused(script, more, words):
    recipe = script("grpo").RECIPE
    given = [*TASK, *AGENTS, *TINY, "task.dataset=org/rows"]
    with pytest.raises(SettingsError, match=words):
        check_config(recipe, prepare(recipe, [*given, *more]))


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ([], None),
        (["train.parallel=ddp", "train.reduce=step", "collector.verify_every=1"], None),
        (["train.parallel=fsdp2"], "train.parallel=fsdp2"),
        (["train.reduce=micro_batch"], "train.reduce=micro_batch"),
        (["train.tensor_parallel_size=2"], "train.tensor_parallel_size and expert_parallel_size"),
        (["train.context_parallel_size=2"], "train.context_parallel_size"),
    ],
    ids=lambda value: value[0] if value and isinstance(value, list) else "",
)
def test_ranks_have_the_models_of_all_agents_whole_or_refuse(script, monkeypatch, more, refused):
    monkeypatch.setenv("WORLD_SIZE", "2")
    recipe = script("grpo").RECIPE
    given = [*TASK, *AGENTS, *TINY, "task.dataset=org/rows", *more]
    if refused is None:
        prepare(recipe, given)
        cfg = recipe.config()
        kinds = [parallel_kind(cfg, Ranks(0, 2, device="cuda", control=object()))]
        cfg.agents.trained = ["writer"]
        kinds += [parallel_kind(cfg, Ranks(0, 2, device="cuda", control=object()))]
        assert kinds == ["fsdp2", "ddp"]
        return
    with pytest.raises(SettingsError, match=f"{refused} does not go with agents.trained: each of"):
        prepare(recipe, given)


@pytest.mark.parametrize(
    ("agents", "words"),
    [
        (["agents.trained=[writer,critic]"], r"\['judge'\] have no policy"),
        (["agents.trained=[writer,critic,judge,poet]"], r"\['poet'\] never ask"),
    ],
)
def test_agents_that_the_task_does_not_have_are_refused_before_a_model_is_loaded(
    run, run_recipe, agents, words
):
    del run
    with pytest.raises(SystemExit, match=words):
        run_recipe("grpo", *TASK, *TINY, *agents, "policy.model=org/none")


def test_the_first_push_has_what_frozen_agents_have_beyond_the_base(
    make_tiny_model, chatml_tokenizer
):
    config = LoraConfig(r=2, target_modules=["q_proj"])

    def policies(models):
        own = {
            name: TransformersWrapper(model, tokenizer=chatml_tokenizer)
            for name, model in models.items()
        }
        return AgentPolicies(own)

    base = make_tiny_model(0)
    adapted = models_over_one_base(base, {"writer": config, "critic": config})
    adapted["critic"].requires_grad_(False)  # trained by an earlier run
    over_base = policies(adapted | {"judge": base})
    assert [*pushed_models(over_base)] == ["writer"]
    assert [*pushed_models(over_base, is_first=True)] == ["writer", "critic"]
    whole = {"writer": make_tiny_model(1), "judge": make_tiny_model(2).requires_grad_(False)}
    assert [*pushed_models(policies(whole))] == ["writer"]
    assert pushed_models(policies(whole), is_first=True) == whole

"""The recipe of reward models: what it leaves gives the rewards that it told."""

import json
import os
import shutil
from pathlib import Path
from statistics import fmean

import pytest
from safetensors.torch import load_file
from torch import equal
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from torchrl_envs import RewardModel
from torchrl_modules import vLLMWrapper

SCRIPTS = Path(__file__).parents[2] / "sota-implementations"
COMMON = ("debug=tiny", "logger=none", "evaluate.num_shown=0")
PAIRS = (
    "data.dataset=pairs.jsonl",
    "data.num_held_out=4",
    "task=spell_backward",
    "task.num_rows=64",
)


def pair(number):
    return {"prompt": f"Is {number} odd?", "chosen": "Yes." * (1 + number % 2), "rejected": "No."}


def save(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def result_of(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def points_in(folder):
    return [json.loads(x) for x in (folder / "evaluations.jsonl").read_text().splitlines()]


def said(role, text):
    return [{"role": role, "content": text}]


@pytest.fixture(scope="module")
def runs(forks, tmp_path_factory):
    """A run with adapters, and a test of what it left: the folder, and the results."""
    folder = tmp_path_factory.mktemp("reward")
    rows = [pair(n) | ({"margin": 0.5} if n % 2 else {}) for n in range(12)]
    save(folder / "pairs.jsonl", rows)

    def run(name, *arguments):
        script = SCRIPTS / name / f"{name}.py"
        return forks([script, *COMMON, *arguments], folder, dict(os.environ))

    first = run("reward", *PAIRS, "evaluate.every=1", "train.num_steps=3", "policy.lora_rank=2")
    again = ("policy.model=outputs/reward/spell_backward/tiny", "train.num_steps=0", "name=again")
    return folder, run, result_of(first), result_of(run("reward", *PAIRS, *again))


def test_the_folder_gives_the_rewards_that_the_run_told(runs):
    folder, run, first, again = runs
    own = folder / "outputs/reward/spell_backward/tiny-001"
    points = points_in(own)
    assert [test["step"] for test in points] == [0, 1, 2, 3]
    held_out = [pair(n) for n in range(4)]
    score = RewardModel(str(own))
    prompts = [said("user", row["prompt"]) for row in held_out]
    found = {
        name: score(prompts, [said("assistant", row[name]) for row in held_out])
        for name in ("chosen", "rejected")
    }
    for name, rewards in found.items():
        assert points[-1][f"{name}_reward"] == pytest.approx(fmean(rewards), abs=1e-5)
        assert again[f"after/{name}_reward"] == pytest.approx(fmean(rewards), abs=1e-5)
    right = [a > b for a, b in zip(found["chosen"], found["rejected"], strict=True)]
    assert first["held_out_after"] == again["held_out_after"] == fmean(right)
    assert again["steps"] == 0
    untrained = ("policy.model=outputs/reward/spell_backward/tiny", "train.num_steps=1")
    assert run("reward", *PAIRS, *untrained, "dry_run=true").returncode == 0
    assert not (folder / "outputs/reward/spell_backward/again-001/model").exists()
    loaded = AutoModelForSequenceClassification.from_pretrained(own / "model")
    assert loaded.config.num_labels == 1
    assert "held-out pairs" in (own / "model/README.md").read_text().lower()
    # The head is trained beside the adapters, and PEFT has both.
    adapter = load_file(own / "adapter/adapter_model.safetensors")
    (head,) = [value for name, value in adapter.items() if name.endswith("score.weight")]
    assert equal(head, loaded.score.weight)


def test_its_folder_gives_rewards_and_begins_a_critic(runs):
    folder, run, *_ = runs
    own = "outputs/reward/spell_backward/tiny"
    whole = folder / own / "model"
    shutil.copytree(whole, folder / "speaks")  # the tokens that the reward model knows
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(folder / "speaks")
    save(folder / "prompts.jsonl", [{"prompt": pair(n)["prompt"]} for n in range(40)])
    (folder / "mine.py").write_text(
        "def long(completions, **_):\n    return [9.0 for _ in completions]\n"
    )
    more = ("task=environment", f"task.rewards=[{own},mine:long]", "task.reward_weights=[1,0]")
    more += (
        "task.dataset=prompts.jsonl",
        "evaluate.num_prompts=4",
        "evaluate.solved_by=RewardModel",
    )
    more += ("policy.model=speaks", "warm_start.num_steps=0", "policy.max_new_tokens=4")
    more += ("loss.advantage=gae", "train.num_steps=1")
    critic = (f"critic.model={own}", "critic.num_warmup_steps=1")
    (whole / "model.safetensors").rename(folder / "weights")
    refused = run("grpo", *more, "dry_run=true")
    assert refused.returncode == 1
    words = f"task.rewards={own}/model: OSError: its folder has no model.safetensors"
    assert words in refused.stderr.splitlines()[-1]
    (folder / "weights").rename(whole / "model.safetensors")
    checked, made = (run("grpo", *more, *critic, each) for each in ("dry_run=true", "name=user"))
    assert checked.returncode == 0
    loads = "loading the reward model"  # a dry run checks that its files are there
    assert (loads in checked.stderr, loads in made.stderr) == (False, True)
    result = result_of(made)
    metrics = json.loads((folder / result["output_dir"] / "metrics.jsonl").read_text())
    assert metrics["rewards/long/mean"] == 9
    assert metrics["reward"] == pytest.approx(metrics["rewards/RewardModel/mean"])
    assert metrics["critic/loss"] > 0


def test_vllm_draws_with_no_reward_model(runs):
    own = runs[0] / "outputs/reward/spell_backward/tiny"
    with pytest.raises(ValueError, match="which gives numbers and says nothing"):
        vLLMWrapper(str(own))


def test_what_can_not_be_a_reward_model_or_has_no_effect_is_refused(runs):
    folder, run, *_ = runs
    no_policy = ("task=spell_backward", "policy.model=outputs/reward/spell_backward/tiny")
    speaks_not = "is a reward model or a critic (Qwen3ForSequenceClassification), which gives"
    save(folder / "bad.jsonl", [pair(0), pair(1) | {"margin": "much"}, pair(2)])
    for name, arguments, words in (
        (
            "reward",
            [*PAIRS, "data.dataset=bad.jsonl", "dry_run=true"],
            "row 1 of the preferences: 'margin'",
        ),
        ("reward", [*PAIRS, "train.num_steps=0", "dry_run=true"], "and the embedded model is none"),
        ("reward", [*PAIRS, "train.num_steps=0", "data.num_held_out=13"], "There are 12 pairs"),
        ("reward", [*PAIRS, "policy.top_k=4"], "policy.top_k=4 has no effect: a reward model"),
        (
            "grpo",
            ["task=environment", "task.rewards=outputs/reward", "task.dataset=pairs.jsonl"],
            "rewards='outputs/reward' is no reward model: RewardModel: the folder",
        ),
        ("sft", [*no_policy, "train.num_steps=1"], speaks_not),
        ("dpo", [*no_policy, "dry_run=true"], speaks_not),
    ):
        refused = run(name, *arguments)
        assert refused.returncode == 1
        assert words in refused.stderr.splitlines()[-1]

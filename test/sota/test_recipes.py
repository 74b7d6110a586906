"""Recipes on rows in a file: is a number odd?

Weekly: fine-tuning learns it, and its control learns the format and guesses. The others (expert
iteration, with adapters too, preferences, labels, distillation, GRPO that streams) go on from a
model that was stopped while it guessed; their controls learn nothing. With every change:
fine-tuning that is killed goes on, and a step of expert iteration trains what it says that it
trains.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from collectors.record import RunRecord
from torchrl_envs.tasks.by_name import make_task

ROOT = Path(__file__).parents[2]
TASK = ("task=gsm8k", "task.dataset=rows.jsonl", "task.system_prompt=null")
FAST = ("logger=none", "evaluate.num_shown=0", "evaluate.num_prompts=48", "engine=transformers")
GUESSING = 0.55
"""Half of the answers are right, and the others get 0.1 for their format."""
HALF_TRAINED = (
    *("policy.model=outputs/sft/gsm8k/half", "policy.max_new_tokens=24"),
    *("policy.gradient_checkpointing=false", "optim.num_warmup_steps=0", "optim.max_grad_norm=0.1"),
    *("optim.learning_rate=2e-3", "train.num_epochs=4"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipes")
    rows = [
        {"question": f"Is {i} odd?", "answer": f"look\n#### {i % 2}"}
        for i in sorted(range(10, 600), key=lambda i: i * 7919 % 1009)
    ]
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def run(run_recipe, folder, monkeypatch):
    monkeypatch.chdir(folder)
    return lambda name, *arguments: run_recipe(name, *TASK, *FAST, *arguments)


@pytest.mark.weekly
def test_fine_tuning(run):
    common = ("train.num_steps=120", "data.num_held_out=48", "policy.max_new_tokens=24")
    learnt = run("sft", "name=learnt", *common)
    assert learnt["held_out_before"] < 0.1
    assert learnt["held_out_after"] > 0.9
    assert learnt["held_out_nll"] < 0.05
    control = run("sft", "experiment=control", *common)
    assert abs(control["held_out_after"] - GUESSING) < 0.2
    assert control["held_out_nll"] > learnt["held_out_nll"] + 0.04  # a coin's 0.69 nats in a turn


@pytest.fixture
def half_trained(run, folder):
    """A model that knows the format, and guesses; the teacher has learnt it."""
    if not (folder / "outputs/sft/gsm8k/learnt").exists():
        pytest.skip("goes on from what test_fine_tuning leaves")
    if not (folder / "outputs/sft/gsm8k/half").exists():
        run("sft", "name=half", "train.num_steps=45", "policy.max_new_tokens=24")


def metric(result, name):
    lines = (Path(result["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)[name] for line in lines]


@pytest.mark.weekly
@pytest.mark.usefixtures("half_trained")
def test_expert_iteration(run):
    more = (
        *("train.num_steps=24", "train.keep_above=0.5", "train.num_epochs=2"),
        *("collector.num_prompts=24", "collector.group_size=8", "optim.learning_rate=1e-3"),
    )
    learnt = run("expert-iteration", *HALF_TRAINED, *more)  # 0.91, 0.85, 0.91: seeds 0, 1, 2
    assert abs(learnt["held_out_before"] - GUESSING) < 0.15
    assert learnt["held_out_after"] > 0.75
    control = run("expert-iteration", "experiment=control", *HALF_TRAINED, *more)
    assert control["held_out_after"] < 0.68
    assert sum(metric(control, "reward")[-4:]) / 4 < 0.65  # also of the 384 last rollouts


@pytest.mark.slow
def test_a_step_of_expert_iteration_trains_the_best_of_each_group(
    run_recipe, tmp_path, monkeypatch
):
    """With a reward that every model gets: the length of what it says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_lengths.py").write_text(
        "def length(completions, **_):\n    return [float(len(str(s))) for s in completions]\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}?"}}\n' for i in range(32)))
    result = run_recipe(
        *("expert-iteration", "debug=tiny", "logger=none", "evaluate.num_prompts=4"),
        *("task=environment", "task.dataset=rows.jsonl", "task.rewards=own_lengths:length"),
        *("policy.max_new_tokens=8", "collector.num_prompts=2", "collector.group_size=4"),
        *("train.num_steps=2", "train.top_k=2"),
    )
    record = RunRecord(Path(result["output_dir"]))
    for step, trained in zip(record.steps, metric(result, "kept_fraction"), strict=True):
        groups = defaultdict(list)
        for sample in record.samples(step.step):
            groups[sample.group_id].append(sample.reward)
        assert [len(rewards) for rewards in groups.values()] == [4, 4]
        best = [sum(r > sum(rewards) / 4 for r in rewards) for rewards in groups.values()]
        assert trained == sum(min(2, num) for num in best) / 8 > 0
    losses = metric(result, "loss")
    assert len(losses) == 2
    assert losses[0] > 0  # nats of a token


@pytest.mark.weekly
@pytest.mark.usefixtures("half_trained")
def test_distillation(run):
    more = (
        *("collector.num_prompts=32", "collector.group_size=2"),
        "teacher.model=outputs/sft/gsm8k/learnt",
    )
    learnt = run("distillation", *HALF_TRAINED, *more, "train.num_steps=28")
    kl = metric(learnt, "kl_to_teacher")
    assert learnt["held_out_after"] > 0.75
    assert sum(kl[-4:]) < sum(kl[:4]) / 2
    control = run(
        "distillation", "experiment=control", *HALF_TRAINED, *more[1:], "train.num_steps=8"
    )
    kl = metric(control, "kl_to_teacher")
    assert control["held_out_after"] < 0.68
    assert sum(kl[-4:]) > sum(kl[:4])


@pytest.mark.weekly
@pytest.mark.usefixtures("half_trained")
def test_preferences(run, folder):
    """Of the two answers to a number the right one becomes likelier, also of held-out numbers."""
    options = {"dataset": str(folder / "rows.jsonl"), "system_prompt": None, "num_held_out": 48}
    said = "<think>look</think><answer>{}</answer>".format
    pairs = [
        {"prompt": row["question"], "chosen": said(right), "rejected": said(1 - right)}
        for row in make_task("gsm8k", **options).train_rows
        for right in [int(row["answer"][-1])]
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    more = ("data.dataset=pairs.jsonl", "data.num_held_out=48", "train.num_steps=60")
    more += (*HALF_TRAINED[:4], "optim.learning_rate=1e-3", "loss.sft_coeff=1")
    learnt = run("dpo", *more)
    assert abs(learnt["held_out_before"] - GUESSING) < 0.15
    assert learnt["held_out_after"] > 0.75
    assert learnt["held_out_accuracy"] > 0.9
    control = run("dpo", "experiment=control", *more)
    assert control["held_out_after"] < 0.68
    assert control["held_out_accuracy"] < 0.7


@pytest.mark.weekly
@pytest.mark.usefixtures("half_trained")
def test_labels(run, folder):
    """Each number has one answer, a right and desirable one or a wrong one, and no number both."""
    options = {"dataset": str(folder / "rows.jsonl"), "system_prompt": None, "num_held_out": 48}
    said, coin, rows = "<think>look</think><answer>{}</answer>".format, random.Random(0), []
    for row in make_task("gsm8k", **options).train_rows:
        label, right = coin.random() < 0.5, int(row["answer"][-1])
        answer = {"completion": said(right if label else 1 - right), "label": label}
        rows.append({"prompt": row["question"], **answer})
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = ("data.dataset=labels.jsonl", "data.num_held_out=48", "train.num_steps=120")
    more += (*HALF_TRAINED[:4], "optim.learning_rate=1e-3", "loss.beta=0.5")
    learnt = run("kto", *more)
    assert abs(learnt["held_out_before"] - GUESSING) < 0.15
    assert learnt["held_out_after"] > 0.75
    assert learnt["held_out_accuracy"] > 0.8
    control = run("kto", "experiment=control", *more)
    assert control["held_out_after"] < 0.68
    assert control["held_out_accuracy"] < 0.7


@pytest.mark.weekly
@pytest.mark.usefixtures("half_trained")
def test_adapters_learn(run):
    more = ("collector.num_prompts=12", "collector.group_size=8", "train.num_steps=24")
    more += ("policy.lora_rank=8", "optim.learning_rate=5e-3", "train.keep_above=0.5")
    learnt = run("expert-iteration", *HALF_TRAINED, *more, "name=adapters")
    assert abs(learnt["held_out_before"] - GUESSING) < 0.15
    assert learnt["held_out_after"] > 0.75
    assert sum(metric(learnt, "reward")[-4:]) / 4 > 0.72
    control = run("expert-iteration", "experiment=control", *HALF_TRAINED, *more)
    assert control["held_out_after"] < 0.68
    assert sum(metric(control, "reward")[-4:]) / 4 < 0.65


@pytest.mark.weekly
@pytest.mark.usefixtures("half_trained")
def test_grpo_learns_from_rollouts_of_older_weights(run):
    more = ("collector=streaming", "collector.max_staleness=2", "train.num_steps=45")
    more += ("collector.num_prompts=12", "collector.group_size=8", "evaluate.num_prompts=128")
    more += ("optim.schedule=linear",)
    # At twice the rate a run in a dozen forgets the token that ends a turn, and all reward with it.
    slower = ("optim.learning_rate=1e-3", "name=streams")
    learnt = run("grpo", *HALF_TRAINED, *more, *slower)
    assert metric(learnt, "ledger/staleness/mean")[-1] > 0
    assert abs(learnt["held_out_before"] - GUESSING) < 0.15
    assert learnt["held_out_after"] > 0.7  # 0.78 to 0.91 in 12 runs: the groups' order varies
    control = run("grpo", "experiment=control", *HALF_TRAINED, *more)
    assert metric(control, "ledger/staleness/mean")[-1] > 0
    assert control["held_out_after"] < 0.55


@pytest.mark.slow
def test_fine_tuning_that_is_killed_goes_on_to_the_bit(run, folder):
    more = ("train.num_steps=9", "data.num_held_out=48", "policy.max_new_tokens=4")
    more += ("checkpoint.every=2", "train.batch_size=8")
    script = ROOT / "sota-implementations/sft/sft.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *TASK, *FAST, *more, "name=cut"]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("sft step 5/"):
                break
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    cut = run("sft", *more, "name=cut", "resume=auto")
    whole = run("sft", *more, "name=whole")
    assert cut["output_dir"].endswith("cut-001")
    for name in ("loss", "grad_norm", "learning_rate"):
        assert metric(cut, name) == metric(whole, name)
    assert len(metric(whole, "loss")) == 9
    assert cut["held_out_nll"] == whole["held_out_nll"]
    weights = "model/model.safetensors"
    cut_bytes, whole_bytes = (
        (Path(each["output_dir"]) / weights).read_bytes() for each in (cut, whole)
    )
    assert cut_bytes == whole_bytes

"""Recipes on rows in a file: is a number odd?

Fine-tuning learns it, and its control learns the format and guesses. Expert iteration and
distillation go on from the model that guesses.
"""

import json
from pathlib import Path

import pytest

FAST = ("logger=none", "evaluate.num_shown=0", "evaluate.num_prompts=48", "engine=transformers")
GUESSING = 0.55
"""Half of the answers are right, and the others get 0.1 for their format."""
FROM_GUESSES = (
    *("policy.model=outputs/sft/gsm8k/control", "policy.max_new_tokens=24"),
    *(
        "policy.gradient_checkpointing=false",
        "optim.learning_rate=2e-3",
        "optim.num_warmup_steps=0",
    ),
    *("train.num_steps=2", "train.num_epochs=4", "collector.num_prompts=4"),
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
    task = ("task=gsm8k", "task.dataset=rows.jsonl", "task.system_prompt=null")
    return lambda name, *arguments: run_recipe(name, *task, *FAST, *arguments)


@pytest.mark.slow
def test_fine_tuning(run):
    common = ("train.num_steps=120", "data.num_held_out=48", "policy.max_new_tokens=24")
    learnt = run("sft", "name=learnt", *common)
    assert learnt["held_out_before"] < 0.1
    assert learnt["held_out_after"] > 0.9
    assert learnt["held_out_nll"] < 0.05
    control = run("sft", "experiment=control", *common)
    assert abs(control["held_out_after"] - GUESSING) < 0.2
    assert control["held_out_nll"] > learnt["held_out_nll"] + 0.04  # a coin's 0.69 nats in a turn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("expert-iteration", ["collector.group_size=8", "train.top_k=4"]),
        ("distillation", ["collector.group_size=4", "teacher.model=outputs/sft/gsm8k/learnt"]),
    ],
)
def test_recipes_that_sample_train(recipe, more, run):
    if not Path("outputs/sft/gsm8k/learnt").exists():
        pytest.skip("goes on from what test_fine_tuning leaves")
    result = run(recipe, *FROM_GUESSES, *more)
    assert result["steps"] == 2
    assert result["optimizer_steps"] > 0
    assert (Path(result["output_dir"]) / "model/model.safetensors").exists()

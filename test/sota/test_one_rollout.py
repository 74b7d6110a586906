"""One rollout a prompt: the reward rises without any group, and group estimators refuse it."""

import json
from statistics import fmean

import pytest

from torchrl_agents.explain import explain_run
from torchrl_modules.tiny_model import tiny_qwen3

MINE = """
def letters(completions, **_):
    return [sum(c.count(x) for x in "ae") / max(len(c), 1) for c in completions]
"""
OWN = (
    *("debug=tiny", "logger=none", "task.dataset=rows.jsonl", "task.rewards=mine:letters"),
    *("collector.num_prompts=16", "collector.group_size=1", "policy.max_new_tokens=16"),
    *("evaluate.num_prompts=4", "evaluate.num_shown=0", "checkpoint.every=null"),
    *("optim.num_warmup_steps=0", "optim.learning_rate=4e-3", "hydra.run.dir=run"),
)


@pytest.fixture
def run(run_script, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    rows = [{"prompt": f"What is {i}?", "answer": str(i)} for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    tiny_qwen3(1000).config.save_pretrained(tmp_path / "empty")

    def run(*arguments):
        return run_script(*OWN, *arguments, cwd=tmp_path)

    run.folder = tmp_path / "run"
    return run


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        pytest.param(["loss.advantage=batch_mean"], 14, id="batch mean", marks=pytest.mark.weekly),
        pytest.param(["loss.advantage=running_mean"], 14, id="running mean"),
        pytest.param(["loss.advantage=gae"], 14, id="a critic"),
        # On a busy machine the rollouts of the first steps all begin with the first weights.
        pytest.param(
            ["loss.advantage=batch_mean", "collector=streaming"],
            28,
            id="beside training",
            marks=pytest.mark.weekly,
        ),
    ],
)
def test_the_reward_rises_with_one_rollout_a_prompt(run, settings, steps):
    done = run(*settings, f"train.num_steps={steps}")
    assert done.returncode == 0, done.stderr
    assert "No signal" not in done.stderr
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(row["trained_rows"] == 16 for row in rows)
    first, last = (fmean(row["reward"] for row in part) for part in (rows[:3], rows[-3:]))
    assert last > 1.5 * first
    assert not explain_run(run.folder).findings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "goes with loss.advantage=batch_mean or running_mean of grpo"),
        (["loss.advantage=rloo"], "collector.group_size must be at least 2"),
        (["loss.advantage=batch_mean", "collector.refill=true"], "has no groups without a signal"),
        (["loss.advantage=running_mean", "loss.length_penalty=0.1"], "compares the outputs"),
        (["loss.advantage=running_mean", "loss.advantage_scale=batch"], "scale has no effect"),
        (["loss.advantage=batch_mean", "loss.advantage_scale=tokens"], "scale"),
        (
            ["loss.advantage=batch_mean", "critic.lmbda=0.9"],
            "critic.lmbda is for loss.advantage=gae, got batch_mean",
        ),
        (["loss.advantage=gae", "loss.credit=turn"], "loss.credit=turn does not go with"),
        (["loss.advantage=gae", "collector.refill=true"], "has no groups without a signal"),
        (["loss.advantage=gae", "critic.gamma=1.1"], "critic.gamma"),
        (["loss.advantage=gae", "critic.model=nowhere/at/all"], "There is no file or folder"),
        (["loss.advantage=gae", "critic.model=empty"], "its folder has no model.safetensors or"),
    ],
)
def test_what_can_not_take_effect_is_refused(run, settings, words):
    done = run(*settings)
    assert done.returncode == 1
    assert words in done.stderr

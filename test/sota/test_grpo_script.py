"""The training script as a user runs it: a command, files, and one JSON object at the end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "sota-implementations" / "grpo" / "grpo.py"
SMALL = [
    "warm_start.num_steps=2",
    "train.num_steps=2",
    "train.num_prompts=2",
    "train.group_size=2",
    "evaluate.num_prompts=8",
]


def run_script(*overrides: str, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *overrides, f"hydra.run.dir={out}"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=SCRIPT.parents[2],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"},
    )


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_a_run_leaves_its_result_and_its_files(tmp_path: Path) -> None:
    result = last_json(run_script(*SMALL, out=tmp_path))
    assert {"held_out_before", "held_out_after", "steps", "seconds"} <= result.keys()
    assert result["steps"] == 2
    rollouts = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rollouts] == [1] * 4 + [2] * 4
    assert [r["group_id"] for r in rollouts[:4]] == [0, 0, 1, 1]
    assert [r["policy_version"] for r in rollouts] == [1] * 4 + [2] * 4
    assert all(r["messages"][1]["role"] == "assistant" for r in rollouts)
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "csv/scalars/reward.csv").read_text().count("\n") == 2
    assert list(tmp_path.glob("tensorboard/events*"))
    # The model directory is one like any other: train it further.
    again = last_json(
        run_script(
            *SMALL[1:],
            f"policy.model={tmp_path / 'model'}",
            "policy.show_tool_schemas=false",
            "policy.max_new_tokens=8",
            out=tmp_path / "again",
        )
    )
    assert again["steps"] == 2


@pytest.mark.slow
@pytest.mark.vllm
def test_the_vllm_engine_trains_too(tmp_path: Path) -> None:
    result = last_json(run_script(*SMALL, "engine=vllm", out=tmp_path))
    assert result["steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("task", ["echo", "wordle", "catch", "multi_env"])
def test_a_game_trains(task: str, tmp_path: Path) -> None:
    result = last_json(run_script(*SMALL, f"task={task}", "train.num_steps=1", out=tmp_path))
    assert result["task"] == task
    rollouts = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 4
    assert all(r["messages"][-1]["content"] for r in rollouts)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(["train.num_setps=3"], "num_setps", id="misspelt setting"),
        pytest.param(["engine=vlllm"], "engine", id="misspelt engine"),
        pytest.param(["train.group_size=two"], "group_size", id="wrong type"),
        pytest.param(["task=spell_bakward"], "There is no task 'spell_bakward'", id="unknown task"),
        pytest.param(["train.micro_batch_tokens=0"], "micro_batch_tokens", id="no tokens"),
    ],
)
def test_a_wrong_setting_fails_before_a_model_is_built(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    done = run_script(*overrides, out=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / "model").exists()

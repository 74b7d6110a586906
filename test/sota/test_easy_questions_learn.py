"""The embedded model learns a generator of reasoning-gym by its name alone, as the README says."""

import pytest


@pytest.mark.slow
def test_easy_questions_are_learnt(run_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run_recipe(
        *("grpo", "task=rotate_matrix", "warm_start.num_steps=320", "train.num_steps=10"),
        *("evaluate.num_prompts=128", "logger=none", "evaluate.num_shown=0"),
        *("checkpoint.every=null", "record.every=10", "task.num_rows=4096"),
    )
    assert result["held_out_before"] < 0.45
    assert result["held_out_after"] > result["held_out_before"] + 0.2
    assert "level: easy" in (tmp_path / "outputs/grpo/rotate_matrix/seed0/config.yaml").read_text()

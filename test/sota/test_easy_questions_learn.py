"""The embedded model learns a generator of reasoning-gym by its name alone, as the README says.

Its control, whose rewards are dealt out at random, does not.
"""

import pytest


@pytest.mark.weekly
def test_easy_questions_are_learnt(run_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    common = (
        *("task=rotate_matrix", "warm_start.num_steps=320", "logger=none"),
        *("evaluate.num_prompts=128", "evaluate.num_shown=0"),
        *("checkpoint.every=null", "record.every=10", "task.num_rows=4096"),
    )
    result = run_recipe("grpo", *common, "train.num_steps=10")
    assert result["held_out_before"] < 0.45
    assert result["held_out_after"] > 0.7
    assert "level: easy" in (tmp_path / "outputs/grpo/rotate_matrix/seed0/config.yaml").read_text()
    control = run_recipe("grpo", "experiment=control", *common, "train.num_steps=5")
    assert control["held_out_before"] == result["held_out_before"]
    assert control["held_out_after"] < 0.45

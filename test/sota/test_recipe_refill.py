"""Groups without a signal are refilled in the recipes that compare groups."""

import json

import pytest

from collectors.record import RunRecord

MINE = """
def sparse(completions, answer, **_):
    return [float(i % 2 and int(a) % 4 == 0) for i, a in enumerate(answer)]
"""
"""Of four prompts in a row one has a signal: 0, 4, 8, ..."""
OWN = (
    *("debug=tiny", "logger=none", "task.dataset=rows.jsonl", "task.rewards=mine:sparse"),
    *("collector.num_prompts=4", "collector.group_size=4", "policy.max_new_tokens=4"),
    *("evaluate.num_prompts=4", "evaluate.num_shown=0", "checkpoint.every=null"),
    "hydra.run.dir=run",
)


@pytest.fixture
def run(run_script, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    rows = [{"prompt": f"What is {i}?", "answer": str(i)} for i in range(128)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def run(*arguments, name="grpo"):
        return run_script(*OWN, *arguments, cwd=tmp_path, name=name)

    run.folder = tmp_path / "run"
    return run


@pytest.mark.parametrize(
    ("name", "mode", "num_trained"),
    [
        pytest.param("grpo", "sync", 16, id="grpo: all rows of four groups"),
        pytest.param("grpo", "streaming", 16, id="grpo beside training"),
        pytest.param("expert-iteration", "sync", 4, id="expert iteration: the best of four groups"),
        pytest.param("online-dpo", "sync", 8, id="online DPO: a pair of each of four groups"),
        pytest.param("online-dpo", "streaming", 8, id="online DPO beside training"),
    ],
)
def test_every_step_trains_a_full_batch_of_groups(run, name, mode, num_trained):
    more = ["train.top_k=1"] if name == "expert-iteration" else []
    done = run("collector.refill=true", f"collector={mode}", *more, name=name)
    assert done.returncode == 0, done.stderr
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["trained_rows"] for line in lines] == [num_trained] * 2
    for step in RunRecord(run.folder).steps:
        with_signal = [group for group in step.groups if len(set(group.rewards)) > 1]
        assert len(with_signal) == 4
        if mode == "sync":  # those that were refused are recorded, too
            assert len(step.groups) > 4


def test_without_it_a_step_trains_what_has_a_signal(run):
    assert run().returncode == 0
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["trained_rows"] < 16 for line in lines)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("grpo", ["collector.refill=true", "collector.max_draws=0"], "max_draws must be"),
        ("grpo", ["collector.max_draws=4"], "max_draws is for collector.refill=true"),
        ("grpo", ["collector.refill=true", "train.shuffle_rewards=true"], "take one of them"),
        ("self-play", ["collector.refill=true"], "self_play has no groups without a signal"),
    ],
)
def test_what_can_not_take_effect_is_refused(run_script, tmp_path, name, settings, words):
    done = run_script("debug=tiny", *settings, cwd=tmp_path, name=name)
    assert done.returncode == 1
    assert words in done.stderr
    assert not list(tmp_path.glob("outputs/*/*/*"))

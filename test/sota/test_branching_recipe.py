"""Rollouts that branch, from the command line."""

import json

import pytest

from collectors.record import RunRecord

MINE = """
def user(questions):
    return ["More."] * len(questions)

def length(completions, **_):
    return [float(len(str(text)) % 7) for text in completions]

def last(turns):
    return [0.0] * (len(turns) - 1) + [1.0]
"""
OWN = (
    *("debug=tiny", "logger=none", "task.dataset=rows.jsonl", "task.rewards=mine:length"),
    *("task.user=mine:user", "task.max_turns=4", "policy.max_new_tokens=40"),
    *("policy.stop=[a,e,o,i]", "collector.num_prompts=2", "collector.group_size=4"),
    *("evaluate.num_prompts=4", "evaluate.num_shown=0", "checkpoint.every=null"),
    "hydra.run.dir=run",
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    rows = [{"prompt": f"What is {i}?", "scenario": "You ask."} for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def test_half_of_each_group_leaves_the_other_at_its_last_turn(run_script, folder):
    tree = ("collector.num_roots=2", "collector.branch_at=mine:last", "loss.credit=tree")
    done = run_script(*OWN, *tree, cwd=folder, name="grpo")
    assert done.returncode == 0, done.stderr
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    for metrics in map(json.loads, lines):
        assert (metrics["branches/fraction"], metrics["turns"]) == (0.5, 4.0)
        assert metrics["branches/tokens"] > 0
    record = RunRecord(folder / "run")
    for step in record.steps:
        for group in step.groups:
            recorded = record.samples(step.step)
            samples = [sample for sample in recorded if sample.group_id == group.group_id]
            assert [sample.branched_from for sample in samples] == [-1, -1, 0, 1]
            for sample in samples[2:]:
                left = samples[sample.branched_from]
                size = sample.branched_tokens
                assert sample.tokens.ids[:size] == left.tokens.ids[:size]
                assert sample.place == f"branch of rollout {left.index} at token {size}"
                assert sum(value is not None for value in sample.tokens.log_probs[:size]) == 0
                assert left.sampled_tokens > sample.sampled_tokens


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("grpo", ["loss.credit=tree"], "loss.credit=tree is for rollouts that branch"),
        ("grpo", ["collector.branch_at=surprise"], "is for collector.num_roots: set it"),
        ("grpo", ["collector.num_roots=4"], "leaves no rollout that branches"),
        (
            "grpo",
            ["collector.num_roots=2", "collector=streaming", "collector.max_staleness=0"],
            "Take collector.mode=sync",
        ),
        ("grpo", ["collector.num_roots=2", "task.max_turns=1"], "ends every episode after one"),
        ("grpo", ["collector.num_roots=2", "collector.branch_at=entropy"], "must be one of"),
        ("expert-iteration", ["collector.num_roots=2"], "trains whole rollouts"),
    ],
)
def test_what_can_not_take_effect_is_refused(run_script, folder, name, settings, words):
    done = run_script(*OWN, *settings, cwd=folder, name=name)
    assert done.returncode == 1
    assert words in done.stderr
    assert not (folder / "run/metrics.jsonl").exists()

"""Tasks of others' data, games and servers by the script's command: two steps, and the rewards."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pages_for_tests import call, save_actor

from collectors.record import RunRecord

FAST = ("debug=tiny", "logger=none", "evaluate.num_prompts=2")
FAST += ("collector.num_prompts=2", "collector.group_size=8", "policy.show_tool_schemas=false")


@pytest.fixture
def samples_of(run_script, tmp_path):
    """Runs a task with a policy that says one of some texts; gives each text's rewards."""

    def run(actions, *words):
        save_actor(tmp_path / "model", actions)
        told = [*words, *FAST, f"policy.model={tmp_path}/model", "policy.max_new_tokens=24"]
        done = run_script(*told, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        record = RunRecord(json.loads(done.stdout.strip().splitlines()[-1])["output_dir"])
        samples = [sample for step in record.steps for sample in record.samples(step.step)]
        assert len(samples) == 2 * 2 * 8
        return samples

    return run


def said(sample):
    """What the policy said first."""
    return next(m["content"] for m in sample.messages if m["role"] == "assistant")


def write_questions(folder):
    columns = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    rows = [{"key": n, "prompt": f"{n}. Use no comma.", **columns} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_ifeval(samples_of, tmp_path):
    """Four accuracies of 1 and a block's 0.1, or that alone."""
    write_questions(tmp_path)
    right, wrong = "<answer>well</answer>", "<answer>well, no, or</answer>"
    found = samples_of([right, wrong], "task=ifeval", "task.dataset=rows.jsonl")
    scored = {(said(s), round(s.reward, 6)) for s in found if said(s) in (right, wrong)}
    assert scored == {(right, 1.1), (wrong, 0.1)}


def test_a_warm_start_that_is_asked_for_needs_demonstrations(run_script, tmp_path):
    """That of ``debug=tiny``, which the other tests here run with, is for tasks that have some."""
    write_questions(tmp_path)
    words = (*FAST, "task=ifeval", "task.dataset=rows.jsonl", "warm_start.num_steps=2")
    done = run_script(*words, "dry_run=true", cwd=tmp_path)
    assert done.returncode != 0
    assert "task=ifeval: it has no demonstrations: set warm_start.num_steps=0" in done.stderr


def test_openenv(samples_of, servers):
    """The server pays a tenth for each letter."""
    short, long = (call("echo", message=text) for text in ("ab", "abcdefg"))
    words = ("task=openenv", f"task.base_url={servers}/echo", "task.max_turns=1")
    found = samples_of([short, long], *words)
    scored = {(said(s), round(s.reward, 6)) for s in found if said(s) in (short, long)}
    assert scored == {(short, 0.2), (long, 0.7)}


def test_textarena(samples_of):
    """A guess is right or not; the second move that is none ends the game."""
    moves = [call("act", action=move) for move in ("[7]", "[x]")]
    found = samples_of(moves, "task=textarena/GuessTheNumber-v0", "collector.max_turns=2")
    ends = []
    for sample in found:
        told = [m["content"] for m in sample.messages if m["role"] == "tool"]
        assert sample.reward == float(any("Congratulations" in text for text in told))
        ends += [text for text in told[1:] if "invalid move" in told[0] and "[x]" not in text]
    assert "The game is over. Invalid Move" in " ".join(ends)


def test_a_run_allows_as_many_failing_rewards_as_it_is_told(run_script, tmp_path):
    """The rewards of half of the prompts fail."""
    rows = [{"prompt": f"Say {n}.", "number": n % 2} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "scores.py").write_text(
        "def inverse(completions, number, **_):\n    return [1 / n for n in number]\n"
    )
    words = ("task.dataset=rows.jsonl", "task.rewards=scores:inverse", "evaluate.num_prompts=1")
    words += ("train.num_steps=4", "policy.max_new_tokens=2", "collector.max_turns=1")
    stopped = run_script(*FAST, *words, cwd=tmp_path)
    assert stopped.returncode == 1
    assert "5% of 200 are allowed" in stopped.stderr
    assert "collector.max_error_fraction= of a recipe" in stopped.stderr
    allowed = run_script(*FAST, *words, "collector.max_error_fraction=0.9", cwd=tmp_path)
    assert allowed.returncode == 0, allowed.stderr[-2000:]
    refused = run_script(*FAST, *words, "collector.max_error_fraction=1.5", cwd=tmp_path)
    assert "collector.max_error_fraction must be in [0, 1], got 1.5" in refused.stderr

"""The recipe of labelled answers: which rows it takes, and which it can learn nothing from."""

import json

import pytest

OWN = (
    *("debug=tiny", "logger=none", "dry_run=true", "task=spell_backward", "task.num_rows=64"),
    *("data.dataset=labels.jsonl", "data.num_held_out=4", "evaluate.num_prompts=4"),
)


@pytest.fixture
def done(run_script, tmp_path):
    """Run the recipe on some rows."""

    def run(rows, *more):
        (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return run_script(*OWN, *more, cwd=tmp_path, name="kto")

    return run


def test_rows_with_labels_and_pairs(done):
    rows = [{"prompt": f"{n}?", "completion": "Yes.", "label": n % 2 == 0} for n in range(9)]
    pair = {"prompt": "10?", "chosen": "Yes.", "rejected": "No."}
    taken = done([*rows, pair])
    assert taken.returncode == 0, taken.stderr
    assert "7 labelled answers to train on, 4 held out" in taken.stdout
    bad = [rows[0] | {"label": "good"}, rows[1] | {"completion": "no " * 5000}]
    refused = done([*rows, *bad])
    assert "row 9 has 'good' in 'label'" in refused.stderr.splitlines()[-1]
    left = done([*rows, *bad], "data.skip_bad_rows=true")
    assert left.returncode == 0, left.stderr
    assert "5 labelled answers to train on, 4 held out" in left.stdout


def test_what_nothing_can_be_learnt_from_is_refused_before_anything_is_loaded(done):
    rows = [{"prompt": f"{n}?", "completion": "Yes.", "label": n < 4} for n in range(9)]
    told = done(rows)
    assert told.returncode == 1
    assert "All 5 labelled answers to train on have the label false" in told.stderr
    same = [row | {"prompt": "Now?", "label": n % 2 == 0} for n, row in enumerate(rows)]
    told = done(same)
    assert told.returncode == 1
    assert "All 9 labelled answers are to the same prompt" in told.stderr
    assert done(same, "loss.loss_function=apo_zero_unpaired").returncode == 0
    told = done(same, "loss.desirable_weight=0")
    assert "desirable_weight must be positive, got 0.0" in told.stderr

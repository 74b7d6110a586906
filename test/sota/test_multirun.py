"""Several runs, by one command or by several: what came of them."""

import json
from importlib import import_module
from pathlib import Path

import pytest


@pytest.mark.slow
def test_runs_of_one_command_are_told_in_a_table_and_a_file(run_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = ("debug=tiny", "logger=none", "evaluate.num_shown=0", "task.num_demonstrations=64")
    last = run_recipe("self-play", "--multirun", "seed=0,1", "task.largest=8", *tiny)
    (path,) = Path("outputs/self_play/multirun").glob("*/multirun.json")
    runs = json.loads(path.read_text())
    assert [run["seed"] for run in runs] == [0, 1]
    assert [run["overrides"][0] for run in runs] == ["seed=0", "seed=1"]
    assert runs[1].items() >= last.items()
    assert all((path.parent / str(number) / "metrics.jsonl").exists() for number in (0, 1))
    again = run_recipe("self-play", *tiny)
    assert again["seed"] == 0
    assert len(list(Path("outputs").rglob("multirun.json"))) == 1, "a single run writes none"


def a_run(folder, rewards, tested, **settings):
    """What a run leaves that is drawn, and the last line of its output."""
    folder.mkdir(parents=True)
    tests = [{"step": 2 * i, "reward": reward} for i, reward in enumerate(tested)]
    tests.insert(1, {"step": 1, "skipped": "the one before had not ended"})
    files = {
        "metrics.jsonl": rewards,
        "evaluations.jsonl": tests,
        "run.json": [{"settings": settings}],
    }
    for name, lines in files.items():
        (folder / name).write_text("\n".join(map(json.dumps, lines)))
    ends = {"held_out_before": tested[0], "held_out_after": tested[-1]}
    return {"task": "nim", "seed": 0, "steps": 4, "output_dir": str(folder), **ends}


def test_curves_of_several_runs_are_drawn_by_what_they_have(script, tmp_path, capsys, monkeypatch):
    script("grpo")
    curves = import_module("curves")
    figures = []
    monkeypatch.setattr(curves.plt, "close", figures.append)
    steps = [{"reward": 0.0}, {"reward": None}, {"reward": 0.5}, {"reward": 1.0}]
    results = [
        a_run(tmp_path / "grpo/nim/seed0", steps, [0.25, 0.75]),
        a_run(tmp_path / "grpo/nim/seed1", steps, [0.25, 0.25]),
        a_run(
            tmp_path / "grpo/nim/control",
            steps * curves.SMOOTHED_FROM,
            [0.25, 0.0],
            **{"train.shuffle_rewards": True},
        ),
        a_run(
            tmp_path / "sft/nim/seed0", [{"loss": 1.0}] * 4, [0, 0.5, 1], **{"task.level": "own"}
        ),
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, results)))
    curves.main(str(tmp_path / "results.jsonl"), str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "| nim | 0 | 0.25 | 0.75 | 4 |" in capsys.readouterr().out
    ((learnt, control),) = [figure.axes for figure in figures]
    assert [axes.get_title() for axes in (learnt, control)] == [
        "nim: 0.17 to 0.67",
        "nim, control: 0.25 to 0.00",
    ]
    rollouts, smooth, points = control.lines
    assert list(rollouts.get_ydata()[[0, 2, 3]]) == [0.0, 0.5, 1.0]
    assert len(smooth.get_ydata()) == 4 * curves.SMOOTHED_FROM
    assert points.get_xydata().tolist() == [[0, 0.25], [2, 0.0]]
    assert points.get_linestyle() == "None"
    short, _, _, _, no_rollouts, tested = learnt.lines
    assert list(short.get_ydata()[[0, 2, 3]]) == [0.0, 0.5, 1.0]
    assert not len(no_rollouts.get_ydata())
    assert tested.get_ydata().tolist() == [0, 0.5, 1]
    assert tested.get_linestyle() == "-"
    several = {"before/a/reward": 0.1, "before/b/reward": 0.2, "before/b/turns": 1.0}
    assert curves.parts_of(several) == ["a/", "b/"]
    assert curves.rewards(tmp_path / "self_play/nim/seed0", "reward") == []

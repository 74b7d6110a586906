"""Several runs by one command: what came of them."""

import json
from pathlib import Path

import pytest

from torchrl_agents.run import claim_sweep_folder


@pytest.mark.slow
def test_runs_of_one_command_are_told_in_a_table_and_a_file(run_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = (
        "debug=tiny",
        "logger=none",
        "evaluate.num_shown=0",
        "task.num_demonstrations=64",
        "task.num_rows=64",
    )
    last = run_recipe("self-play", "--multirun", "seed=0,1", "task.largest=8", *tiny)
    (path,) = Path("outputs/self_play/multirun").glob("*/multirun.json")
    runs = json.loads(path.read_text())
    assert [run["seed"] for run in runs] == [0, 1]
    assert [run["overrides"][0] for run in runs] == ["seed=0", "seed=1"]
    assert runs[1].items() >= last.items()
    assert all((path.parent / str(number) / "metrics.jsonl").exists() for number in (0, 1))
    on = run_recipe("self-play", f"resume={path.parent / '0'}", "train.num_steps=3")
    assert (on["seed"], on["steps"]) == (0, 3)
    assert Path(on["output_dir"]).resolve() == (path.parent / "0").resolve()
    again = run_recipe("self-play", *tiny)
    assert again["seed"] == 0
    assert len(list(Path("outputs").rglob("multirun.json"))) == 1, "a single run writes none"
    assert len(list(path.parent.parent.iterdir())) == 1


def test_sweeps_that_begin_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchrl_agents.run.time.strftime", lambda _: "now")
    folders = []
    for _ in range(3):
        claim_sweep_folder.cache_clear()  # as in a process of its own
        folders.append(claim_sweep_folder("grpo"))
        assert claim_sweep_folder("grpo") == folders[-1], "each of its runs asks"
    assert folders == [f"outputs/grpo/multirun/{name}" for name in ("now", "now-2", "now-3")]
    Path("outputs/sft").touch()
    with pytest.raises(SystemExit, match=r"sft.py: no folder .* folder with hydra.sweep.dir=\."):
        claim_sweep_folder("sft")

"""A run of the script that is killed goes on; which run that is, and with which settings."""

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchrl.record.loggers.tensorboard import TensorboardLogger

sys.path.insert(0, str(Path(__file__).parent))

from broken_off_runs import KILLED, RUN_IT, STOPPED_INSIDE_A_STEP, metrics_of

from torchrl_agents.found_run import check_same_settings, find_run, plain_settings
from torchrl_agents.recorder import Recorder, lines_until
from torchrl_agents.run import Run
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.recorded_arguments import read_record, with_recorded
from torchrl_agents.settings.schema import TrainingConfig

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "sota-implementations" / "grpo" / "grpo.py"
COMMAND = [
    *("debug=tiny", "task=number_guessing", "evaluate.num_shown=0"),
    *("warm_start.num_steps=30", "collector.num_prompts=8", "collector.group_size=4"),
    *("train.num_steps=4", "checkpoint.every=1"),
]


@pytest.mark.slow
def test_S05_after_a_stop_inside_a_step_and_kill_9_a_run_ends_as_it_would_have(
    run_script, forks, tmp_path
):
    def run(*more):
        done = run_script(*COMMAND, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        return Path(json.loads(done.stdout.strip().splitlines()[-1])["output_dir"])

    def broken_off(program, *more):
        (tmp_path / "broken_off.py").write_text(program + RUN_IT)
        return forks(["broken_off.py", SCRIPT, *COMMAND, *more], tmp_path, dict(os.environ))

    whole = run("name=whole")
    done = broken_off(STOPPED_INSIDE_A_STEP, "name=cut")
    assert done.returncode == 128 + signal.SIGTERM, done.stderr[-3000:]
    assert "stopped after step" in done.stderr
    done = broken_off(KILLED, "name=cut", "resume=auto")
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    cut = run("name=cut", "resume=auto")
    assert cut.name == "cut-001"
    assert metrics_of(cut) == metrics_of(whole)
    assert sum(step["optimizer_steps"] for step in metrics_of(whole)) > 4
    weights = "model/model.safetensors"
    assert (cut / weights).read_bytes() == (whole / weights).read_bytes()
    assert (cut / "csv/scalars/reward.csv").read_text() == (
        whole / "csv/scalars/reward.csv"
    ).read_text()


def settings(**changes):
    known = {"seed": 0, "resume": None, "train": {"num_steps": 10, "num_epochs": 4}}
    return plain_settings(OmegaConf.merge(known, changes))  # type: ignore[arg-type]


def write_run(folder, status="interrupted", **changes):
    (folder / "checkpoints/step-00000001.save-00001").mkdir(parents=True)
    record = {
        "status": status,
        "settings": settings(**changes),
        "command": ["grpo.py", "task=catch", "seed=3", "overwrite=true"],
    }
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_auto_finds_the_newest_run_of_the_same_settings_that_has_not_ended(tmp_path, caplog):
    runs = [
        write_run(tmp_path / "1"),
        write_run(tmp_path / "2", train={"num_steps": 99}),  # longer or shorter: the same run
        write_run(tmp_path / "3", status="finished"),
        write_run(tmp_path / "4", seed=1),
        write_run(tmp_path / "5"),
    ]
    # It was killed while it wrote its first checkpoint.
    (runs[4] / "checkpoints/step-00000001.save-00001").rename(runs[4] / "checkpoints/.staging")
    assert find_run(runs, settings()) == runs[1]
    assert find_run(runs, settings(seed=1)) == runs[3]
    assert not caplog.messages
    assert find_run(runs, settings(seed=2)) is None
    (told,) = caplog.messages  # of the newest that is not finished
    assert told.startswith("resume=auto begins a new run, for the last one can't go on. resume=")
    assert f"{runs[3]}: a run goes on with its own settings, and seed was 1 and is 2." in told


def test_a_run_with_other_settings_is_refused_and_the_version_that_began_it_is_told(tmp_path):
    folder = write_run(tmp_path / "1", train={"new": 1})
    record = json.loads((folder / "run.json").read_text()) | {"commit": "ab26e1c"}
    record["settings"]["collector.num_collectors"] = 2  # may be others now
    (folder / "run.json").write_text(json.dumps(record))
    told = r"train\.new was 1 and is None\. Leave them out .*1/config\.yaml, .*commit ab26e1c\."
    with pytest.raises(SettingsError, match=told):
        check_same_settings(folder, settings(collector={"num_collectors": 1}))


def test_a_run_without_a_checkpoint_does_not_go_on_as_if_it_had_been_prepared(tmp_path):
    folder = write_run(tmp_path / "1")
    (folder / "checkpoints/step-00000001.save-00001").rmdir()
    with pytest.raises(SettingsError, match="stopped before its first checkpoint"):
        Run(folder, settings=settings(), overwrite=False, resume=True)


def test_the_record_of_a_run_can_be_read_whenever_it_is_killed(tmp_path, monkeypatch):
    """The number of the change of the disk after which the process is gone."""
    seen = []

    def read_after(change):
        def changed(*args):
            result = change(*args)
            seen.append(read_record(tmp_path)["status"])
            return result

        return changed

    with Run(tmp_path, settings=settings(), overwrite=False) as run:
        for name in ("pwrite", "ftruncate"):
            monkeypatch.setattr(os, name, read_after(getattr(os, name)))
        for status in ("interrupted", "checked"):  # a longer and a shorter text
            run.set_status(status)
        assert (tmp_path / "run.json").read_text() == json.dumps(run.record, indent=2)
    assert seen == ["interrupted", "interrupted", "checked", "checked"]


def test_a_run_that_goes_on_says_which_files_have_changed_since_it_began(
    tmp_path, monkeypatch, caplog
):
    """Of a module of the user's, one that did not change, and the data that a setting names."""
    (tmp_path / "checkpoints/step-00000001.save-00001").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mine_one", "mine_two"):
        (tmp_path / f"{name}.py").write_text("answer = 1\n")
        importlib.import_module(name)
    Path("rows.jsonl").write_text("{}\n")
    known = settings(task={"dataset": "rows.jsonl"})
    with Run(tmp_path, settings=known, overwrite=False) as run:
        run.note_files()
    for changed in ([], ["mine_one", "task.dataset=rows.jsonl"]):
        for name in changed and ("mine_one.py", "rows.jsonl"):
            Path(name).write_text("answer = 2\n")
        with Run(tmp_path, settings=known, overwrite=False, resume=True) as run:
            run.note_files()
        assert read_record(tmp_path)["resumed"][-1].get("changed", []) == changed
        assert ("are used as they are now: " + ", ".join(changed) in caplog.text) == bool(changed)
    assert not [name for name in read_record(tmp_path)["files"] if name in ("json", "torch")]


@pytest.mark.filterwarnings("ignore")  # TensorBoard's own
def test_tensorboard_shows_a_step_once_after_a_kill(tmp_path):
    """Of a run that was saved after its first step, and killed after its third."""

    def write(after, rewards):
        logger = TensorboardLogger("tensorboard", str(tmp_path))
        run = SimpleNamespace(loggers=[logger], folder=tmp_path)
        parts: Any = (run, SimpleNamespace(score_name="reward"))
        recorder = Recorder(TrainingConfig(), *parts, None, None, after=after)
        for step, reward in rewards.items():
            recorder.write(step, {"reward": reward}, None, None)
        recorder.close()
        logger.close()

    write(-1, {1: 1.0, 2: 2.0, 3: 3.0})
    write(1, {2: 4.0, 3: 5.0, 4: 6.0})
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    found = [(event.step, event.value) for event in shown.Scalars("reward")]
    assert found == [(1, 1.0), (2, 4.0), (3, 5.0), (4, 6.0)]


@pytest.mark.parametrize(
    ("before", "error", "after"),
    [
        pytest.param("finished", SettingsError, "finished", id="refused: it is as it was"),
        pytest.param("interrupted", SettingsError, "failed", id="refused, and not at its end"),
        pytest.param("finished", ValueError, "failed", id="broken off while it went on"),
        pytest.param("finished", SystemExit, "interrupted", id="stopped while it went on"),
    ],
)
def test_a_finished_run_that_can_not_go_on_is_still_finished(before, error, after, tmp_path):
    folder = write_run(tmp_path / "1", status=before)
    run = Run(folder, settings=settings(), overwrite=False, resume=True)
    assert read_record(folder)["status"] == "running"
    run.__exit__(error)
    assert read_record(folder)["status"] == after


def test_a_run_goes_on_with_its_own_settings(tmp_path):
    folder = write_run(tmp_path / "1")
    check_same_settings(folder, settings(train={"num_steps": 99}, resume="auto"))
    with pytest.raises(SettingsError, match=r"train.num_epochs was 4 and is 1. Leave them out"):
        check_same_settings(folder, settings(train={"num_epochs": 1}))
    again = with_recorded([f"resume={folder}", "train.num_steps=99"])
    assert again == ["task=catch", "seed=3", f"resume={folder}", "train.num_steps=99"]
    assert with_recorded(["seed=1", "resume=auto"]) == ["seed=1", "resume=auto"]
    with pytest.raises(SettingsError, match="it holds no run"):
        with_recorded([f"resume={tmp_path}"])


def test_a_folder_of_any_layout_goes_on_with_any_number_of_ranks(tmp_path, monkeypatch):
    shards = ["train.parallel=fsdp2", "train.num_replicas=2", "train.reduce=step"]
    (tmp_path / "run.json").write_text(json.dumps({"command": ["grpo.py", "seed=3", *shards]}))
    resume = f"resume={tmp_path}"
    assert with_recorded([resume]) == ["seed=3", resume]
    assert with_recorded([resume, "train.parallel=ddp"]) == ["seed=3", resume, "train.parallel=ddp"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert with_recorded([resume]) == ["seed=3", *shards, resume]


def test_lines_after_the_last_checkpoint_are_dropped_and_torn_ones_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    assert lines_until(path, 2) == [{"step": 1}, {"step": 2}]
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'

"""Runs in real trackers: each is one of its own, goes on, and ends with the recipe's run."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlflow
import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchrl_agents.loggers import open_loggers
from torchrl_agents.settings.schema import LoggerConfig, TrainingConfig

pytestmark = [
    pytest.mark.slow,
    # MLflow's and Weights & Biases' own.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def opened(tmp_path):
    """Opens one tracker for a run."""

    def opened(backend, number):
        folder = tmp_path / f"seed{number}-001"
        folder.mkdir(exist_ok=True)
        settings = {"task.id": "nim", "seed": number}
        record = {"id": f"{number}" * 8, "settings": settings}
        run = SimpleNamespace(folder=folder, label=folder.name, record=record)
        cfg = replace(TrainingConfig(), logger=LoggerConfig(backends=[backend]))
        return open_loggers(cfg, run, "self_play")

    return opened


@pytest.fixture
def tracked(tmp_path, monkeypatch):
    """MLflow's client, of a store of its own, in whose folder its artifacts are, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    yield mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(None)


def runs_of(client, project):
    (experiment,) = [each for each in client.search_experiments() if each.name == project]
    runs = client.search_runs([experiment.experiment_id], order_by=["attribute.start_time"])
    return {run.info.run_name: run for run in runs}


def history_of(client, run, metric):
    return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, metric)]


def test_mlflow(opened, tracked):
    with opened("mlflow", 1) as (logger,):
        logger.log_metrics({"reward": 0.25, "rewards/win/mean": 0.5}, 1)
    with opened("mlflow", 1) as (logger,):
        logger.log_metrics({"reward": 0.75}, 2)
    with pytest.raises(ZeroDivisionError), opened("mlflow", 2) as (logger,):
        logger.log_metrics({"reward": 1 / 0}, 1)
    with pytest.raises(SystemExit), opened("mlflow", 3):
        raise SystemExit(130)
    runs = runs_of(tracked, "self_play")
    assert {name: run.info.status for name, run in runs.items()} == {
        "seed1-001": "FINISHED",
        "seed2-001": "FAILED",
        "seed3-001": "FINISHED",
    }
    first = runs["seed1-001"]
    assert history_of(tracked, first, "reward") == [(1, 0.25), (2, 0.75)]
    assert history_of(tracked, first, "rewards/win/mean") == [(1, 0.5)]
    assert first.data.params == {"task.id": "nim", "seed": "1"}


def test_wandb(opened, tmp_path, monkeypatch):
    """One run after the other in one process, as in --multirun: two runs."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for number in (1, 2, 1):
        with opened("wandb", number) as (logger,):
            logger.log_metrics({"reward": 0.5}, 1)
            assert logger.experiment.id == f"{number}" * 8
            assert logger.experiment.config["seed"] == 0
    for number, count in ((1, 2), (2, 1)):
        files = list(tmp_path.glob(f"seed{number}-001/wandb/offline-run-*/run-*.wandb"))
        assert [path.name for path in files] == [f"run-{number * 11111111}.wandb"] * count


TRACKIO = """
_run = None
runs = []

class Run:
    def __init__(self, given):
        self.given, self.told, self.ended = given, [], 0
        self.finish = finish
        print("* Created new run")

    def log(self, metrics, step):
        self.told.append((step, metrics))

def init(**given):
    global _run
    _run = Run(given)
    runs.append(_run)
    return _run

def finish():
    global _run
    if _run is None:
        raise RuntimeError("Call trackio.init() before trackio.finish().")
    _run.ended += 1
    print("* Run finished")
    _run = None
"""
"""What is used of Trackio, which asks for other versions of packages that are here."""


def test_trackio(opened, tmp_path, monkeypatch, capsys):
    """A run under a name of its own, ended once; what Trackio prints is no output of the recipe."""
    (tmp_path / "trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("trackio", "torchrl.record.loggers.trackio"):
        monkeypatch.setitem(sys.modules, name, None)  # so that what comes in its place goes, too
        del sys.modules[name]
    for number in (1, 2, 1):
        with opened("trackio", number) as (logger,):
            logger.log_metrics({"reward": 0.5}, 3)
    runs = sys.modules["trackio"].runs
    names = [(run.given["name"], run.given["project"], run.given["resume"]) for run in runs]
    assert names == [(f"seed{n}-001-{f'{n}' * 8}", "self_play", "allow") for n in (1, 2, 1)]
    assert [run.given["config"]["seed"] for run in runs] == [0, 0, 0]
    assert [(run.told, run.ended) for run in runs] == [([(3, {"reward": 0.5})], 1)] * 3
    told = capsys.readouterr()
    assert (told.out, told.err.count("* Run finished")) == ("", 3)


@pytest.mark.parametrize("debug", ["tiny", "dry_run"])
def test_a_tracker_that_wants_a_key_is_told_of_before_the_model_is_loaded(
    debug, run_script, tmp_path, monkeypatch
):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    own = {"NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path)}
    done = run_script(f"debug={debug}", "logger=wandb", cwd=tmp_path, **own)
    assert done.returncode == 1
    words = "grpo.py: logger.backends: wandb can't be opened: UsageError: No API key"
    assert words in done.stderr
    assert "loading the model" not in done.stderr


def test_what_a_run_tells_its_trackers(run_recipe, tracked, tmp_path, monkeypatch):
    """Curves, how the machine was used, and the first two conversations of each test."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    quick = (
        "debug=tiny",
        "warm_start.num_steps=2",
        "task.num_demonstrations=64",
        "task.num_rows=64",
    )
    quick += ("evaluate.num_prompts=4", "evaluate.num_shown=2", "evaluate.every=1")
    loggers = ("logger.backends=[mlflow,wandb,tensorboard,csv]", "logger.project=mine")
    result = run_recipe("grpo", *quick, *loggers, "name=told")
    ((name, run),) = runs_of(tracked, "mine").items()
    assert (name, run.info.status) == ("told-001", "FINISHED")
    assert [step for step, _ in history_of(tracked, run, "reward")] == [1, 2]
    held_out = history_of(tracked, run, "held_out/reward")
    assert [step for step, _ in held_out] == [0, 1, 2]
    assert (held_out[0][1], held_out[-1][1]) == (
        result["held_out_before"],
        result["held_out_after"],
    )
    assert run.data.params["task.id"] == "calculator"
    record = json.loads((Path(result["output_dir"]) / "run.json").read_text())
    assert run.data.tags["torchrl_agents.run"] == record["id"]
    for step, used in history_of(tracked, run, "system/process_memory_gib"):
        assert step in (1, 2)
        assert 0 < used < psutil.virtual_memory().total / 2**30
    assert len(history_of(tracked, run, "system/cpu_percent")) == 2

    columns = ["step", "conversation", "reward", "stop_reason"]
    assert Path(run.info.artifact_uri).is_relative_to(tmp_path)
    table = mlflow.load_table("held_out/samples.json", run_ids=[run.info.run_id])
    assert [*table.columns] == columns
    assert [*table["step"]] == [0, 0, 1, 1, 2, 2]
    assert table["conversation"].str.startswith("user: ").all()
    assert table["conversation"].str.contains("\n\nassistant: ").all()
    assert table["reward"].isin([0.0, 1.0]).all()
    folder = Path(result["output_dir"])
    shown = sorted(folder.glob("wandb/offline-run-*/files/media/table/held_out/samples_*.json"))
    tables = [json.loads(path.read_text()) for path in shown]
    assert [each["columns"] for each in tables] == [columns] * 3
    rows = sorted(row for each in tables for row in each["data"])
    assert rows == sorted([*row] for row in table.itertuples(index=False))
    events = EventAccumulator(str(next(folder.rglob("events.out.tfevents*")).parent)).Reload()
    texts = events.Tensors("held_out/samples/text_summary")
    assert [event.step for event in texts] == [0, 1, 2]
    for event in texts:
        (page,) = event.tensor_proto.string_val
        assert page.count(b"<tr") == 3
        assert b"assistant: " in page

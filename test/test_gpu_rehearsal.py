"""What is measured once on a GPU is rehearsed on a CPU, from beginning to end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks/gpu.py"
OFF_BY_ONE = """
import math, os, signal, time
import gpu

@gpu.scenario(limit_s=20)
def crashes(run):
    run.figure("before it", 4.0, "ms", 2.0)
    os.abort()

@gpu.scenario(limit_s=6)
def hangs(run):
    run.figure("before it", 1.0, "ms")
    time.sleep(1000)

@gpu.scenario(limit_s=20)
def raises(run):
    run.attempt("a part", lambda: 1 / 0)
    run.check("not a number", math.nan, 1.0)
    run.check("too far", 2.0, 1.0)
    run.check("near enough", 0.5, 1.0)
    gpu._needs("a_package_that_nobody_has")

@gpu.scenario(limit_s=20)
def exits(run):
    raise SystemExit("the driver is too old")

@gpu.scenario(limit_s=20)
def works(run):
    run.holds("it ran after them", run.rates["float32"] > 0)

gpu.main()
"""


def measure(script, folder, *arguments):
    """Its status, what it printed, and its rows by scenario and name."""
    command = [sys.executable, str(script), "--device", "cpu", "--tiny", "--folder", str(folder)]
    path = os.pathsep.join([str(ROOT / "benchmarks"), os.environ["PYTHONPATH"]])
    ended = subprocess.run(
        [*command, *arguments],
        cwd=folder.parent,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    rows = json.loads((folder / "gpu.json").read_text())["rows"]
    assert len(rows) == len({(row["scenario"], row["what"]) for row in rows})
    by_name = {(row["scenario"], row["what"]): row for row in rows}
    return ended.returncode, ended.stdout + ended.stderr, by_name


def test_a_scenario_that_fails_is_told_and_stops_no_other(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(OFF_BY_ONE)
    names = ("crashes", "hangs", "raises", "exits", "works")
    status, printed, rows = measure(script, tmp_path / "found", "--only", ",".join(names))
    assert status == 1
    notes = {name: rows[name, "ended"]["note"] for name in names}
    assert notes == {
        "crashes": "it was ended by SIGABRT",
        "hangs": "it was ended after its limit of 6 s",
        "raises": "",
        "exits": "the driver is too old",
        "works": "",
    }
    assert rows["crashes", "before it"]["value"] == 4.0
    assert rows["hangs", "before it"]["value"] == 1.0
    assert "before it                                             4 ms / 2 = 2.00" in printed
    assert rows["raises", "a part"]["note"] == "ZeroDivisionError: division by zero"
    assert rows["raises", "raises"]["note"] == "not installed"
    found = {
        what: row["ok"] for (name, what), row in rows.items() if name == "raises" and "ok" in row
    }
    assert found == {
        "a part": False, "not a number": False, "too far": False, "near enough": True, "ended": True
    }  # fmt: skip
    assert rows["works", "it ran after them"]["ok"]


def test_time_that_is_over_is_told(tmp_path):
    arguments = ("--only", "losses,push", "--total-s", "0")
    status, _, rows = measure(SCRIPT, tmp_path / "found", *arguments)
    assert status == 1
    told = {"machine": "no time was left", "losses": "no time was left", "push": "no time was left"}
    assert {name: row["note"] for (name, _), row in rows.items()} == told


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_of_it_is_right_on_a_cpu(tmp_path):
    # Copied, as beside an installed wheel.
    script = tmp_path / "gpu.py"
    script.write_text(SCRIPT.read_text())
    folder = tmp_path / "found"
    status, printed, rows = measure(script, folder, "--jobs", "2", "--total-s", "800")
    assert status == 0, printed
    ended = {name for name, what in rows if what == "ended"}
    assert ended == {
        *("machine", "losses", "families", "episodes", "graph", "slots", "waits", "resume", "lora"),
        *("drawing", "prompts", "training", "head", "context", "push", "vllm", "eight_bits"),
        "learning",
    }
    for key in (
        ("losses", "GRPO against a padded loop by hand, loss"),
        ("losses", "... and its gradient"),
        ("families", "Gemma3Text, gradient"),
        *(("episodes", f"{way}: recorded log-probs") for way in ("top-p", "penalties", "min-p")),
        ("training", "TorchRL's: its loss"),
        ("head", "the gradient of the weights"),
        ("lora", "gradient of the adapters"),
    ):
        assert rows[key]["ok"], key
        assert rows[key]["value"] < 1e-4, key
    assert rows["resume", "bit by bit"]["note"] == "yes"
    # 2 weights a number, read once for each token, at the rate of copies.
    rates = json.loads((folder / "rates.json").read_text())
    weights = 1000 * 64 + 2 * (64 * 16 * (4 + 2 + 2 + 4) + 3 * 64 * 128 + 2 * 64 + 2 * 16) + 64
    limit = max(4 * weights / (rates["copy"] / 2), 2 * 4 * weights / rates["float32"])
    assert rows["drawing", "ours, 4 rows, plain"]["limit"] == pytest.approx(1e3 * limit)
    unique = int(rows["training", "the rows"]["note"].split(", ")[2].split()[0])
    limit = 6 * weights * unique / rates["float32"]
    assert rows["training", "ours"]["limit"] == pytest.approx(limit)
    for name in ("profile_training.txt", "profile_drawing_4.txt", "profile_training.json.gz"):
        assert (folder / name).stat().st_size > 1000
    assert rows["learning", "throughput/sampled_tokens_per_s"]["value"] > 0

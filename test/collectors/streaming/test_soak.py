"""A streaming collection under faults, in a process of its own: nothing is lost or left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "collection" / "soak.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [pytest.param(0, id="wait"), pytest.param(1, id="drop", marks=pytest.mark.weekly)],
)
def test_nothing_is_lost_or_left_behind_under_faults(seed):
    command = [sys.executable, str(SCRIPT), "--seconds", "15", "--seed", str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["lost"] == {"groups": 0, "tokens": 0}
    assert result["in_flight"] == 0
    assert result["max_age"] <= result["max_staleness"]
    for kind in ("threads", "files", "children", "temporary_files"):
        assert result[f"{kind}_left"] == 0, result
    assert result["memory_growth_mib"] < 32
    # It did run, and met faults on the way.
    assert result["steps"] > 5
    assert {"answered", "error", "environment_error"} <= result["stop_reasons"].keys()
    assert "stale" not in result["dropped"] or seed == 1

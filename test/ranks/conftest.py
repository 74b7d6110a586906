"""The scenarios run once, in a process that imports once and forks the ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items):
    """Whichever test is first waits for all scenarios."""
    for item in items:
        if "found" in item.fixturenames:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def found(tmp_path_factory, pytestconfig):
    """What a scenario gave, by its name."""
    path = tmp_path_factory.mktemp("ranks") / "results.pt"
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "run_scenarios.py", path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = torch.load(path, weights_only=False)

    def result(name):
        assert not str(results[name]).startswith("Traceback"), results[name]
        return results[name]

    return result

"""Real OpenEnv servers in a process of their own."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "openenv_servers"))

from process import ServerProcess


@pytest.fixture(scope="session")
def servers():
    """Url of many servers: their environments are the paths."""
    mounts = {
        "echo": "async_echo:64",
        "single": "echo:1",
        "catch": "catch:64",
        "wordle": "wordle:64",
        "calculator": "calculator:64",
    }
    with ServerProcess(**mounts) as process:
        yield process.url
    assert process.process.returncode is not None

"""Fixtures of tests that talk to OpenEnv servers."""

import pytest
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

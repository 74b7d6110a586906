"""Starts the servers of this folder in a process of their own, and ends them."""

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
PYTHON = REPOSITORY / ".venv-openenv" / "bin" / "python"
START_S = 60.0


class ServerProcess:
    """OpenEnv servers at ``url + "/" + path``, until the ``with`` block ends.

    Args:
        **mounts: path to ``"environment:sessions"``, see ``serve.py``.
    """

    def __init__(self, **mounts: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._path = next(iter(mounts))
        arguments = [f"{path}={served}" for path, served in mounts.items()]
        self.process = subprocess.Popen(
            [str(PYTHON), "serve.py", str(port), *arguments],
            cwd=HERE,
            stdin=subprocess.PIPE,
            env={
                **os.environ,
                "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{HERE.parent / 'quick_imports'}",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
        )

    def __enter__(self) -> Self:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}")
            try:
                with urllib.request.urlopen(f"{self.url}/{self._path}/health", timeout=5):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        self.close()
        raise RuntimeError(f"the server did not start within {START_S:g} s")

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and wait for its end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.kill()
        self.process.wait(timeout=10)

"""Network of the browser's own, where the proxy is all there is; by bubblewrap."""

import functools
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Final

from torchrl_envs.processes.worker_process import relayed_command

_NEAR: Final = "127.0.0.1:3128"
"""In that network, where nobody else listens."""
_PROBE_S: Final = 20.0


class SharedNetworkWarning(UserWarning):
    """A browser shares this machine's network, though all its traffic should go by the proxy."""


@functools.cache
def reason_against() -> str | None:
    """Reason why a program can't have a network of its own, or ``None``; tried once a process."""
    if shutil.which("bwrap") is None:
        return "bubblewrap (the command `bwrap`) is not installed"
    try:
        tried = subprocess.run(
            [*_bubblewrap(), "true"], capture_output=True, text=True, timeout=_PROBE_S
        )
    except subprocess.TimeoutExpired:
        return "bubblewrap does not start a program"
    return None if tried.returncode == 0 else tried.stderr.strip()[:200]


def write_launcher(folder: Path, executable: str) -> tuple[str, Path, str]:
    """A program that starts a browser in a network of its own."""
    socket, launcher = folder / "proxy", folder / "browser"
    command = [*_bubblewrap(), *relayed_command(_NEAR, socket, [executable])]
    launcher.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    launcher.chmod(0o700)
    return str(launcher), socket, f"http://{_NEAR}"


def _bubblewrap() -> list[str]:
    command = shutil.which("bwrap") or "bwrap"
    return [command, "--dev-bind", "/", "/", "--unshare-net", "--die-with-parent", "--"]

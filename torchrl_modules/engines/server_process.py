"""Processes of servers that end with the process that started them, however that ends."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from .json_client import JSONClient

_LOG = logging.getLogger(__name__)
_GUARDIAN: Final = """
import contextlib, os, shutil, signal, sys, time
import psutil

def lives(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != "zombie"

def end(family):
    for each in filter(lives, list(family)):
        with contextlib.suppress(psutil.Error):
            family.update(each.children(recursive=True))
    trackers = []
    for each in filter(lives, family - {psutil.Process()}):
        with contextlib.suppress(psutil.Error):
            if "resource_tracker" in " ".join(each.cmdline()):
                each.resume()  # left alone, it removes their shared memory, and ends
                trackers.append(each)
            else:
                each.kill()
    deadline = time.monotonic() + 5
    while any(map(lives, trackers)) and time.monotonic() < deadline:
        time.sleep(0.05)

signal.signal(signal.SIGTERM, lambda *_: sys.exit())
server, folder, parent, family = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), set()
try:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
        process = psutil.Process(server)
        family.add(process)
        while os.getppid() == parent and lives(process):
            family.update(process.children(recursive=True))
            time.sleep(0.5)
finally:
    try:
        end(family)
    finally:
        # Whoever would have removed it has ended; else it is there to be read, and removed then.
        if parent == server or os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)
"""


def guard_server(server: int, folder: str) -> "subprocess.Popen[bytes]":
    """Start a process that ends a server's family, stopped or not, with the server or with us.

    Args:
        server: its process.
        folder: removed when it has ended.
    """
    words = [sys.executable, "-c", _GUARDIAN, str(server), folder, str(os.getpid())]
    return subprocess.Popen(words, start_new_session=True)


@contextmanager
def run_server(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    *,
    url: str,
    token: str | None,
    start_timeout_s: float,
    what: str,
) -> Iterator[None]:
    """Run a server beside this process until it is left; the server does not outlive this process.

    Args:
        words: its command line.
        environment: all of its variables.
        folder: its own; what it prints comes into ``log`` there.
        url: where it is asked for its ``/health``.
        token: with which it is asked.
        start_timeout_s: how long it may take to answer with 200.
        what: its name in the error.

    The last lines of one that ends by itself later are logged.

    Raises:
        RuntimeError: it ends while it starts, or takes too long; the message holds the last lines
            that it printed.
    """
    log_path = Path(folder, "log")
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            words, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    guardian = guard_server(process.pid, folder)
    try:
        with closing(JSONClient(url, timeout_s=5.0, token=token)) as client:
            is_up = client.await_answer(
                "/health", start_timeout_s, goes_on=lambda: process.poll() is None
            )
        if not is_up:
            printed = _last_words(log_path)
            raise RuntimeError(f"{what} did not start (exit code {process.poll()}):\n{printed}")
        yield
        if (code := process.poll()) is not None:
            printed = _last_words(log_path)
            _LOG.warning("%s has ended by itself (exit code %s):\n%s", what, code, printed)
    finally:
        guardian.terminate()
        guardian.wait()
        # Should its guardian have been killed: its engine is a process of the same group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_words(log: Path) -> str:
    """The end of what a server has printed, without the requests that it answered well."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if '" 200' not in line)[-3000:]

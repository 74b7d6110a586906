"""Nothing in a sandbox outlives it, and nothing in a session runs between its runs."""

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from torchrl_envs.sandbox import Sandbox, SandboxLimits, SandboxSession, UnsandboxedCodeWarning


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(limits=SandboxLimits(timeout_s=5.0), isolation="bubblewrap")


def _unsandboxed():
    with pytest.warns(UnsandboxedCodeWarning, match="rights of this process"):
        return Sandbox(isolation="none", allow_unsandboxed=True)


def test_nothing_outlives_a_run(sandbox):
    mark = f"outlives-{os.getpid()}"
    program = f"""
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sh", ["{mark}", "-c", "sleep 60; true"])
    os._exit(0)
os.wait()
time.sleep(0.1)
print("started")
"""
    result = sandbox.run(program)
    assert result.stdout == "started\n"
    assert result.wall_s < 5  # the daemon holds the output pipes open
    assert not _running(mark)


def _children():
    return set(psutil.Process().children(recursive=True))


# Fills what it reads its requests from, says itself that it is done, and goes on.
TAKES_OVER = """
import fcntl, os, time
mark, floods = {mark!r}, {floods!r}
held = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
modes = {{}}
for fd in held:
    try:
        modes[fd] = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError:
        continue
for fd in [fd for fd in modes if modes[fd] == os.O_RDONLY]:
    end = os.open("/proc/self/fd/%d" % fd, os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(end, bytes(4096))
    except BlockingIOError:
        continue
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.execv("/bin/sh", [mark, "-c", "while :; do :; done"])
os.close(write)
os.read(read, 1)  # until the child runs another program
print("taken over", flush=True)
while True:
    for fd in [fd for fd in modes if modes[fd] != os.O_RDONLY]:
        os.write(fd, b"0\\n")
    time.sleep(0 if floods else 600)
"""


@pytest.mark.parametrize("isolation", ["bubblewrap", "none"])
@pytest.mark.parametrize("floods", [False, True], ids=["one answer", "many answers"])
def test_a_session_that_is_taken_over_ends_with_everything_in_it(isolation, floods, sandbox):
    mark = f"takes-over-{isolation}-{os.getpid()}"
    held = _unsandboxed() if isolation == "none" else sandbox
    session = SandboxSession(held)
    before = _children()
    first = session.run(TAKES_OVER.format(mark=mark, floods=floods), timeout_s=3.0)
    assert first.stdout == "taken over\n", first
    assert _running(mark)
    started = time.monotonic()
    second = session.run("print(6 * 7)", timeout_s=2.0)
    assert time.monotonic() - started < 10
    assert second.state_lost or floods, "it did not run"
    inside = _children() - before
    session.close()
    assert psutil.wait_procs(inside, timeout=10)[1] == []
    assert not _running(mark)


@pytest.mark.parametrize("isolation", ["bubblewrap", "landlock", "none"])
def test_nothing_of_a_session_runs_between_its_runs(isolation, sandbox):
    own = {"landlock": lambda: Sandbox(isolation="landlock"), "none": _unsandboxed}
    session = SandboxSession(own.get(isolation, lambda: sandbox)())
    before = _children()
    session.run("""
import os, sys, threading, time
count = [0]
def counts():
    while True:
        count[0] += 1
        time.sleep(0.001)
threading.Thread(target=counts, daemon=True).start()
""")
    is_one = isolation == "landlock"
    session.run(
        ""
        if is_one
        else """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            pass
    os._exit(0)
os.wait()
"""
    )
    inside = _children() - before
    # The program and its child; keeper, bubblewrap and supervisor.
    assert len(inside) == {"bubblewrap": 5, "landlock": 2, "none": 4}[isolation]
    deadline = time.monotonic() + 10
    while sum(p.status() == psutil.STATUS_STOPPED for p in inside) < 2 - is_one:
        assert time.monotonic() < deadline, "the interpreter, and what it started, are stopped"
    assert session.run("before = count[0]; time.sleep(0.3); print(count[0] > before)").stdout == (
        "True\n"
    ), "in a run everything goes on"
    session.close()


def _running(mark):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if command.startswith(mark.encode()):
            found.append(pid)
    return found


def test_everything_ends_with_the_program_that_started_it():
    """Killed, not closed: nobody is left to clean up."""
    mark = f"orphan-{os.getpid()}"
    program = f"import os; os.execv('/bin/sh', ['{mark}', '-c', 'sleep 60; true'])"
    starter = f"""
import os, signal, threading, time
from torchrl_envs.sandbox import Sandbox, SandboxSession
sandbox = Sandbox(isolation="bubblewrap")
for run in (SandboxSession(sandbox).run, sandbox.run):
    threading.Thread(target=run, args=({program!r},)).start()
time.sleep(1)
print("started", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    assert len(_running(mark)) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    gone = threading.Event()
    for _ in range(20):
        if not _running(mark):
            break
        gone.wait(0.1)
    assert not _running(mark)

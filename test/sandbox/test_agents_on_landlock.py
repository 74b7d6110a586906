"""Attacks of agents' programs that Landlock confines, on this kernel's version and on the first.

A program here starts others, as agents do, and keeps the user of this process, so that nothing but
the sandbox stands between it and what is here.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from typing import NamedTuple

import psutil
import pytest
from agent_attacks import ATTACKS, NUMBERS, WORKS, counting
from attacks import ON_LANDLOCK, program_of

from torchrl_envs import AgentCommand
from torchrl_envs.agents.agent_command import AgentEndpoint, AgentProgramError
from torchrl_envs.sandbox import ProgramLimits, landlock, program_check, watched_program

MIB = 1 << 20
LIMITS = ProgramLimits(memory_bytes=160 * MIB, disk_bytes=8 * MIB, num_files=256, num_processes=16)
SHARED = (
    *("L02 lists of files", "L03 write beside the folder", "L03 link and move files in and out"),
    *("L04 modes, times and owners", "L04 flags, leases and locks of a library"),
    *("L05 cut files", "L06 watch what others do", "L07 a signal that a descriptor sends"),
    *("L08 limits of others", "L10 sockets of others", "L10 objects of System V"),
)
ALL = {**ATTACKS, **{name: ON_LANDLOCK[name] for name in SHARED}}
HARMLESS_AS_THEY_ARE = ("P01 secrets", "P07 signals", "P10 servers", "L02 lists of files")


class Outside(NamedTuple):
    """What a program may not touch."""

    names: dict
    other: socket.socket


@pytest.fixture
def outside(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_THE_TRAINER", "secret")
    folder = tmp_path / "outside"
    other_episode = tmp_path / "sandbox-other"
    for path in (folder, other_episode, folder / "packages", tmp_path / "work"):
        path.mkdir()
    (folder / "secret").write_text("secret")
    (folder / "packages/os.py").write_text("x = 1")
    (other_episode / "answer").write_text("secret")
    names = {
        "trainer": os.getpid(),
        "folder": str(folder),
        "work": str(tmp_path / "work"),
        "secret": f"{folder}/secret",
        "copy": f"{folder}/packages",
        "other_episode": str(other_episode),
        "name": f"{tmp_path.name}-probe",
        "shared": 0,
        **NUMBERS,
    }
    with (
        socket.create_server(("127.0.0.1", 0)) as policy,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as by_name,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as by_path,
    ):
        by_name.bind(f"\0agents-{tmp_path.name}")
        by_path.bind(f"{folder}/socket")
        names |= {"abstract": by_name.getsockname(), "socket": by_path.getsockname()}
        names |= {"policy": policy.getsockname()[1], "other": other.getsockname()[1]}
        before = _state_of(folder)
        yield Outside(names, other)
        assert _state_of(folder) == before
        assert (folder / "secret").read_text() == "secret"
        assert sorted(os.listdir(folder)) == ["packages", "secret", "socket"]
        other.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has come
            other.accept()


def _state_of(folder):
    paths = (folder, folder / "secret", folder / "packages/os.py")
    return [(s.st_mode, s.st_uid, s.st_size, s.st_mtime_ns) for s in map(os.stat, paths)]


def run(program, outside, *, sandbox=True, limits=LIMITS, environment=None):
    """Run a program for an episode; what it printed last is its reward."""
    names = outside.names
    confined = {"sandbox": [names["copy"]], "isolation": "landlock", "limits": limits}
    command = AgentCommand(
        [sys.executable, "-c", counting(program, names)],
        folder=os.path.dirname(names["copy"]) if not sandbox else names["work"],
        environment=environment,
        **(confined if sandbox else {}),
    )
    endpoint = AgentEndpoint(f"http://127.0.0.1:{names['policy']}/v1", "key-of-this-test", "any")
    return asyncio.run(command(endpoint))


@pytest.mark.parametrize("attack", ALL)
def test_blocked(attack, outside):
    assert run(ALL[attack], outside) > 0


@pytest.mark.parametrize("attack", ALL)
def test_blocked_on_a_kernel_with_the_first_version(attack, outside, monkeypatch):
    """The supervisor and the filter enforce what that version does not."""
    for module in (landlock, watched_program, program_check):
        monkeypatch.setattr(module, "landlock_version", lambda: 1)
    everybody = "\nexpect_blocked(lambda: os.kill(-1, 0))" if "signals" in attack else ""
    assert run(textwrap.dedent(ALL[attack]) + everybody, outside) > bool(everybody)


@pytest.mark.parametrize("attack", HARMLESS_AS_THEY_ARE)
def test_the_attacks_are_real(attack, outside):
    with pytest.raises(AgentProgramError, match="ESCAPED"):
        run(ALL[attack], outside, sandbox=False)


def test_what_agents_do_works(outside):
    """A kernel with the first version lets them do the same."""
    assert run(WORKS, outside, environment={"MINE": "1"}) == 1


def test_what_agents_do_works_on_a_kernel_with_the_first_version(outside, monkeypatch):
    for module in (landlock, watched_program, program_check):
        monkeypatch.setattr(module, "landlock_version", lambda: 1)
    assert run(WORKS, outside, environment={"MINE": "1"}) == 1
    program_check._failing.cache_clear()
    assert program_check.failing_program_checks() == []
    program_check._failing.cache_clear()


# More than 160 MiB, 8 MiB in 256 files, or 32 processes; each then waits.
TOO_MUCH = {
    "memory of children": (
        "memory_bytes = 167772160",
        """
        for _ in range(4):
            if not os.fork():
                held = b"x" * (60 << 20)
                time.sleep(60)""",
    ),
    "one file": ("File too large", "open('one', 'wb').write(bytes(20 << 20))"),
    "many files of 1 MiB": (
        "disk_bytes = 8388608 and num_files = 256",
        """
        for n in range(40):
            open(str(n), "wb").write(bytes(1 << 20))""",
    ),
    "empty files": (
        "num_files = 256",
        """
        for n in range(400):
            os.close(os.open(str(n), os.O_CREAT))""",
    ),
    "deleted files of a child": (
        "disk_bytes",
        """
        if not os.fork():
            held = [open(str(n), "wb", buffering=0) for n in range(40)]
            for file in held:
                os.unlink(file.name)
                file.write(bytes(1 << 20))
            time.sleep(60)""",
    ),
    "a deleted file that is mapped": (
        "disk_bytes",
        """
        libc.mmap.restype = ctypes.c_void_p
        for n in range(4):
            file = os.open(str(n), os.O_RDWR | os.O_CREAT)
            os.truncate(file, 3 << 20)
            libc.mmap(None, ctypes.c_size_t(3 << 20), 1, 1, file, ctypes.c_long(0))
            os.close(file)
            os.unlink(str(n))""",
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_program_that_takes_too_much_is_ended(name, outside, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said, program = TOO_MUCH[name]
    waits = "\nif open('/dev/null'): time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(AgentProgramError, match=said):
        run("os.chdir(os.environ['TMPDIR'])\n" + textwrap.dedent(program) + waits, outside)
    assert time.monotonic() - began < 30
    assert left_behind() == ([], ["sandbox-other"])


def left_behind():
    """Processes with the key of the episode, and folders of programs."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "key-of-this-test" in process.environ().values():
                found.append(process)
    names = os.listdir(tempfile.gettempdir())
    return found, [name for name in names if name.startswith("sandbox-")]


BOMB = """
    def forks():
        while True:
            try:
                if not os.fork():
                    os.setsid()
            except OSError:
                time.sleep(0.001)
    for _ in range(3):
        if not os.fork():
            forks()
    time.sleep(1)
    expect_blocked(lambda: [os.fork() or time.sleep(60) for _ in range(40)])"""


def test_processes_are_bounded_and_none_is_left(outside, monkeypatch, tmp_path):
    """Of a bomb, with sessions of their own; asked as the calls come, and not by looking."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    most, done = [0], threading.Event()

    def counts():
        while not done.is_set():
            children = psutil.Process().children(recursive=True)
            most[0] = max(most[0], sum(len(_threads(each)) for each in children))

    watching = threading.Thread(target=counts)
    watching.start()
    try:
        assert run(BOMB, outside) == 1
    finally:
        done.set()
        watching.join()
    assert 16 <= most[0] <= 2 * 16 + 3, "and the keeper and the supervisor, of two threads"
    assert left_behind() == ([], ["sandbox-other"])


def _threads(process):
    try:
        return process.threads()
    except psutil.Error:
        return []


DAEMON = """
    import subprocess
    home = os.environ["TMPDIR"]
    os.mkdir(home + "/hidden", 0o300)
    open(home + "/hidden/kept", "w").write("x")
    if not os.fork():
        os.setsid()
        if not os.fork():
            libc_call("prctl", 1, 0, 0, 0, 0)  # no signal at a parent's death
            os.environ.clear()
            os.execve("/bin/sleep", ["sleep", "61.0731"], {})
        os._exit(0)
    subprocess.Popen("nohup sleep 61.0731 >/dev/null 2>&1 & disown", shell=True,
        executable="/bin/bash", start_new_session=True)
    time.sleep(0.3)
    {then}"""


def _sleepers():
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if "61.0731" in (each.info["cmdline"] or ()) and each.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.parametrize("then", ["num_blocked = 7", "time.sleep(60)"])
def test_nothing_is_left_of_a_program(then, outside, monkeypatch, tmp_path):
    """It ends by itself, or is given up."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outside.names["then"] = then
    if "sleep" not in then:
        assert run(DAEMON, outside) == 7
    else:
        waits = AgentCommand(
            [sys.executable, "-c", program_of(DAEMON, outside.names)],
            folder=outside.names["work"],
            sandbox=True,
            isolation="landlock",
        )
        endpoint = AgentEndpoint("http://127.0.0.1:1/v1", "key-of-this-test", "any")
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(waits(endpoint), 3.0))
    assert _sleepers() == []
    assert left_behind() == ([], ["sandbox-other"])


def test_nothing_is_left_where_the_trainer_is_killed(outside, tmp_path):
    outside.names["then"] = "time.sleep(60)"
    trainer = f"""
import asyncio, sys, tempfile
from torchrl_envs import AgentCommand
from torchrl_envs.agents.agent_command import AgentEndpoint
tempfile.tempdir = {str(tmp_path)!r}
command = AgentCommand([sys.executable, "-c", {program_of(DAEMON, outside.names)!r}],
    folder={outside.names["work"]!r}, sandbox=True, isolation="landlock")
asyncio.run(command(AgentEndpoint("http://127.0.0.1:1/v1", "key-of-this-test", "any")))
"""
    with subprocess.Popen([sys.executable, "-c", trainer]) as process:
        deadline = time.monotonic() + 60
        while len(_sleepers()) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
    deadline = time.monotonic() + 20
    while _sleepers() or len(os.listdir(tmp_path)) > 3:
        assert time.monotonic() < deadline, os.listdir(tmp_path)
        time.sleep(0.05)

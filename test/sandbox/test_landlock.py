"""Attacks that Landlock alone would not stop, on this kernel's version of it and on the first one.

The program has the user of this process wherever that may not become another one, so that nothing
but Landlock and the filter of system calls stands between it and what is here.
"""

import contextlib
import ctypes
import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
from attacks import CALLS, LIMITS, ON_LANDLOCK, PRELUDE, all_in_one, program_of, unsandboxed

from torchrl_envs.sandbox import Sandbox, SandboxSession, landlock
from torchrl_envs.sandbox.inside import memory
from torchrl_envs.sandbox.self_check import TRIAL_LIMITS, failing_checks
from torchrl_envs.sandbox.syscall_filter import call_number

HARMLESS_AS_THEY_ARE = (
    *("L02 lists of files", "L04 modes, times and owners", "L06 watch what others do"),
    *("L07 signals", "L10 sockets of others", "L10 objects of System V"),
)

# Each holds more than 8 MiB, or 256 files, and then waits.
TOO_MUCH = {
    "L12 many files of 1 MiB": """
        for n in range(60):
            open(str(n), "wb").write(bytes(1 << 20))""",
    "L12 files that are deleted and open": """
        held = [open(str(n), "wb", buffering=0) for n in range(20)]
        for file in held:
            os.unlink(file.name)
            file.write(bytes(1 << 20))""",
    "L12 files that are deleted and mapped": """
        libc.mmap.restype = ctypes.c_void_p
        for n in range(20):
            file = os.open(str(n), os.O_RDWR | os.O_CREAT)
            os.write(file, bytes(1 << 20))
            libc.mmap(None, ctypes.c_size_t(4096), 1, 1, file, ctypes.c_long(0))
            os.close(file)
            os.unlink(str(n))""",
    "L12 a folder that can't be read": """
        os.mkdir("hidden", 0o300)
        for n in range(20):
            open(f"hidden/{n}", "wb").write(bytes(1 << 20))""",
    "L12 folders in folders": """
        for n in range(100):
            os.mkdir("inner")
            os.chdir("inner")""",
    "L12 empty files": """
        for n in range(400):
            os.close(os.open(str(n), os.O_CREAT))""",
    "L12 names of one file": """
        os.close(os.open("one", os.O_CREAT))
        for n in range(400):
            os.link("one", str(n))""",
}


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    """Files, sockets and memory that a program of the same user could reach."""
    folder = tmp_path_factory.mktemp("outside")
    secret = folder / "secret"
    secret.write_text("secret")
    copy = folder / "packages"
    copy.mkdir()
    (copy / "os.py").write_text("x = 1")
    libc = ctypes.CDLL(None)
    shared = libc.shmget(0, 4096, 0o1600)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as by_name:
        by_name.bind("\0landlock-" + folder.name)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as by_path:
            by_path.bind(str(folder / "socket"))
            yield {
                "trainer": os.getpid(),
                "folder": str(folder),
                "name": f"{folder.name}-probe",
                "secret": str(secret),
                "copy": str(copy),
                "abstract": by_name.getsockname(),
                "socket": by_path.getsockname(),
                "shared": shared,
                **CALLS,
            }
    libc.shmctl(shared, 0, None)
    assert secret.read_text() == "secret"
    assert (copy / "os.py").read_text() == "x = 1"


@pytest.mark.parametrize("attack", ON_LANDLOCK)
def test_blocked(attack, victim):
    sandbox = Sandbox(limits=LIMITS, isolation="landlock", packages=[victim["copy"]])
    result = sandbox.run(program_of(ON_LANDLOCK[attack], victim))
    assert result.succeeded, result
    assert "blocked" in result.stdout
    assert "ESCAPED" not in result.stdout
    assert result.isolation == "landlock"


def test_on_a_kernel_with_the_first_version_all_of_them_are(victim, monkeypatch):
    """What it does not restrict is denied besides."""
    monkeypatch.setattr(landlock, "landlock_version", lambda: 1)
    sandbox = Sandbox(limits=LIMITS, isolation="landlock", packages=[victim["copy"]])
    result = sandbox.run(all_in_one(ON_LANDLOCK, victim))
    assert result.succeeded, result
    assert all(name in result.stdout for name in ON_LANDLOCK)
    assert "ESCAPED" not in result.stdout
    trial = Sandbox(limits=TRIAL_LIMITS, isolation="landlock")
    assert failing_checks("landlock", trial.run) == []


@pytest.mark.parametrize("attack", HARMLESS_AS_THEY_ARE)
def test_the_attacks_are_real(attack, victim):
    result = unsandboxed().run(program_of(ON_LANDLOCK[attack], victim))
    assert "ESCAPED" in result.stdout, result


@pytest.mark.parametrize("attack", TOO_MUCH)
def test_a_program_that_takes_too_much_disk_ends(attack, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = program_of(TOO_MUCH[attack], {}) + "\nprint('held', flush=True)\ntime.sleep(30)"
    result = Sandbox(limits=LIMITS, isolation="landlock").run(program)
    assert result.out_of_disk, result
    assert result.exit_status is None
    assert os.listdir(tmp_path) == []


def test_what_stays_below_the_limits_goes_on():
    program = """
        import asyncio, mmap, queue, sqlite3, tempfile, threading
        print(asyncio.run(asyncio.to_thread(lambda: "thread")))
        with sqlite3.connect("numbers.db") as base:
            base.execute("create table numbers (n)")
            base.executemany("insert into numbers values (?)", [(n,) for n in range(100)])
            print(base.execute("select sum(n) from numbers").fetchone())
        for n in range(30):
            with tempfile.TemporaryFile() as file:  # is deleted and open, and mapped
                file.write(bytes(1 << 20))
                with mmap.mmap(file.fileno(), 0) as mapped:
                    mapped[5] = 1
                time.sleep(0.01)
        os.mkdir("inner", 0o300)  # can't be read
        os.rename("numbers.db", "inner/moved")
        open("inner/once", "wb").write(bytes(3 << 20))
        for n in range(5):
            os.link("inner/once", f"inner/{n}")
        print(os.path.dirname(tempfile.mkdtemp()) == os.getcwd() == os.environ["HOME"])
        open("/dev/null", "w").write("nothing")
        signal.signal(signal.SIGALRM, lambda *_: print("woken"))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(0.2)
        sys.stdout.flush()
        signal.raise_signal(signal.SIGTERM)"""
    result = Sandbox(limits=LIMITS, isolation="landlock").run(program_of(program, {}))
    assert result.stdout == "thread\n(4950,)\nTrue\nwoken\n", result
    assert result.exit_status == -15


def test_record_locks_of_a_program_are_memory(tmp_path):
    """A lock takes some 200 bytes of the kernel's; those of other processes are not counted."""
    program = """
import fcntl, sys
for count in (0, 4000):
    file = open(sys.argv[1], "w")
    for n in range(count):
        fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * (count - n))
    print("held", flush=True)
    sys.stdin.readline()
"""
    config = {"isolation": "landlock", "memory_bytes": 1 << 40}
    used = []
    with (
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, str(tmp_path / "theirs")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
        open(tmp_path / "own", "w") as own,
    ):
        assert process.stdout.readline() == "held\n"
        used.append(memory.used_bytes(config, process.pid))
        for n in range(2000):
            fcntl.lockf(own, fcntl.LOCK_EX, 1, 2 * (2000 - n))
        used.append(memory.used_bytes(config, process.pid))
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "held\n"
        used.append(memory.used_bytes(config, process.pid))
        process.stdin.write("\n")
    assert abs(used[1] - used[0]) < 2000 * 100
    assert 4000 * 200 < used[2] - used[1] < 4000 * 350


@pytest.mark.parametrize("isolation", ["bubblewrap", "landlock"])
def test_a_program_whose_first_thread_ended_is_ended(isolation):
    """Nobody could look into what the other threads go on with."""
    program = """
        import threading
        threading.Thread(target=time.sleep, args=(30,)).start()
        print("leaving", flush=True)
        libc.syscall({exit}, 0)"""
    names = {"exit": call_number("exit")}
    result = Sandbox(limits=LIMITS, isolation=isolation).run(program_of(program, names))
    assert (result.stdout, result.exit_status) == ("leaving\n", -9), result


def test_threads_that_start_threads_are_bounded():
    """Of calls that wait at the same moment none sees the others': at most twice the number."""
    program = """
        import threading
        threading.stack_size(1 << 16)
        most, lock = [0], threading.Lock()
        def starts():
            while True:
                one_more()
        def one_more():
            try:
                threading.Thread(target=starts, daemon=True).start()
            except (RuntimeError, MemoryError):
                pass  # there are as many as may be
        for _ in range(3):
            one_more()
        for _ in range(20):
            most[0] = max(most[0], len(sys._current_frames()))
            time.sleep(0.02)
        os.write(1, str(most[0]).encode())
        os._exit(0)"""
    result = Sandbox(limits=LIMITS, isolation="landlock").run(program_of(program, {}), timeout_s=60)
    assert 10 <= int(result.stdout) <= 32, result


def _folders(place):
    return [name for name in os.listdir(place) if name.startswith("sandbox-")]


def test_the_program_ends_with_its_supervisor(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    session = SandboxSession(Sandbox(limits=LIMITS, isolation="landlock"))
    before = set(psutil.Process().children(recursive=True))
    assert session.run("x = 1").succeeded
    inside = set(psutil.Process().children(recursive=True)) - before
    (supervisor,) = (each for each in inside if each.ppid() == os.getpid())
    assert len(inside) == 2
    supervisor.kill()
    assert psutil.wait_procs(inside - {supervisor}, timeout=10)[1] == []
    again = session.run("print(1)")
    assert again.state_lost
    assert session.run("print(2)").stdout == "2\n"
    session.close()
    assert _folders(tmp_path) == []


def test_everything_ends_with_the_process_that_started_it(tmp_path):
    """Killed, not closed, while another process still holds its pipes; their folders go, too."""
    starter = f"""
import os, tempfile, threading, time
from torchrl_envs.sandbox import Sandbox, SandboxSession
tempfile.tempdir = {str(tmp_path)!r}
sandbox = Sandbox(isolation="landlock")
program = "open('written', 'w'); import time; time.sleep(60)"
for run in (SandboxSession(sandbox).run, sandbox.run):
    threading.Thread(target=run, args=(program,)).start()
time.sleep(1)
holder = os.fork()
if holder:
    print(holder, flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    holder = psutil.Process(int(process.stdout.readline()))
    inside = set(psutil.Process(process.pid).children(recursive=True)) - {holder}
    assert len(inside) == 4
    assert len(_folders(tmp_path)) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    assert psutil.wait_procs(inside, timeout=10)[1] == []
    holder.kill()
    deadline = time.monotonic() + 5
    while _folders(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _folders(tmp_path) == []


def test_a_session_that_says_early_that_it_is_done_is_stopped():
    """It runs on in a thread, and answers what it was not asked."""
    program = """
        import threading
        def answers():
            while True:
                for fd in range(3, 32):
                    try:
                        os.write(fd, b"0\\\\n")
                    except OSError:
                        continue
        threading.Thread(target=answers, daemon=True).start()"""
    session = SandboxSession(Sandbox(limits=LIMITS, isolation="landlock"))
    before = set(psutil.Process().children(recursive=True))
    session.run(program_of(program, {}))
    (worker,) = (
        each
        for each in set(psutil.Process().children(recursive=True)) - before
        if each.ppid() != os.getpid()
    )
    deadline = time.monotonic() + 10
    while worker.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
    session.close()
    with contextlib.suppress(psutil.NoSuchProcess):
        worker.wait(timeout=10)
    assert not worker.is_running()


def test_the_prelude_of_the_attacks_says_what_escaped():
    result = Sandbox(isolation="landlock").run(PRELUDE + "expect_blocked(lambda: 1)")
    assert result.stdout == "ESCAPED 1\n"

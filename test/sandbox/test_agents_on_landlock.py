"""Attacks of agents' programs that Landlock confines, on this kernel's version and on the first.

A program here starts others, as agents do, and keeps the user of this process, so that nothing but
the sandbox stands between it and what is here. Its reward is the number of attacks that were
blocked; it ends with an error where one escaped.
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
from attacks import ON_LANDLOCK, PRELUDE, program_of

from torchrl_envs import AgentCommand
from torchrl_envs.agents.agent_command import AgentEndpoint, AgentProgramError
from torchrl_envs.sandbox import ProgramLimits, landlock, program_check, watched_program
from torchrl_envs.sandbox.syscall_filter import call_number

MIB = 1 << 20
LIMITS = ProgramLimits(memory_bytes=160 * MIB, disk_bytes=8 * MIB, num_files=256, num_processes=16)
NUMBERS = {
    name: call_number(name)
    for name in (
        *("tgkill", "tkill", "rt_sigqueueinfo", "pidfd_send_signal", "bpf", "keyctl", "io_setup"),
        *("userfaultfd", "io_uring_setup", "process_vm_readv", "landlock_create_ruleset"),
        *("fsopen", "open_tree", "memfd_create", "perf_event_open"),
    )
}
COUNTS = """
num_blocked = 0
def expect_blocked(attack, *errors):
    global num_blocked
    try:
        found = attack()
    except (errors or OSError):
        num_blocked += 1
    else:
        sys.exit(f"ESCAPED {found!r:.80}")
os.chdir(os.environ.get("TMPDIR", "."))
"""
TELLS = "\nprint(num_blocked)\n"

# As in `attacks`: what is outside is put in for the names in braces.
ATTACKS = {
    "P01 secrets": """
        import subprocess
        for pid in ({trainer}, os.getppid(), os.getpid()):
            for name in ("environ", "cmdline", "mem", "fd/0", "root/etc/passwd", "status"):
                expect_blocked(lambda: os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
        expect_blocked(lambda: os.listdir("/proc"))
        expect_blocked(lambda: open("{secret}"))
        expect_blocked(lambda: os.listdir("{other_episode}"))
        expect_blocked(lambda: open("{other_episode}/answer"))
        expect_blocked(lambda: os.environ["OF_THE_TRAINER"], KeyError)
        for command in (["cat", "{secret}"], ["ls", "{folder}"], ["ps"]):
            expect_blocked(lambda: subprocess.run(command, check=True, stderr=-3),
                subprocess.CalledProcessError)""",
    "P02 write outside, by a child": """
        import subprocess
        for command in (["touch", "{folder}/new"], ["sh", "-c", "echo x >> {secret}"],
                ["rm", "-f", "{secret}"], ["chmod", "777", "{secret}"], ["touch", "{secret}"],
                ["ln", "{secret}", "here"], ["mv", "{secret}", "here"], ["sh", "-c", "> {secret}"],
                ["mkdir", "/dev/shm/{name}"]):
            expect_blocked(lambda: subprocess.run(command, check=True, stderr=-3),
                subprocess.CalledProcessError)""",
    "P03 modes by each call and path": """
        os.chdir(os.environ["TMPDIR"])
        os.symlink("{secret}", "link")
        away = os.open("{folder}", os.O_PATH)
        library = os.open(os.__file__, os.O_RDONLY)
        for attack in (
            lambda: os.chmod("link", 0o777), lambda: os.chmod("{secret}", 0o777),
            lambda: os.chmod("secret", 0o777, dir_fd=away), lambda: os.chmod(library, 0o777),
            lambda: os.chmod(f"/proc/self/fd/{library}", 0o777),
            lambda: os.utime("link"), lambda: os.utime("secret", dir_fd=away),
            lambda: os.utime(library, (1, 2)), lambda: os.chmod("..", 0o777),
            lambda: os.chmod("{other_episode}", 0o777), lambda: os.chown("{secret}", -1, -1),
            lambda: os.chmod("", 0o777), lambda: os.chmod("no-such-file", 0o777),
            lambda: libc_call("chmod", ctypes.c_void_p(8), 0o777),
            lambda: libc_call("chmod", b"x" * 5000, 0o777),
        ):
            expect_blocked(attack)""",
    "P07 signals": """
        for pid in ({trainer}, os.getppid(), -os.getpgid({trainer})):
            expect_blocked(lambda: os.kill(pid, 0))
        for pid in ({trainer}, os.getppid()):
            expect_blocked(lambda: libc_call("syscall", {tgkill}, pid, pid, 0))
            expect_blocked(lambda: libc_call("syscall", {tkill}, pid, 0))
            info = (ctypes.c_int * 32)(0, 0, -1)
            expect_blocked(lambda: libc_call("syscall", {rt_sigqueueinfo}, pid, 0, info))
            expect_blocked(lambda: libc_call(
                "syscall", {pidfd_send_signal}, os.pidfd_open(pid), 0, None, 0))""",
    "P08 tracing, namespaces, the kernel's objects": """
        for name, arguments in {
            "ptrace": (16, {trainer}, None, None), "unshare": (0x10000000,),
            "mount": (b"x", b"/tmp", b"tmpfs", 0, None), "chroot": (b".",),
            "setns": (0, 0), "personality": (0x40000,),
        }.items():
            expect_blocked(lambda: libc_call(name, *arguments))
        for number in ({bpf}, {keyctl}, {userfaultfd}, {io_uring_setup}, {process_vm_readv},
                {landlock_create_ruleset}, {fsopen}, {open_tree}, {memfd_create},
                {perf_event_open}, {io_setup}):
            expect_blocked(lambda: libc_call("syscall", number, 0, 0, 0, 0, 0))
        expect_blocked(lambda: libc_call("prctl", 4, 0, 0, 0, 0))""",
    "P10 sockets of other kinds": """
        import socket
        for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK,
                socket.AF_PACKET, socket.AF_VSOCK, socket.AF_ALG, 2**32 + socket.AF_UNIX):
            for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
                expect_blocked(lambda: libc_call(
                    "syscall", {socket_call}, ctypes.c_long(family), ctypes.c_long(kind), 0))
        for protocol in (132, 256, 262):  # SCTP, SMC, MPTCP: Landlock lets them pass
            expect_blocked(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol))
        expect_blocked(lambda: socket.socket(socket.AF_UNIX))
        expect_blocked(lambda: socket.socket(socket.AF_INET6))""",
    "P10 other addresses": """
        import socket
        def connect(host, port):
            return socket.socket().connect((host, port))
        for host, port in (("127.0.0.1", {other}), ("1.1.1.1", 80), ("1.1.1.1", {policy}),
                ("127.0.0.2", {policy}), ("0.0.0.0", {other})):
            expect_blocked(lambda: connect(host, port))
        link = socket.socket()  # it leads to the policy; may it be used again?
        link.shutdown(socket.SHUT_RDWR)
        for flags in (0, 0x20000000):  # MSG_FASTOPEN
            expect_blocked(lambda: link.sendto(b"x", flags, ("127.0.0.1", {other})))
            expect_blocked(lambda: link.sendmsg([b"x"], [], flags, ("127.0.0.1", {other})))
        none = bytes(16)  # AF_UNSPEC, which would part it from the policy
        expect_blocked(lambda: libc_call("connect", link.fileno(), none, 16))""",
    "P10 an address that changes while it is looked at": """
        import socket, threading
        there, away = (b"\\x02\\0" + port.to_bytes(2, "big") + b"\\x7f\\0\\0\\1" + bytes(8)
            for port in ({policy}, {other}))
        address = ctypes.create_string_buffer(there)
        def changes():
            while True:
                ctypes.memmove(address, away, 16)
                ctypes.memmove(address, there, 16)
        threading.Thread(target=changes, daemon=True).start()
        reached = 0
        for _ in range(100):
            link = socket.socket()
            reached += libc.connect(link.fileno(), address, 16) == 0
            link.sendall(b"x")  # to whomever it leads
            link.close()
        num_blocked += reached > 0""",
    "P10 servers": """
        import socket
        for attack in (
            lambda: socket.socket().bind(("127.0.0.1", 0)), lambda: socket.socket().listen(),
            lambda: socket.create_server(("127.0.0.1", 0)),
            lambda: socket.socketpair()[0].bind("mine"), lambda: socket.socketpair()[0].listen(),
            lambda: socket.socketpair(type=socket.SOCK_DGRAM),
        ):
            expect_blocked(attack)""",
}
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
        "socket_call": call_number("socket"),
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
    text = PRELUDE + COUNTS + program_of(program, names).removeprefix(PRELUDE) + TELLS
    confined = {"sandbox": [names["copy"]], "isolation": "landlock", "limits": limits}
    command = AgentCommand(
        [sys.executable, "-c", text],
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
    assert run(ALL[attack], outside) > 0


@pytest.mark.parametrize("attack", HARMLESS_AS_THEY_ARE)
def test_the_attacks_are_real(attack, outside):
    with pytest.raises(AgentProgramError, match="ESCAPED"):
        run(ALL[attack], outside, sandbox=False)


WORKS = """
    import asyncio, concurrent.futures, shutil, socket, subprocess
    def check(fine, what):
        if not fine:
            sys.exit(f"{what} does not work")
    home = os.environ["TMPDIR"]
    check(home == os.environ["HOME"] and os.listdir(home) == [], "an empty home")
    check("OF_THE_TRAINER" not in os.environ and os.environ["MINE"] == "1", "the environment")
    os.chdir(home)
    def shell(*commands):
        return subprocess.run(["bash", "-c", "; ".join(commands)], capture_output=True, text=True)
    check(shell("echo one | cat > a", "diff <(cat a) <(echo one) && echo same").stdout == "same\\n",
        "a shell")
    script = "#!/bin/sh\\necho mine"
    open("run.sh", "w").write(script)
    os.chmod("run.sh", 0o750)
    check(os.stat("run.sh").st_mode & 0o7777 == 0o750, "a mode")
    check(shell("./run.sh").stdout == "mine\\n", "a program of its own")
    os.utime("a", ns=(10**18 + 1, 2 * 10**18 + 5))
    check(os.stat("a").st_mtime_ns == 2 * 10**18 + 5, "a time")
    os.utime("a")
    check(abs(os.stat("a").st_mtime - time.time()) < 60, "the time of now")
    shell("touch -d 2001-02-03 a; ln -s a link; touch -h -d 2001-02-03 link", "chmod -R go-rwx .")
    check(time.gmtime(os.stat("a").st_mtime)[:3] == (2001, 2, 3), "touch")
    check(time.gmtime(os.lstat("link").st_mtime)[:3] == (2001, 2, 3), "a time of a link")
    libc_call("utimes", b"a", (ctypes.c_long * 4)(5, 250000, 7, 500000))
    check(os.stat("a").st_mtime_ns == 7_500_000_000, "utimes")
    libc_call("syscall", {utime}, b"a", (ctypes.c_long * 2)(5, 8))
    check(os.stat("a").st_mtime_ns == 8_000_000_000, "utime")
    folder = os.open(".", os.O_RDONLY)
    os.chmod("a", 0o611, dir_fd=folder)
    os.fchmod(os.open("run.sh", os.O_RDONLY), 0o700)
    modes = [os.stat(name).st_mode & 0o7777 for name in ("a", "run.sh")]
    check(modes == [0o611, 0o700], "modes by descriptors")
    child = subprocess.Popen(["sleep", "60"])
    child.send_signal(signal.SIGINT)
    check(child.wait() == -2, "a signal to a child")
    group = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"], process_group=0)
    time.sleep(0.2)
    os.killpg(group.pid, signal.SIGKILL)
    check(group.wait() == -9, "a signal to a group")
    check(shell("timeout 0.2 sleep 9").returncode == 124, "timeout")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        check(sum(pool.map(abs, range(9))) == 36, "threads")
    check(asyncio.run(asyncio.to_thread(lambda: 5)) == 5, "asyncio")
    async def ask():
        reader, writer = await asyncio.open_connection("127.0.0.1", {policy})
        peer = writer.get_extra_info("peername")
        writer.close()
        return peer
    check(asyncio.run(ask()) == ("127.0.0.1", {policy}), "a connection of asyncio")
    link = socket.create_connection(("localhost", {policy}), timeout=5)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    check(link.getpeername() == ("127.0.0.1", {policy}), "a connection by name")
    check(not os.get_inheritable(link.fileno()), "a socket that children do not get")
    if shutil.which("git"):
        who = "git -c user.name=a -c user.email=b"
        told = shell("git init -q r", f"cd r; echo x > f; git add f; {who} commit -qm one",
            "git log --format=%s; git status --short")
        check(told.stdout == "one\\n", f"git: {told}")
    num_blocked = 1"""


def test_what_agents_do_works(outside):
    """A kernel with the first version lets them do the same."""
    outside.names["utime"] = call_number("utime")
    assert run(WORKS, outside, environment={"MINE": "1"}) == 1


def test_what_agents_do_works_on_a_kernel_with_the_first_version(outside, monkeypatch):
    for module in (landlock, watched_program, program_check):
        monkeypatch.setattr(module, "landlock_version", lambda: 1)
    outside.names["utime"] = call_number("utime")
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
    "one file": ("status 1", "open('one', 'wb').write(bytes(20 << 20))"),
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
        import mmap
        held = []
        for n in range(4):
            file = os.open(str(n), os.O_RDWR | os.O_CREAT)
            os.truncate(file, 3 << 20)
            held.append(mmap.mmap(file, 3 << 20))
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

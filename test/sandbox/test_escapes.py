"""Attacks on the sandbox: every one is blocked, or bounded by a limit.

Each attack says "blocked" if it was stopped and "ESCAPED" if not. A secret lies in the
environment, in a file, in a unix socket and in a process outside.
"""

import dataclasses
import os
import re
import socket
import subprocess

import pytest
from attacks import LIMITS, MIB, program_of, unsandboxed

from torchrl_envs.sandbox import Sandbox

CANARY = "canary-6f1b2c"


def _read(path):
    return f"expect_blocked(lambda: open({path!r}).read())"


# Name of the attack, program. Names in braces are filled in from the victim.
BLOCKED = {
    "A01 environment": "if 'canary' in str(dict(os.environ)): print('ESCAPED')\nprint('blocked')",
    "A01 environment of the parent": _read("/proc/{parent}/environ"),
    "A01 environment of the first process": (
        "try:\n    own = open('/proc/self/environ').read()\nexcept PermissionError:\n    own = ''\n"
        "print('ESCAPED' if 'canary' in own else 'blocked')\n" + _read("/proc/1/environ")
    ),
    "A02 a private file": _read("{secret}"),
    "A02 the password file": _read("/etc/shadow"),
    "A02 this project": _read("{project_file}"),
    "A02 a private file through another root": _read("/proc/1/root{secret}"),
    "A02 a private file through another working directory": _read("/proc/1/cwd{secret}"),
    "A03 write a private file": "expect_blocked(lambda: open('{secret}', 'a').write('x'))",
    "A03 write into the system": "expect_blocked(lambda: open('/usr/bin/x', 'w'))",
    "A03 write next to the interpreter": (
        "expect_blocked(lambda: open(sys.prefix + '/x', 'w'))\n"
        "expect_blocked(lambda: os.chmod(sys.executable, 0o777))"
    ),
    "A04 connect over TCP": """
        import socket
        expect_blocked(lambda: socket.create_connection(("127.0.0.1", {tcp_port}), 1).recv(99))""",
    "A04 listen on TCP": """
        import socket
        expect_blocked(lambda: socket.create_server(("0.0.0.0", 0)))""",
    "A05 send over UDP": """
        import socket
        expect_blocked(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            .sendto(b"x", ("127.0.0.1", {udp_port})))""",
    "A05 ask a name server": """
        import socket
        expect_blocked(lambda: socket.getaddrinfo("example.com", 80))""",
    "A05 abstract unix socket": """
        import socket
        expect_blocked(lambda: socket.socket(socket.AF_UNIX).connect({abstract!r}))""",
    "A05 raw and netlink sockets": """
        import socket
        for family in (socket.AF_PACKET, socket.AF_NETLINK, 40):
            expect_blocked(lambda: socket.socket(family, socket.SOCK_RAW))""",
    "A06 memory of the parent": _read("/proc/{parent}/mem"),
    "A06 memory of the supervisor": _read("/proc/1/mem"),
    "A06 trace a process": """
        expect_blocked(lambda: libc_call("ptrace", 16, {parent}, None, None))
        expect_blocked(lambda: libc_call("ptrace", 16, 1, None, None))""",
    "A06 read memory across processes": """
        buffer = ctypes.create_string_buffer(8)
        vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
        expect_blocked(lambda: libc_call("process_vm_readv", 1, vector, 1, vector, 1, 0))""",
    "A07 signal the parent": "expect_blocked(lambda: os.kill({parent}, 0))",
    "A07 signal a process group": "expect_blocked(lambda: os.killpg({group}, 0))",
    "A07 signal everybody": """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for who, number in ((1, signal.SIGKILL), (1, signal.SIGSTOP), (-1, signal.SIGTERM)):
            try:
                os.kill(who, number)
            except (ProcessLookupError, PermissionError) as error:
                print("refused", error)
        print("blocked, or this would have killed the sandbox or more")""",
    "A07 slow the supervisor down": """
        expect_blocked(lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
        expect_blocked(lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))
        import resource
        expect_blocked(lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)))""",
    "A08 raise a limit again": """
        import resource
        expect_blocked(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (999, 999)), ValueError)
        expect_blocked(lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)), ValueError)""",
    "A09 memory outside of processes": """
        expect_blocked(lambda: os.memfd_create("x"))
        expect_blocked(lambda: libc_call("shmget", 0, 1 << 20, 0o1600))
        expect_blocked(lambda: libc_call("msgget", 0, 0o1600))
        expect_blocked(lambda: libc_call("memfd_secret", 0), OSError, AttributeError)""",
    "A09 memory that pipes and sockets hold": """
        import socket
        read, write = os.pipe()
        other_read, other_write = os.pipe()
        page = ctypes.create_string_buffer(4096)
        vector = (ctypes.c_void_p * 2)(ctypes.addressof(page), 4096)
        os.write(write, b"x")
        expect_blocked(lambda: libc_call("vmsplice", write, vector, 1, 0))
        expect_blocked(lambda: libc_call("tee", read, other_write, 1, 0))
        expect_blocked(lambda: libc_call("splice", read, None, other_write, None, 1, 0))
        for end in socket.socketpair():
            for option in (socket.SO_SNDBUF, 32):
                expect_blocked(lambda: end.setsockopt(socket.SOL_SOCKET, option, 1 << 22))
        value = ctypes.byref(ctypes.c_int(1 << 22))
        level, option = ctypes.c_uint64(1 | 1 << 32), ctypes.c_uint64(7 | 1 << 32)
        expect_blocked(
            lambda: libc_call("syscall", 54, end.fileno(), level, option, value, ctypes.c_uint64(4))
        )""",
    "A09 a signal that wakes what is stopped": """
        import fcntl
        timer = ctypes.c_void_p()
        expect_blocked(lambda: libc_call("timer_create", 1, None, ctypes.byref(timer)))
        read, write = os.pipe()
        expect_blocked(lambda: fcntl.fcntl(read, 10, signal.SIGCONT))
        expect_blocked(lambda: libc_call("prctl", 1, signal.SIGCONT, 0, 0, 0))""",
    "A09 locks that nobody counts": """
        import fcntl
        file = open("locked", "w")
        fcntl.lockf(file, fcntl.LOCK_EX, 1)  # as SQLite does
        expect_blocked(lambda: fcntl.fcntl(file, 37, bytes(32)))""",
    "A11 symbolic and hard links": """
        os.symlink("{secret}", "link")
        expect_blocked(lambda: open("link").read())
        expect_blocked(lambda: os.link("{secret}", "hard"))
        expect_blocked(lambda: open("../" * 20 + "{secret}").read())""",
    "A11 become root": """
        expect_blocked(lambda: os.setuid(0 if os.getuid() else 1))
        expect_blocked(lambda: os.setgroups([0]))
        expect_blocked(lambda: libc_call("unshare", 0x10000000))
        expect_blocked(lambda: libc_call("syscall", 56, 0x10000000 | 17, 0, 0, 0, 0))
        expect_blocked(lambda: os.chroot("/tmp"))
        expect_blocked(lambda: libc_call("mount", b"x", b"/tmp", b"tmpfs", 0, None))
        expect_blocked(lambda: libc_call("umount2", b"/tmp", 2))""",
    "A11 rights that were left": """
        held = (ctypes.c_uint32 * 6)(*[1] * 6)
        libc_call("capget", (ctypes.c_uint32 * 2)(0x20080522, 0), held)
        no_more = libc.prctl(39, 0, 0, 0, 0)  # PR_GET_NO_NEW_PRIVS
        print("blocked" if set(held) == {0} and no_more == 1 else "ESCAPED")""",
    "A11 devices and kernel interfaces": """
        expect_blocked(lambda: os.mknod("disk", 0o60666, os.makedev(8, 0)))
        expect_blocked(lambda: open("/proc/sys/kernel/core_pattern", "w"))
        expect_blocked(lambda: open("/proc/sysrq-trigger", "w"))
        expect_blocked(lambda: libc_call("syscall", 425, 1, None))
        expect_blocked(lambda: libc_call("syscall", 321, 0, None, 0))
        expect_blocked(lambda: open("/sys/kernel/security/x").read())
        expect_blocked(lambda: os.open("/dev/kmsg", os.O_RDONLY))""",
}

# Name of the attack: program, what its output must show.
BOUNDED = {
    "A08 thread bomb": (
        """
        import threading
        threading.stack_size(1 << 16)
        for n in range(1000):
            try:
                threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
            except RuntimeError:
                print("blocked", n, flush=True)
                break
        os._exit(0)""",
        lambda result: result.stdout in ("blocked 15\n", "blocked 14\n"),
    ),
    "A09 memory of one process": (
        """
        def grow():
            held = []
            while True:
                held.append(bytearray(4 << 20))
                os.write(1, b"x")
        expect_blocked(grow, MemoryError)""",
        lambda result: 1 < result.stdout.count("x") * 4 <= 160 and "blocked" in result.stdout,
    ),
    "A10 many open files": (
        """
        def pile_up():
            held = []
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
                os.write(1, b"x")
        expect_blocked(pile_up)""",
        lambda result: result.stdout.count("x") < 32 and "blocked" in result.stdout,
    ),
    "A12 ignore every signal": (
        """
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                continue
        print("blocked later", flush=True)
        while True:
            time.sleep(1)""",
        lambda result: result.timed_out and result.wall_s < 3,
    ),
}
# Those of many processes and of a file system in memory.
BOUNDED_BY_NAMESPACES = {
    "A08 fork bomb": (
        """
        import itertools
        def count():
            for n in itertools.count():
                if os.fork() == 0:
                    time.sleep(30)
                os.write(1, b"x")
        expect_blocked(count)""",
        lambda result: 8 <= result.stdout.count("x") <= 17 and "blocked" in result.stdout,
    ),
    "A09 memory of all processes in sum": (
        """
        for n in range(10):
            if os.fork() == 0:
                held = []
                for m in range(12):
                    held.append(b"1" * (8 << 20))
                    os.write(1, b"x")
                    time.sleep(0.1)
                time.sleep(30)
        time.sleep(30)""",
        lambda result: result.out_of_memory and 80 < result.stdout.count("x") * 8 <= 400,
    ),
    "A09 memory in the buffers of sockets": (
        """
        import socket
        held = []
        for n in range(16):
            if n == 15 or os.fork() == 0:
                break
        while True:
            try:
                held += socket.socketpair()
            except OSError:
                time.sleep(30)
            for end in held[-2:]:
                end.setblocking(False)
                try:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
                except OSError:
                    pass
                try:
                    while True:
                        os.write(1, b"x" * (end.send(bytes(1 << 16)) >> 10))
                except BlockingIOError:
                    pass""",
        lambda result: result.out_of_memory and 1024 < _num_marks(result) < 160 * 1024,
    ),
    "A10 fill the disk": (
        """
        def fill():
            for n in range(100):
                with open(f"/tmp/{n}", "wb") as file:
                    file.write(bytes(1 << 20))
                os.write(1, b"x")
        expect_blocked(fill)
        import resource
        expect_blocked(lambda: open("/dev/shm/more", "wb").write(bytes(1 << 20)))""",
        lambda result: 4 <= result.stdout.count("x") <= 8 and result.stdout.count("blocked") == 2,
    ),
    "A10 many files": (
        """
        def touch():
            for n in range(100_000):
                os.close(os.open(f"/tmp/{n}", os.O_CREAT))
                os.write(1, b"x")
        expect_blocked(touch)""",
        lambda result: 200 < result.stdout.count("x") <= 256 and "blocked" in result.stdout,
    ),
}


def test_maps_are_memory():
    """A map takes some 200 bytes of the kernel's: 24 processes of 16,000 have more than 64 MiB."""
    limits = dataclasses.replace(LIMITS, memory_bytes=64 * MIB, timeout_s=60.0, num_processes=32)
    program = """
        import ctypes
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        for n in range(24):
            if os.fork() == 0:
                count = 0  # neighbours with other rights are maps of their own
                full = (None, 2**64 - 1)
                while libc.mmap(None, 4096, 1 + 2 * (count % 2), 0x22, -1, 0) not in full:
                    count += 1
                    if count % 1000 == 0:
                        os.write(1, b"x")
                time.sleep(60)
        time.sleep(60)"""
    result = Sandbox(limits=limits, isolation="bubblewrap").run(program_of(program, {}))
    assert result.out_of_memory, result
    assert _num_marks(result) > 100  # thousands; 262,144 maps are 64 MiB


def test_record_locks_are_memory():
    """A lock takes some 200 bytes of the kernel's; some 50,000 of them are what is left."""
    limits = dataclasses.replace(LIMITS, memory_bytes=64 * MIB, timeout_s=90.0, num_open_files=256)
    program = """
        import fcntl
        if os.fork() == 0:
            held = b"1" * (48 << 20)
            time.sleep(90)
        time.sleep(0.5)
        files = [open(f"/tmp/{n}", "w") for n in range(200)]
        for n in range(10_000_000):
            fcntl.lockf(files[n % 200], fcntl.LOCK_EX, 1, n // 200 * 2)
            if n % 500 == 0:
                os.write(1, b"x")"""
    result = Sandbox(limits=limits, isolation="bubblewrap").run(program_of(program, {}))
    assert result.out_of_memory, result
    assert 10 < _num_marks(result) <= 200


def _num_marks(result):
    """How many were printed, those that were cut too."""
    cut = re.search(r"\[\.\.\. (\d+) bytes were cut", result.stdout)
    return result.stdout.count("x") + (int(cut[1]) if cut else 0)


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    """What an attack could reach outside."""
    secret = tmp_path_factory.mktemp("home") / "secret"
    secret.write_text(CANARY)
    environment = {**os.environ, "SECRET": CANARY}
    sleeper = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True)
    abstract = f"\0{CANARY}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        udp.bind(("127.0.0.1", 0))
        unix.bind(abstract)
        unix.listen()
        yield {
            "parent": sleeper.pid,
            "group": sleeper.pid,
            "secret": str(secret),
            "project_file": __file__,
            "tcp_port": tcp.getsockname()[1],
            "udp_port": udp.getsockname()[1],
            "abstract": abstract,
        }
    assert sleeper.poll() is None
    sleeper.kill()
    sleeper.wait()
    assert secret.read_text() == CANARY


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def sandbox(request):
    os.environ["SECRET"] = CANARY
    yield Sandbox(limits=LIMITS, isolation=request.param)
    del os.environ["SECRET"]


@pytest.mark.parametrize("attack", BLOCKED)
def test_blocked(attack, sandbox, victim):
    result = sandbox.run(program_of(BLOCKED[attack], victim))
    assert result.succeeded, result
    assert "blocked" in result.stdout
    assert "ESCAPED" not in result.stdout
    assert CANARY not in result.stdout + result.stderr


@pytest.mark.parametrize("attack", BOUNDED)
def test_bounded(attack, sandbox):
    program, holds = BOUNDED[attack]
    result = sandbox.run(program_of(program, {}), timeout_s=1.0 if "A12" in attack else None)
    assert holds(result), result
    assert "ESCAPED" not in result.stdout


@pytest.mark.parametrize("attack", BOUNDED_BY_NAMESPACES)
def test_bounded_by_namespaces(attack):
    program, holds = BOUNDED_BY_NAMESPACES[attack]
    result = Sandbox(limits=LIMITS, isolation="bubblewrap").run(program_of(program, {}))
    assert holds(result), result
    assert "ESCAPED" not in result.stdout


@pytest.mark.parametrize(
    "attack",
    [
        "A02 a private file",
        "A03 write a private file",
        "A04 connect over TCP",
        "A05 send over UDP",
        "A05 abstract unix socket",
        "A07 signal the parent",
        "A07 signal a process group",
    ],
)
def test_the_attacks_are_real(attack, victim):
    """Without isolation they succeed."""
    open_sandbox = unsandboxed()
    program = program_of(BLOCKED[attack], victim).replace("recv(99)", "close()")
    with open(victim["secret"]) as file:
        secret = file.read()
    result = open_sandbox.run(program)
    with open(victim["secret"], "w") as file:
        file.write(secret)
    assert "ESCAPED" in result.stdout, result
    assert result.isolation == "none"

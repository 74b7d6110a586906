"""Programs of agents that attack their sandbox, and what agents do otherwise.

A program's reward is the number of attacks that were blocked; it ends with an error where one
escaped. As in `attacks`, what is outside is put in for the names in braces.
"""

from attacks import PRELUDE, program_of

from torchrl_envs.sandbox.syscall_filter import call_number

NUMBERS = {
    name: call_number(name)
    for name in (
        *("tgkill", "tkill", "rt_sigqueueinfo", "pidfd_send_signal", "bpf", "keyctl", "io_setup"),
        *("userfaultfd", "io_uring_setup", "process_vm_readv", "landlock_create_ruleset"),
        *("fsopen", "open_tree", "memfd_create", "perf_event_open"),
        *("utime", "utimes"),
    )
} | {"socket_call": call_number("socket")}
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
        for pid in ({trainer}, os.getppid(), -os.getpgid(os.getppid())):
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
        for _ in range(40):
            link = socket.socket()
            for _ in range(50):
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


def counting(program, names):
    """The whole program, which prints how many attacks were blocked."""
    return PRELUDE + COUNTS + program_of(program, names).removeprefix(PRELUDE) + TELLS


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
    check(shell("echo one | cat > a", "cat a <(echo two)").stdout == "one\\ntwo\\n", "a shell")
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
    libc_call("syscall", {utimes}, b"a", (ctypes.c_long * 4)(5, 250000, 7, 500000))
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

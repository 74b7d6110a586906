"""Programs that attack a sandbox: what they have in common, and the limits that they meet.

An attack says "blocked" if it was stopped and "ESCAPED" if not.
"""

import textwrap

import pytest

from torchrl_envs.sandbox import Sandbox, SandboxLimits, UnsandboxedCodeWarning
from torchrl_envs.sandbox.syscall_filter import call_number

MIB = 1024 * 1024
LIMITS = SandboxLimits(
    timeout_s=5.0,
    memory_bytes=160 * MIB,
    disk_bytes=8 * MIB,
    num_files=256,
    num_processes=16,
    num_open_files=32,
)
PRELUDE = """
import ctypes, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def libc_call(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
def expect_blocked(attack, *errors):
    try:
        found = attack()
    except (errors or OSError) as error:
        print("blocked", type(error).__name__)
    else:
        print("ESCAPED", found)
"""

# Name of the attack, program: what Landlock alone would not stop. What is outside is put in for the
# names in braces, and the numbers of system calls.
ON_LANDLOCK = {
    "L01 environment and memory of others": """
        for pid in ({trainer}, os.getppid(), os.getpid()):
            for name in ("environ", "mem", "maps", "fd/0", "root/etc/passwd", "cwd"):
                expect_blocked(lambda: os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
        expect_blocked(lambda: os.listdir("/proc"))""",
    "L02 lists of files": """
        for folder in ("/", "/tmp", "/dev", "/dev/shm", "..", "{folder}"):
            expect_blocked(lambda: os.listdir(folder))
        request = (ctypes.c_uint64 * 3)(24, 2**64 - 1, 0)
        expect_blocked(lambda: libc_call("syscall", 458, request, bytes(800), 99, 0))
        expect_blocked(lambda: os.getxattr("{secret}", "user.note"))
        expect_blocked(lambda: os.listxattr("{secret}"))""",
    "L03 write beside the folder": """
        for attack in (
            lambda: open("../{name}", "w"),
            lambda: open("{folder}/new", "w"),
            lambda: open("/dev/shm/{name}", "w"),
            lambda: os.mkdir("{folder}/new"),
            lambda: os.symlink("x", "{folder}/new"),
            lambda: os.mkfifo("{folder}/new"),
            lambda: os.unlink("{secret}"),
            lambda: os.rmdir(os.getcwd()),
            lambda: os.rename(os.getcwd(), "{folder}/new"),
        ):
            expect_blocked(attack)""",
    "L03 link and move files in and out": """
        os.close(os.open("own", os.O_CREAT))
        for attack in (
            lambda: os.link("{secret}", "hard"),
            lambda: os.link(os.__file__, "hard"),
            lambda: os.link("own", "{folder}/new"),
            lambda: os.rename("own", "{folder}/new"),
            lambda: os.rename("{secret}", "here"),
        ):
            expect_blocked(attack)""",
    "L04 modes, times and owners": """
        status = os.stat("{secret}")
        library = os.open(os.__file__, os.O_RDONLY)
        for place in ("{secret}", os.__file__, library):
            expect_blocked(lambda: os.chmod(place, 0o644))
            expect_blocked(lambda: os.utime(place, (status.st_atime, status.st_mtime)))
            expect_blocked(lambda: os.chown(place, status.st_uid, status.st_gid))
            expect_blocked(lambda: os.setxattr(place, "user.x", b"x"))
            expect_blocked(lambda: os.removexattr(place, "user.x"))""",
    "L04 flags, leases and locks of a library": """
        import fcntl
        library = os.open(os.__file__, os.O_RDONLY)
        expect_blocked(lambda: fcntl.ioctl(library, 0x80086601, bytearray(8)))
        expect_blocked(lambda: fcntl.ioctl(library, 0x40086602, bytearray(8)))
        expect_blocked(lambda: fcntl.fcntl(library, 1024, fcntl.F_RDLCK))
        expect_blocked(lambda: fcntl.fcntl(os.open(sys.prefix, os.O_RDONLY), 1026, 1))""",
    "L05 cut files": """
        size = os.stat("{secret}").st_size
        expect_blocked(lambda: os.truncate("{secret}", size))
        expect_blocked(lambda: os.truncate(os.__file__, os.stat(os.__file__).st_size))
        expect_blocked(lambda: os.open("{secret}", os.O_RDONLY | os.O_TRUNC))
        for access in (os.O_RDONLY, os.O_ACCMODE):
            expect_blocked(lambda: os.open("{copy}/os.py", access | os.O_TRUNC))""",
    "L06 watch what others do": """
        expect_blocked(lambda: libc_call("inotify_add_watch",
            libc_call("inotify_init1", 0) or 3, b"{folder}", 0xFFF))
        expect_blocked(lambda: libc_call("inotify_init"))""",
    "L07 signals": """
        for pid in ({trainer}, os.getppid(), 0, -1):
            expect_blocked(lambda: os.kill(pid, 0))
        for pid in ({trainer}, os.getppid()):
            expect_blocked(lambda: libc_call("syscall", {tgkill}, pid, pid, 0))
            expect_blocked(lambda: libc_call("syscall", {tkill}, pid, 0))
            expect_blocked(lambda: libc_call("syscall", {rt_sigqueueinfo}, pid, 0, bytes(128)))
            expect_blocked(lambda: os.pidfd_open(pid))""",
    "L07 a signal that a descriptor sends": """
        import fcntl
        read, write = os.pipe()
        for command, value in ((8, {trainer}), (10, signal.SIGKILL), (15, bytes(8))):
            expect_blocked(lambda: fcntl.fcntl(read, command, value))
        import socket
        ends = socket.socketpair()
        for request in (0x8901, 0x8902):
            expect_blocked(lambda: fcntl.ioctl(ends[0], request, bytes(4)))""",
    "L08 outlive the supervisor, or hide from it": """
        expect_blocked(lambda: libc_call("prctl", 1, 0, 0, 0, 0))
        expect_blocked(lambda: libc_call("prctl", 4, 0, 0, 0, 0))""",
    "L08 limits of others": """
        import resource
        for pid in ({trainer}, os.getppid()):
            expect_blocked(lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE))
            expect_blocked(lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))""",
    "L09 processes and programs": """
        for attack in (
            lambda: os.fork() or os._exit(0),
            lambda: libc_call("vfork") or os._exit(0),
            lambda: libc_call("syscall", {clone}, signal.SIGCHLD, 0, 0, 0, 0) or os._exit(0),
            lambda: os.execv("/bin/true", ["true"]),
            lambda: libc_call("execveat", -100, b"/bin/true", None, None, 0),
        ):
            expect_blocked(attack)
        import subprocess
        expect_blocked(lambda: subprocess.run(["/bin/true"]))""",
    "L09 a thread with files of its own": """
        shared = (0x100, 0x200, 0x400, 0x800, 0x10000)  # of memory, folder, files, signals, number
        for missing in shared:
            libc.syscall.restype = ctypes.c_long
            expect_blocked(lambda: libc_call(
                "syscall", {clone}, sum(shared) - missing, 0, 0, 0, 0) or os._exit(0))""",
    "L10 sockets of others": """
        import socket
        for name in ({abstract!r}, "{socket}"):
            for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
                expect_blocked(lambda: socket.socketpair(type=kind)[0].sendto(b"x", name))
            expect_blocked(lambda: socket.socketpair()[0].connect(name))
            expect_blocked(lambda: socket.socketpair()[0].sendto(b"x", name))
        expect_blocked(lambda: socket.socketpair()[0].bind("mine"))
        expect_blocked(lambda: socket.socketpair()[0].listen())""",
    "L10 objects of System V": """
        for name, arguments in {
            "shmat": ({shared}, None, 0), "shmctl": ({shared}, 2, bytes(256)),
            "semctl": (0, 0, 12), "semop": (0, bytes(6), 1), "msgctl": (0, 2, bytes(256)),
            "msgsnd": (0, bytes(16), 1, 0o4000), "msgrcv": (0, bytes(16), 1, 0, 0o4000),
        }.items():
            if name in ("shmat", "msgrcv"):
                getattr(libc, name).restype = ctypes.c_long
            expect_blocked(lambda: libc_call(name, *arguments))""",
    "L11 files and memory that nobody counts": """
        import fcntl, socket
        expect_blocked(lambda: os.open(".", os.O_TMPFILE | os.O_RDWR))
        held = os.open("held", os.O_RDWR | os.O_CREAT)
        expect_blocked(lambda: libc_call("fallocate", held, 1, ctypes.c_long(0), ctypes.c_long(99)))
        ends = socket.socketpair()
        expect_blocked(lambda: socket.send_fds(ends[0], [b"x"], [held]))
        expect_blocked(lambda: fcntl.fcntl(os.pipe()[0], 1031, 1 << 20))
        expect_blocked(lambda: libc_call("syscall", 444, bytes(8), ctypes.c_size_t(8), 0))
        context = ctypes.byref(ctypes.c_long())
        expect_blocked(lambda: libc_call("syscall", {io_setup}, 9, context))""",
}
CALLS = {
    name: call_number(name) for name in ("clone", "tgkill", "tkill", "rt_sigqueueinfo", "io_setup")
}


def program_of(attack, victim):
    """The whole program, with what is outside put in for the names in braces."""
    attack = textwrap.dedent(attack)
    for name, value in victim.items():
        attack = attack.replace(f"{{{name}!r}}", repr(value)).replace(f"{{{name}}}", str(value))
    return PRELUDE + attack


def all_in_one(attacks, victim):
    """All attacks of a table in one program, each after its name."""
    each = [f"print({name!r})\n{textwrap.dedent(attack)}" for name, attack in attacks.items()]
    return program_of("\n".join(each), victim)


def unsandboxed():
    """A sandbox that runs code with the rights of this process."""
    with pytest.warns(UnsandboxedCodeWarning, match="rights of this process"):
        return Sandbox(isolation="none", allow_unsandboxed=True)

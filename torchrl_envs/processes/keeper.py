"""A program that runs a command, and leaves nothing of it behind.

``python -I -S keeper.py PARENT USER FOLDER COMMAND...`` ends when the command ends, with its
status; when the process PARENT, which started it, is gone, however that ended; and when a signal
tells it to. Whatever the command started is killed first, in sessions of its own too: orphans come
to this process. Nothing inside the command can be relied on for that: a tool may hold the
interpreter's lock for ever. USER runs the command; where that is empty, whoever runs this. FOLDER,
unless it is empty, is removed at the end. Run by its path, without the rest of the package.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


def main() -> None:
    """Run the command that the command line names."""
    parent, user, folder, command = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        gone = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    if os.getppid() != parent:  # it ended before it was watched
        return
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    child = _start(command, user)
    # Pipes and sockets are the command's: who waits for their end waits for nobody else.
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in {2, gone, woken, wake}:
            with contextlib.suppress(OSError):  # the one by which they were listed
                os.close(int(name))
    status = None
    while status is None:
        readable = select.select([gone, woken], [], [])[0]
        if gone in readable or set(os.read(woken, 4096)) - {signal.SIGCHLD}:
            break
        status = _reap(child)
    _kill_descendants()
    if folder:
        _remove(folder)
    # It ends as the command did.
    if status is None or status < 0:
        number = signal.SIGKILL if status is None else -status
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # its effect can't be changed
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(status or 0)


def _start(command: list[str], user: str) -> int:
    keeper = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        if user:
            os.setgroups([])
            os.setresgid(int(user), int(user), int(user))
            os.setresuid(int(user), int(user), int(user))
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == keeper:
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _reap(child: int) -> int | None:
    """The child's exit code, or the negative number of its signal, once it has ended."""
    ended = None
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == child:
                ended = os.waitstatus_to_exitcode(found[1])
    return ended


def _kill_descendants() -> None:
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            children: dict[int, list[int]] = {}
            for name in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
                    children.setdefault(parent, []).append(int(name))
            found = list(children.get(os.getpid(), []))
            for pid in found:
                found += children.get(pid, [])
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def _remove(folder: str) -> None:
    """Remove a folder, also where folders in it were made unreadable."""
    with contextlib.suppress(RecursionError):  # whoever has started this removes the rest
        for place, names, _ in os.walk(folder):
            for name in names:
                if not os.path.islink(f"{place}/{name}"):
                    with contextlib.suppress(OSError):
                        os.chmod(f"{place}/{name}", 0o700)
        for place, _, _ in os.walk(folder, topdown=False):
            for name in os.listdir(place):
                with contextlib.suppress(OSError):  # a folder that is removed already
                    os.unlink(f"{place}/{name}")
            with contextlib.suppress(OSError):
                os.rmdir(place)


if __name__ == "__main__":
    main()

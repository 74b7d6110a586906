"""Command line of bubblewrap: a file system of its own, and namespaces."""

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from .interpreter import Interpreter
from .users import UNPRIVILEGED_USER, changes_user

DEVICES = ("null", "zero", "full", "random", "urandom")


def bubblewrap_command(interpreter: Interpreter) -> list[str]:
    """Everything before the interpreter's own command line; it dies with the thread that starts it.

    Args:
        interpreter: decides what is readable.
    """
    own = ["--as-pid-1"]
    if not changes_user():
        user = str(UNPRIVILEGED_USER)
        own += ["--unshare-user", "--uid", user, "--gid", user]
        own += ["--cap-add", "CAP_SYS_ADMIN"]  # to mount /tmp; given up after that
    own += ["--dir", "/dev"]
    for name in DEVICES:
        own += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    own += ["--dir", "/tmp", "--symlink", "../tmp", "/dev/shm", "--chdir", "/"]
    return bubblewrap(interpreter.readable, own)


def bubblewrap(readable: Sequence[str], own: Iterable[str]) -> list[str]:
    """A file system of what is readable, in namespaces of its own.

    Args:
        readable: absolute paths; those that are not there are left out.
        own: further options, of what is mounted before them.
    """
    command = [shutil.which("bwrap") or "bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc"]
    command += ["--unshare-uts", "--hostname", "sandbox", "--unshare-cgroup-try", "--new-session"]
    command += ["--die-with-parent", *own]
    above = {str(parent) for path in readable for parent in PurePosixPath(path).parents}
    for path in sorted(above - {"/"}):  # each after its own parent
        command += ["--dir", path]  # else they are made unreadable for others
    for path in dict.fromkeys(readable):
        if any(str(parent) in readable for parent in PurePosixPath(path).parents):
            continue  # with that
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    return [*command, "--proc", "/proc", "--remount-ro", "/", "--"]

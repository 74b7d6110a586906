"""The command line of bubblewrap: a file system of its own, and namespaces."""

import os
import shutil
from collections.abc import Iterable
from pathlib import PurePosixPath

from .interpreter import Interpreter
from .users import UNPRIVILEGED_USER, changes_user

_DEVICES = ("null", "zero", "full", "random", "urandom")


def bubblewrap_missing() -> str | None:
    """What to install, or ``None``."""
    if shutil.which("bwrap") is not None:
        return None
    return (
        "bubblewrap (the command `bwrap`) is not installed: on Debian and Ubuntu "
        "`apt-get install bubblewrap`, on Fedora `dnf install bubblewrap`"
    )


def bubblewrap_command(interpreter: Interpreter) -> list[str]:
    """Everything before the interpreter's own command line; it dies with the thread that starts it.

    Args:
        interpreter: decides what is readable.
    """
    command = [shutil.which("bwrap") or "bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc"]
    command += ["--unshare-uts", "--hostname", "sandbox", "--unshare-cgroup-try", "--new-session"]
    command += ["--as-pid-1", "--die-with-parent"]
    if not changes_user():
        user = str(UNPRIVILEGED_USER)
        command += ["--unshare-user", "--uid", user, "--gid", user]
        command += ["--cap-add", "CAP_SYS_ADMIN"]  # to mount /tmp; given up after that
    for path in _ancestors(("/dev/null", *interpreter.readable)):
        command += ["--dir", path]  # else they are made unreadable for others
    for path in dict.fromkeys(interpreter.readable):
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    for name in _DEVICES:
        command += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    command += ["--dir", "/tmp", "--symlink", "../tmp", "/dev/shm"]
    command += ["--proc", "/proc", "--remount-ro", "/", "--chdir", "/"]
    return [*command, "--"]


def _ancestors(paths: Iterable[str]) -> list[str]:
    """The directories above some paths, each after its own parent."""
    found = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
    return sorted(found - {"/"})

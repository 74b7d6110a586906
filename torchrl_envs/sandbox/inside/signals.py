"""Signals that a program may send where Landlock does not restrict them, before Linux 6.12.

Sessions of a program are made by its own processes, and a group of processes is in one session. So
a group that has one of its processes has no other one.
"""

import errno
import os

from . import memory

CALLS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
"""Calls whose first argument is the number of a process, a thread or, below 0, a group."""
_ALL = -1


def answer_signal(call, supervisor):
    """Let a signal pass to what the supervisor's program has started; refuse others."""
    target = call.integer(0)
    own = memory.descendants(supervisor)
    if target == _ALL:
        is_own = False  # would reach all that this user has
    elif target > 0:
        is_own = _process_of(target) in own
    else:
        is_own = target == 0 or any(_group_of(pid) == -target for pid in own)
    if is_own:
        call.go_on()
    else:
        call.fail(errno.EPERM)


def _process_of(task):
    """The process of a thread."""
    try:
        with open(f"/proc/{task}/status", "rb") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(b"Tgid:"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _group_of(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0

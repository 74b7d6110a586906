"""Number of threads of a program, which asks its supervisor for each."""

import errno
import os

from . import asking


def answer_call(listener, pid, most):
    """Let a thread be started while there are fewer; else the call fails as at a limit."""
    # Threads that are started by several others at once are not yet seen: of them one is let too
    # many for each, so that there are never twice as many.
    call = asking.next_call(listener)
    if call is None:
        return
    try:
        num_threads = len(os.listdir(f"/proc/{pid}/task"))
    except OSError:  # it is gone
        return
    if num_threads < most:
        call.go_on()
    else:
        call.fail(errno.EAGAIN)

"""Number of threads of a program, which asks its supervisor for each: seccomp's notifications."""

import _socket
import ctypes
import errno
import fcntl
import os
import select
import sys

from . import kernel

_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_NOTIFICATION_BYTES, _REPLY_BYTES = 80, 24
_SENT, _MAX_BYTES = b"asks", 4096
_CONTINUE = 1
_ORDER = sys.byteorder


def ask_for_threads(config, supervisor):
    """Have each system call that starts a thread wait for an answer of the supervisor."""
    program = ctypes.byref(kernel.filter_program(config["thread_filter"]))
    number = ctypes.c_long(config["seccomp_number"])
    listener = kernel.call_libc("syscall", number, _SET_MODE_FILTER, _NEW_LISTENER, program)
    link = _socket.socket(fileno=supervisor)
    right = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, listener.to_bytes(4, _ORDER))
    link.sendmsg([_SENT], [right])
    link.detach()
    os.close(listener)


def received_listener(worker):
    """Descriptor by which a worker asks for threads, or -1; and its message about its start."""
    link = _socket.socket(fileno=worker)
    said, rights, *_ = link.recvmsg(_MAX_BYTES, _socket.CMSG_SPACE(4))
    listener = int.from_bytes(rights[0][2], _ORDER) if rights else -1
    if rights:
        said = said.removeprefix(_SENT) or link.recv(_MAX_BYTES)
    link.detach()
    return listener, said


def answer_call(listener, pid, most):
    """Let a thread be started while there are fewer; else the call fails as at a limit."""
    # Threads that are started by several others at once are not yet seen: of them one is let too
    # many for each, so that there are never twice as many.
    ready = select.poll()
    ready.register(listener, select.POLLIN)
    if not any(events & select.POLLIN for _, events in ready.poll(0)):
        return  # nobody is left who could ask
    question, reply = bytearray(_NOTIFICATION_BYTES), bytearray(_REPLY_BYTES)
    try:
        fcntl.ioctl(listener, _RECEIVE, question)
        reply[:8] = question[:8]
        if len(os.listdir(f"/proc/{pid}/task")) < most:
            reply[20:24] = _CONTINUE.to_bytes(4, _ORDER)
        else:
            reply[16:20] = (-errno.EAGAIN).to_bytes(4, _ORDER, signed=True)
        fcntl.ioctl(listener, _SEND, reply)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EINTR, errno.ESRCH):  # who asked is gone
            raise

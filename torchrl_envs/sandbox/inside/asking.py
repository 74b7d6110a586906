"""System calls that wait for an answer of the supervisor: seccomp's notifications."""

import _socket
import ctypes
import errno
import fcntl
import os
import select
import struct
import sys

from . import kernel

_SET_MODE_FILTER, _NEW_LISTENER, _WAIT_KILLABLE = 1, 8, 32
_RECEIVE, _SEND, _ADD_DESCRIPTOR = 0xC0502100, 0xC0182101, 0x40182103
_CALL = struct.Struct("=QIIiIQ6Q")
_REPLY = struct.Struct("=QqiI")
_DESCRIPTOR = struct.Struct("=QIIII")
_SENT, _MAX_BYTES = b"asks", 4096
_CONTINUE = 1
_ORDER = sys.byteorder
_GONE = (errno.ENOENT, errno.EINTR, errno.ESRCH)


def load_asking_filter(config, supervisor, goes_on=False):
    """Have each system call of the filter wait for an answer of the supervisor."""
    # goes_on: a signal interrupts none that is being answered, where the kernel can do that (5.19);
    # else a program that does not restart its calls would find its fork has failed.
    program = ctypes.byref(kernel.filter_program(config["asking_filter"]))
    number = ctypes.c_long(config["seccomp_number"])
    flags = _NEW_LISTENER | (_WAIT_KILLABLE if goes_on else 0)
    try:
        listener = kernel.call_libc("syscall", number, _SET_MODE_FILTER, flags, program)
    except OSError as error:
        if not goes_on or error.errno != errno.EINVAL:
            raise
        listener = kernel.call_libc("syscall", number, _SET_MODE_FILTER, _NEW_LISTENER, program)
    link = _socket.socket(fileno=supervisor)
    right = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, listener.to_bytes(4, _ORDER))
    link.sendmsg([_SENT], [right])
    link.detach()
    os.close(listener)


def received_listener(worker):
    """Descriptor by which a worker asks, or -1; and its message about its start."""
    link = _socket.socket(fileno=worker)
    said, rights, *_ = link.recvmsg(_MAX_BYTES, _socket.CMSG_SPACE(4))
    listener = int.from_bytes(rights[0][2], _ORDER) if rights else -1
    if rights:
        said = said.removeprefix(_SENT) or link.recv(_MAX_BYTES)
    link.detach()
    return listener, said


class Call:
    """A system call that waits, and its arguments as they are: no program can change them."""

    def __init__(self, listener, data):
        self._listener = listener
        self._id, self.task, _, self.number, _, _, *self.arguments = _CALL.unpack(data)

    def integer(self, place):
        """Return an argument as the int that the kernel reads."""
        number = self.arguments[place] & 0xFFFFFFFF
        return number - ((number >> 31) << 32)

    def go_on(self):
        """Let the kernel do it."""
        self._send(_REPLY.pack(self._id, 0, 0, _CONTINUE))

    def give(self, value):
        """End it with a value."""
        self._send(_REPLY.pack(self._id, value, 0, 0))

    def fail(self, number):
        """End it with an error."""
        self._send(_REPLY.pack(self._id, 0, -number, 0))

    def give_descriptor(self, descriptor, flags):
        """End it with a copy of a descriptor."""
        message = bytearray(_DESCRIPTOR.pack(self._id, 0, descriptor, 0, flags))
        try:
            number = fcntl.ioctl(self._listener, _ADD_DESCRIPTOR, message)
        except OSError as error:
            self.fail(error.errno)  # it has too many, or is gone
        else:
            self.give(number)

    def memory(self, address, size):
        """Return what its process has at an address, or less where it has less."""
        with open(f"/proc/{self.task}/mem", "rb", buffering=0) as memory:
            parts = b""
            while len(parts) < size:
                # Up to the end of a page at once: the next one may not be there.
                count = min(size - len(parts), 4096 - (address + len(parts)) % 4096)
                try:
                    part = os.pread(memory.fileno(), count, address + len(parts))
                except (OSError, OverflowError):
                    break
                parts += part
                if not part:
                    break
            return parts

    def _send(self, reply):
        try:
            fcntl.ioctl(self._listener, _SEND, reply)
        except OSError as error:
            if error.errno not in _GONE:  # who asked is gone
                raise


def next_call(listener):
    """Return a call that waits, or ``None`` where none does any more."""
    ready = select.poll()
    ready.register(listener, select.POLLIN)
    if not any(events & select.POLLIN for _, events in ready.poll(0)):
        return None  # nobody is left who could ask
    data = bytearray(_CALL.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, data)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None
    return Call(listener, data)

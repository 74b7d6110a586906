"""Messages over a socket between two processes: a length, and bytes."""

import socket
import struct
import time
from typing import Final

_LENGTH: Final = struct.Struct("!Q")
_READ_BYTES: Final = 1 << 16


def framed(data: bytes) -> bytes:
    """A message as it is sent."""
    return _LENGTH.pack(len(data)) + data


class Frames:
    """The messages that arrive at a socket, one by one."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._buffer = bytearray()

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message."""
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size, timeout_s))
        data = self._read(_LENGTH.size + size, timeout_s)[_LENGTH.size :]
        self._buffer.clear()
        return data

    def _read(self, size: int, timeout_s: float | None) -> bytes:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (missing := size - len(self._buffer)) > 0:
            if deadline is not None:
                self._link.settimeout(max(1e-3, deadline - time.monotonic()))
            data = self._link.recv(min(missing, _READ_BYTES))
            if not data:
                raise EOFError("the other side closed the socket")
            self._buffer += data
        return bytes(self._buffer[:size])

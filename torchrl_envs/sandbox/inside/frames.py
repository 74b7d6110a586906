"""Messages between the parent, the supervisor and the worker: a length, then a marshalled value.

The supervisor answers its parent in lines of ASCII, because what comes out of a sandbox is not
unmarshalled outside.
"""

import marshal
import os
import struct

_LENGTH = struct.Struct(">I")
_MARSHAL_VERSION = 2


def framed_bytes(value):
    """A message as bytes."""
    body = marshal.dumps(value, _MARSHAL_VERSION)
    return _LENGTH.pack(len(body)) + body


def read_message(fd):
    """The next message, or ``None`` at the end."""
    header = _read_exactly(fd, _LENGTH.size)
    if header is None:
        return None
    body = _read_exactly(fd, _LENGTH.unpack(header)[0])
    return None if body is None else marshal.loads(body)


def write_all(fd, data):
    """Write all of some bytes."""
    while data:
        data = data[os.write(fd, data) :]


def _read_exactly(fd, size):
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)

"""A program that runs another one beside a door, which leads out of a network of its own.

``python -I -S relay.py DOOR PLACE COMMAND...``: connections to DOOR lead to PLACE. Each is the path
of a Unix socket or, of the network, ``host:port``. It ends when the command does, with its status,
and the command ends with it. Run by its path, without the rest of the package.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from functools import partial

_CHUNK_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


async def relay(door: str, place: str, command: list[str], inherited: list[int]) -> int:
    """Serve until the command has ended, which alone keeps the descriptors that were inherited."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # either side may go at any time
            if place.startswith("/"):
                inner = await asyncio.open_unix_connection(place)
            else:
                inner = await asyncio.open_connection(*place.rsplit(":", 1))
            await asyncio.gather(_copy(reader, inner[1]), _copy(inner[0], writer))
        writer.close()

    if door.startswith("/"):
        serving = asyncio.start_unix_server(serve, door)
    else:
        serving = asyncio.start_server(serve, *door.rsplit(":", 1))
    async with await serving:
        dies_with_parent = partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            child = await asyncio.create_subprocess_exec(
                *command, pass_fds=inherited, preexec_fn=dies_with_parent
            )
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            return 127
        for number in inherited:
            os.close(number)
        return await child.wait()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


if __name__ == "__main__":
    descriptors = []  # those that are open, but for standard error
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one by which they were listed
            os.fstat(int(name))
            descriptors += [] if name == "2" else [int(name)]
    status = asyncio.run(relay(sys.argv[1], sys.argv[2], sys.argv[3:], descriptors))
    os._exit(status if status >= 0 else 128 - status)

"""A program that runs a browser in a network of its own, from which one door leads out.

``python -I -S relay.py SOCKET PORT COMMAND...``: connections to PORT of the loopback lead to the
Unix socket SOCKET. It ends when the command does, with its status, and the command ends with it.
Run by its path, without the rest of the package.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys

_CHUNK_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


async def relay(path: str, port: int, command: list[str], inherited: list[int]) -> int:
    """Serve until the command has ended, which alone keeps the descriptors that were inherited."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # either side may go at any time
            inner = await asyncio.open_unix_connection(path)
            await asyncio.gather(_copy(reader, inner[1]), _copy(inner[0], writer))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", port):
        child = _start(command)
        for number in inherited:
            os.close(number)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, ended.set)
        while not (found := os.waitpid(child, os.WNOHANG))[0]:
            await ended.wait()
            ended.clear()
        return os.waitstatus_to_exitcode(found[1])


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


def _start(command: list[str]) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        if os.getppid() == parent:
            os.execv(command[0], command)
    finally:
        os._exit(127)


if __name__ == "__main__":
    descriptors = []  # those that are open, but for standard error
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one by which they were listed
            os.fstat(int(name))
            descriptors += [] if name == "2" else [int(name)]
    status = asyncio.run(relay(sys.argv[1], int(sys.argv[2]), sys.argv[3:], descriptors))
    os._exit(status if status >= 0 else 128 - status)

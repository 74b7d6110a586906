"""Inside a worker: finds the handler, then answers requests until the socket closes."""

import pickle
import resource
import socket
from importlib import import_module

from torchrl_envs.tool_results import error_line

from .frames import Frames, framed


def serve_requests(descriptor: int) -> None:
    """A worker's life."""
    link = socket.socket(fileno=descriptor)
    link.settimeout(None)
    frames = Frames(link)
    setup = pickle.loads(frames.receive())
    try:
        handler = pickle.loads(frames.receive())
        for module in setup["preload"]:
            import_module(module)
        if setup["max_memory_mb"] is not None:
            with open("/proc/self/statm") as statm:
                in_use = int(statm.read().split()[5]) * resource.getpagesize()
            limit = in_use + setup["max_memory_mb"] * 2**20
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    except BaseException as error:
        link.sendall(framed(error_line(error).encode()))
        return
    link.sendall(framed(b""))
    while True:
        try:
            request = frames.receive()
        except EOFError:
            return
        link.sendall(framed(handler(request)))

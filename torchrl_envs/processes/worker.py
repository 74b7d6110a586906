"""Inside a worker: finds the functions, then answers calls until the socket closes."""

import functools
import pickle
import socket
from base64 import b64decode
from collections.abc import Callable, Mapping
from typing import Any

from torchrl_envs.concurrency.calls import run_call
from torchrl_envs.errors import EpisodeLostError
from torchrl_envs.tool_calls.results import error_line, value_text

from .frames import Frames, pack


def serve(descriptor: int) -> None:
    """A worker's life.

    Args:
        descriptor: of its socket.
    """
    link = socket.socket(fileno=descriptor)
    link.settimeout(None)
    frames = Frames(link)
    setup = frames.receive()
    try:
        functions = {n: pickle.loads(b64decode(data)) for n, data in setup["functions"].items()}
        _limit_memory(setup["max_memory_mb"])
    except BaseException as error:
        link.sendall(pack(error_line(error)))
        return
    link.sendall(pack(""))
    while True:
        try:
            name, arguments = frames.receive()
        except EOFError:
            return
        link.sendall(pack(_answer(functions[name], arguments, setup["max_bytes"])))


def _answer(
    function: Callable[..., Any], arguments: Mapping[str, Any], max_bytes: int
) -> tuple[str, str]:
    """Text alone goes back: objects of this side may not exist on the other."""
    outcome = run_call(functools.partial(function, **arguments))
    if outcome.error is None:
        outcome = run_call(functools.partial(value_text, outcome.value, max_bytes=max_bytes))
    if outcome.error is None:
        return "value", outcome.value
    kind = "lost" if isinstance(outcome.error, EpisodeLostError) else "error"
    return kind, error_line(outcome.error)


def _limit_memory(max_memory_mb: int | None) -> None:
    if max_memory_mb is None:
        return
    import resource

    with open("/proc/self/statm") as statm:
        held = int(statm.read().split()[5]) * resource.getpagesize()
    limit = held + max_memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

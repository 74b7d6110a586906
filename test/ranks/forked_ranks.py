"""Runs a function in several processes that were forked after the imports, as ranks."""

import os
import socket
import sys
import tempfile
import traceback
from pathlib import Path

import torch

from objectives import Ranks


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(size, function, *, joins=True, **limits):
    """What the function gives on each rank; `AssertionError` with the output of one that fails.

    What does not join here joins by itself, and is given the number of its rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        limits = limits if joins else None
        children = [_fork(rank, size, port, Path(folder), function, limits) for rank in range(size)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        errors = [(Path(folder) / f"{rank}.err").read_text() for rank in range(size)]
        assert not any(codes), f"{codes}\n" + "\n".join(errors)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _fork(rank, size, port, folder, function, limits):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        sys.stderr = (folder / f"{rank}.err").open("w", buffering=1)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if limits is None:
            torch.save(function(rank), folder / f"{rank}.pt")
        else:
            with Ranks.join(device="cpu", **{"timeout_s": 60.0, "wait_s": 60.0} | limits) as ranks:
                torch.save(function(ranks), folder / f"{rank}.pt")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)

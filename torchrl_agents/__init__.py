"""The program ``torchrl-agents``, and what every recipe of ``sota-implementations`` is made of."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from .command import recipes


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Nothing has begun yet: no exception, of which an import that it breaks off makes another."""
    del frame
    os.write(2, f"{signal.Signals(number).name}: stopping now\n".encode())
    os._exit(128 + number)


# A recipe imports this first: what has to be set before torch is imported, which takes seconds.
_main = os.path.realpath(getattr(sys.modules["__main__"], "__file__", None) or "")
if _main in map(os.path.realpath, recipes().values()):
    # Its threads spin for a moment, then leave the cores to the tools.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(_number) is not signal.SIG_IGN:
            signal.signal(_number, _end)

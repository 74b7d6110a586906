"""All public names under one: ``from torchrl_agents import ChatEnv, GRPOLoss, LLMCollector``.

They come from ``torchrl_data``, ``torchrl_modules``, ``torchrl_envs``, ``objectives`` and
``collectors``, each loaded when it is used. Here are also the program ``torchrl-agents`` and what
the recipes of ``sota-implementations`` are made of.
"""

import os
import signal
import sys
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from torchrl_data import __version__ as __version__
from torchrl_data import unknown_name

from .command import recipes

if TYPE_CHECKING:
    from collectors import *  # noqa: F403
    from objectives import *  # noqa: F403
    from torchrl_data import *  # noqa: F403
    from torchrl_envs import *  # noqa: F403
    from torchrl_modules import *  # noqa: F403

_PACKAGES = ("torchrl_data", "torchrl_modules", "torchrl_envs", "objectives", "collectors")


def __getattr__(name: str) -> Any:
    if name == "__all__":  # from torchrl_agents import *
        return sorted({n for package in _PACKAGES for n in import_module(package).__all__})
    for package in _PACKAGES if not name.startswith("_") else ():
        module, beside = import_module(package), os.path.dirname(os.path.dirname(__file__))
        if os.path.dirname(os.path.dirname(module.__file__ or "")) != beside:
            raise ImportError(
                f"torchrl_agents needs its own package {package}, but import finds "
                f"{module.__file__ or list(module.__path__)}, first in sys.path. Rename "
                "that one, or start Python from another folder."
            )
        if name in module.__all__:
            return getattr(module, name)
    raise unknown_name(__name__, name, [] if name.startswith("_") else __dir__())


def __dir__() -> list[str]:
    return sorted({*globals(), *(n for p in _PACKAGES for n in import_module(p).__all__)})


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

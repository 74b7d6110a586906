"""Functions that ``torch.compile`` compiles: it is logged, and the compiled code is kept."""

import logging
import os
import time
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import torch

_LOG = logging.getLogger("torchrl_agents")
_MOST_VERSIONS: Final = 64
"""Versions of a function; PyTorch's own limit of 8 is reached by a process with a few models."""
_SHOWN_S: Final = 0.5
"""A compilation that is shorter is not logged."""
_running: ContextVar[str | None] = ContextVar("running", default=None)
"""What is called that may be compiled."""


def cache_folder() -> Path:
    """Folder of what takes long to make; ``TORCHRL_AGENTS_CACHE`` if that is set."""
    given = os.environ.get("TORCHRL_AGENTS_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(shared) / "torchrl-agents"


class Compiled:
    """A function that is compiled when it is first called, and for other inputs again.

    Each compilation is logged with its time. The compiled code is kept in
    ``<cache folder>/compiled``, unless ``TORCHINDUCTOR_CACHE_DIR`` names another folder, so that
    the next process loads it. Where PyTorch gives up, because there are too many versions, the
    function runs as it is, with one warning that says why.

    Args:
        function: without graph breaks.
        name: for the log.
        slow: what a call without compilation costs, for the warning.
        **options: of ``torch.compile``.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, *, slow: str, **options: Any
    ) -> None:
        self.name = name
        self._function, self._slow = function, slow
        self._options: dict[str, Any] = {"fullgraph": True, **options}
        self._compiled: Callable[..., Any] | None = None
        self._is_full = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if torch.compiler.is_compiling():  # a part of what is compiled around it
            return self._function(*args, **kwargs)
        if self._compiled is None:
            _keep_compiled_code()
            _watch()
            self._compiled = torch.compile(self._function, **self._options)
        if self._is_full:
            with torch.compiler.set_stance("eager_on_recompile"):
                return self._compiled(*args, **kwargs)
        token = _running.set(self.name)
        try:
            return self._compiled(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit:  # type: ignore[attr-defined]
            self._is_full = True
            warnings.warn(
                f"{self.name} is not compiled for other inputs from now on, so {self._slow}: "
                f"PyTorch's limit of {torch._dynamo.config.recompile_limit} versions of a function "
                "is reached (TORCH_LOGS=recompiles shows why it compiles again).",
                stacklevel=2,
            )
        finally:
            _running.reset(token)
        return self._function(*args, **kwargs)


def _keep_compiled_code() -> None:
    """Let PyTorch keep compiled code in the library's cache folder."""
    # PyTorch names its own default here as soon as it has looked: torchinductor_<user>.
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if named is not None and not Path(named).name.startswith("torchinductor_"):
        return
    folder = cache_folder() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _LOG.info("compiled code is kept in a temporary folder: %s", error)
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


class _Watch:
    """Logs compilations of this process as they end."""

    def __init__(self) -> None:
        self._begin = 0.0

    def start(self, _: Any) -> None:
        """Called by PyTorch."""
        self._begin = time.perf_counter()

    def end(self, about: Any) -> None:
        """Called by PyTorch."""
        taken = time.perf_counter() - self._begin
        if taken >= _SHOWN_S:
            # A backward pass is compiled when it first runs, outside of the call.
            name = _running.get() or f"a backward pass ({about.compile_id})"
            _LOG.info("%s: compiled in %.1f s", name, taken)


_watches: list[_Watch] = []


def _watch() -> None:
    """Begin to log, once, and let a function have more versions."""
    if _watches:
        return
    _watches.append(watch := _Watch())
    # Dynamo asks every tensor that it goes on with behind a break for its gradient.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    dynamo: Any = torch._dynamo
    callback_handler = dynamo.callback.callback_handler
    callback_handler.register_start_callback(watch.start)
    callback_handler.register_end_callback(watch.end)
    config = dynamo.config
    config.recompile_limit = max(config.recompile_limit, _MOST_VERSIONS)

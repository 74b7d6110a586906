"""A server of SGLang that an engine has to itself."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torchrl_modules.engines.server_engines import OwnedServer

from .server_engine import SGLangServerEngine


class OwnSGLangServer(OwnedServer):
    """An :class:`~torchrl_modules.AsyncEngine` that has its server of SGLang to itself.

    Args:
        start: the URL of a server that runs; or gives a context manager that starts one, gives its
            URL, and ends it on leaving, such as ``partial(start_sglang_server, model)``.
        client_settings: of :class:`~torchrl_modules.SGLangServerEngine`, for instance
            ``stall_timeout_s``.

    Raises:
        ConnectionError: nobody answers at the URL.
        RuntimeError: the server can't be started, or can't be drawn from exactly.
    """

    def __init__(
        self, start: str | Callable[[], AbstractContextManager[str]], **client_settings: Any
    ) -> None:
        super().__init__(start, SGLangServerEngine, **client_settings)

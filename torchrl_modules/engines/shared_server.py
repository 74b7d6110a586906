"""A server that several engines have together: it is started once, and again when it died."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager


class _Running:
    """A server that runs, and how many have it."""

    def __init__(self, start: Callable[[], AbstractContextManager[str]]) -> None:
        self.process = ExitStack()
        self.url = self.process.enter_context(start())
        self.num_users = 0
        self.is_left = False
        """Whether somebody has left it: it has died for one of them, or all are leaving."""


class SharedServer:
    """Starts a server for the first that asks, and gives it to others that come.

    Called, it gives a context manager as what it is given does, and can be called again. Who leaves
    a server has seen it die, or is closed: the next one to come gets another server, and the old
    one ends before that is started, or when the last one leaves it.

    Args:
        start: gives a context manager that starts a server, gives its URL, and ends it on leaving.

    Example:
        >>> from contextlib import contextmanager
        >>> started = []
        >>> @contextmanager
        ... def start():
        ...     started.append(f"unix:///server-{len(started)}")
        ...     yield started[-1]
        >>> server = SharedServer(start)
        >>> with server() as first, server() as second:
        ...     print(first, second)
        unix:///server-0 unix:///server-0
        >>> with server() as third:
        ...     print(third)
        unix:///server-1
    """

    def __init__(self, start: Callable[[], AbstractContextManager[str]]) -> None:
        self._start = start
        self.name: str = getattr(start, "name", "")
        """What messages call it."""
        self._lock = threading.Lock()
        self._running: _Running | None = None

    @contextmanager
    def __call__(self) -> Iterator[str]:
        """Give the URL of the server that runs, or of one that is started; it is left afterwards.

        Raises:
            Exception: what starting it raised.
        """
        with self._lock:
            if self._running is None or self._running.is_left:
                if self._running is not None:
                    self._running.process.close()  # before another one needs its memory
                    self._running = None
                self._running = _Running(self._start)
            own = self._running
            own.num_users += 1
        try:
            yield own.url
        finally:
            with self._lock:
                own.is_left = True
                own.num_users -= 1
                if not own.num_users:
                    own.process.close()

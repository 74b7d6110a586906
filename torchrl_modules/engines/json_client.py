"""JSON over HTTP: the client with which an engine asks its server."""

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import httpcore2

from .loop_thread import LoopThread

# A server closes a connection that was idle for some seconds (uvicorn: 5).
_KEEP_IDLE_S: Final = 2.0


def without_token(url: str) -> tuple[str, str | None]:
    """Return a URL without the token that stands in it, and the token.

    Example:
        >>> without_token("http://:secret@node:8000")
        ('http://node:8000', 'secret')
    """
    parts = urlsplit(url)
    token = parts.password or parts.username
    if token:
        url = url.replace(f"{parts.netloc.rpartition('@')[0]}@", "", 1)
    return url, token


class AnswerTimeout(ConnectionError):
    """Somebody is there, but did not answer in time."""


class JSONClient:
    """Sends JSON and reads JSON, from any number of threads.

    Args:
        url: ``http://host:port``, or ``unix:///path/of/the/socket``; a ``/v1`` at its end is left
            out.
        timeout_s: without an answer for so long a request raises :class:`AnswerTimeout`.
        token: sent as ``Authorization: Bearer``; none is sent without it.
        num_connections: most requests at a time; others wait.

    Raises:
        ValueError: the URL is another one.
    """

    def __init__(
        self, url: str, timeout_s: float, *, token: str | None = None, num_connections: int = 8
    ) -> None:
        parts = urlsplit(url)
        is_file = parts.scheme == "unix"
        if parts.scheme not in ("http", "https", "unix") or not (parts.netloc or is_file):
            raise ValueError(f"The URL must be http://host:port or unix:///path, got {url!r}.")
        self.url = url
        self._base = "http://localhost" if is_file else url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeouts = dict.fromkeys(("connect", "read", "write"), timeout_s)
        self._running: set[asyncio.Task[Any]] = set()
        self._is_over = False
        self.loop = LoopThread(f"JSONClient({url!r})")
        """Where requests are made."""
        self._pool = httpcore2.AsyncConnectionPool(
            max_connections=num_connections,
            max_keepalive_connections=num_connections,
            keepalive_expiry=_KEEP_IDLE_S,
            uds=parts.path if is_file else None,
        )

    def request(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Send one request; status and answer, as text where it is no JSON, ``None`` if empty."""
        try:
            return self.loop.run(self.ask(method, path, body))
        except (RuntimeError, CancelledError):
            if self._is_over:
                raise self._lost("the client is closed") from None
            raise

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Make a `request` in `loop`; the server learns at once of a call that is cancelled."""
        if self._is_over:
            raise self._lost("the client is closed")
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        content = b"" if body is None else json.dumps(body).encode()
        try:
            async with self._pool.stream(
                method,
                self._base + path,
                headers=[*self._headers.items(), ("Content-Length", str(len(content)))],
                content=content,
                extensions={"timeout": self._timeouts},
            ) as response:
                answer = await response.aread()
                if response.status >= 500:  # vLLM drops the connection, which it does not say
                    await response.extensions["network_stream"].aclose()
        except httpcore2.TimeoutException as error:
            raise AnswerTimeout(f"No answer from {self.url}: it timed out ({error!r}).") from error
        except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            raise self._lost(repr(error)) from error
        except asyncio.CancelledError:
            if self._is_over:
                raise self._lost("the request was ended") from None
            raise
        finally:
            self._running.discard(task)
        text = answer.decode()
        try:
            return response.status, json.loads(text) if text else None
        except json.JSONDecodeError:
            return response.status, text

    def _lost(self, reason: str) -> ConnectionError:
        return ConnectionError(f"No answer from {self.url}: {reason}.")

    def await_answer(self, path: str, wait_s: float, *, goes_on: Callable[[], bool]) -> bool:
        """Ask until the answer is 200, for at most ``wait_s`` and while ``goes_on()``."""
        deadline = time.monotonic() + wait_s
        while goes_on():
            with suppress(ConnectionError):
                if self.request("GET", path)[0] == 200:
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.2)
        return False

    def interrupt(self) -> None:
        """Let everybody who waits for an answer go, and who comes later, with `ConnectionError`."""
        with suppress(RuntimeError):  # it was closed meanwhile
            self.loop.submit(self._end())

    async def _end(self) -> None:
        self._is_over = True
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        await self._pool.aclose()

    def close(self) -> None:
        """Stop as `interrupt` does, and end the thread. May be called twice."""
        with suppress(RuntimeError):  # it is closed
            self.loop.run(self._end())
        self.loop.close()

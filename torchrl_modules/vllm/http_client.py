"""JSON over HTTP, to an address or to a socket file; one connection per thread."""

import http.client
import json
import socket
import threading
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit


class AnswerTimeout(ConnectionError):
    """Somebody is there, but did not answer in time."""


class _SocketFileConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class JSONClient:
    """Sends JSON and reads JSON.

    Args:
        url: ``http://host:port`` or ``unix:///path/of/the/socket``.
        timeout_s: for connecting, and for each answer.

    Raises:
        ValueError: the URL is of another kind.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "unix"):
            raise ValueError(f"The URL must begin with http:// or unix://, got {url!r}.")
        self.url = url
        self._parts = parts
        self._timeout_s = timeout_s
        self._local = threading.local()
        self._open: list[http.client.HTTPConnection] = []

    def request(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Send one request and wait for the answer.

        Args:
            method: ``"GET"`` or ``"POST"``.
            path: with its query.
            body: sent as JSON.

        Returns:
            Status and answer; an answer that is no JSON as text, an empty one as ``None``.

        Raises:
            AnswerTimeout: there was no answer in time.
            ConnectionError: nobody answers at the URL.
        """
        payload = None if body is None else json.dumps(body)
        while True:
            connection, is_new = self._connection()
            try:
                connection.request(method, path, payload, {"Content-Type": "application/json"})
                response = connection.getresponse()
                text = response.read().decode()
            except (OSError, http.client.HTTPException) as error:
                self._forget(connection)
                # A server closes a connection that was idle for some seconds.
                if isinstance(error, ConnectionResetError | BrokenPipeError) and not is_new:
                    continue
                if isinstance(error, TimeoutError):
                    raise AnswerTimeout(f"No answer from {self.url}: {error!r}.") from error
                raise ConnectionError(f"No answer from {self.url}: {error!r}.") from error
            return response.status, _parse(text)

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            return connection, False
        if self._parts.scheme == "unix":
            connection = _SocketFileConnection(self._parts.path, self._timeout_s)
        else:
            connection = http.client.HTTPConnection(self._parts.netloc, timeout=self._timeout_s)
        self._local.connection = connection
        self._open.append(connection)
        return connection, True

    def _forget(self, connection: http.client.HTTPConnection) -> None:
        connection.close()
        self._open.remove(connection)
        self._local.connection = None

    def interrupt(self) -> None:
        """Let everybody who waits for an answer go, with a ``ConnectionError``."""
        for connection in list(self._open):
            if connection.sock is not None:
                with suppress(OSError):  # it ended by itself
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections of all threads; nobody may be waiting."""
        while self._open:
            self._open.pop().close()


def _parse(text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except json.JSONDecodeError:
        return text

"""JSON over HTTP with a token: the client's end, and the guard in front of a server's routes."""

import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import httpcore2

from torchrl_modules.engines.load import EngineLoad, read_load
from torchrl_modules.engines.protocol import EngineDied

TOKEN_VARIABLE: Final = "TORCHRL_VLLM_TOKEN"
"""Holds the secret that a server asks for, at both ends."""

# A server closes a connection that was idle for some seconds (uvicorn: 5).
_KEEP_IDLE_S: Final = 2.0


class AnswerTimeout(ConnectionError):
    """Somebody is there, but did not answer in time."""


class Interrupt:
    """Ends one request, called from another thread: whoever waits gets a ``ConnectionError``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stream: _Stream | None = None
        self.is_set = False
        """Whether it was called."""

    def attach(self, stream: "_Stream") -> None:
        """The request goes over this connection."""
        with self._lock:
            self._stream = stream
            if self.is_set:
                stream.shut_down()

    def __call__(self) -> None:
        """End it."""
        with self._lock:
            self.is_set = True
            # A connection that another request has by now is left alone.
            if self._stream is not None and self._stream.interrupt is self:
                self._stream.shut_down()


class JSONClient:
    """Sends JSON and reads JSON, from any number of threads."""

    def __init__(
        self, url: str, timeout_s: float, *, token: str | None = None, num_connections: int = 8
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "unix"):
            raise ValueError(f"The URL must begin with http:// or unix://, got {url!r}.")
        self.url = url
        is_file = parts.scheme == "unix"
        self._base = "http://localhost" if is_file else f"http://{parts.netloc}"
        self._headers = {"Content-Type": "application/json"}
        if token := token or os.environ.get(TOKEN_VARIABLE):
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeouts = dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)
        self._sockets = _Sockets()
        self._pool = httpcore2.ConnectionPool(
            max_connections=num_connections,
            max_keepalive_connections=num_connections,
            keepalive_expiry=_KEEP_IDLE_S,
            uds=parts.path if is_file else None,
            network_backend=self._sockets,
        )

    def request(
        self, method: str, path: str, body: object = None, *, interrupt: Interrupt | None = None
    ) -> tuple[int, Any]:
        """Send one request; status and answer, as text where it is no JSON, ``None`` if empty."""
        content = b"" if body is None else json.dumps(body).encode()
        _asking.interrupt = interrupt
        try:
            response = self._pool.request(
                method,
                self._base + path,
                headers=[*self._headers.items(), ("Content-Length", str(len(content)))],
                content=content,
                extensions={"timeout": self._timeouts},
            )
        except httpcore2.TimeoutException as error:
            raise AnswerTimeout(f"No answer from {self.url}: it timed out ({error!r}).") from error
        except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            raise ConnectionError(f"No answer from {self.url}: {error!r}.") from error
        finally:
            _asking.interrupt = None
        return response.status, _parse(response.content.decode())

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
        """Let everybody who waits for an answer go, with a ``ConnectionError``."""
        self._sockets.shut_down()

    def close(self) -> None:
        """Close the connections of all threads; a later request raises ``ConnectionError``."""
        self._pool.close()
        self._sockets.close()


class _Asking(threading.local):
    """What this thread's request is interrupted by."""

    interrupt: Interrupt | None = None


_asking = _Asking()


class _Sockets(httpcore2.NetworkBackend):
    """Opens connections that can be interrupted from another thread."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *_: Any, **__: Any
    ) -> "_Stream":
        with _as_error(httpcore2.ConnectTimeout, httpcore2.ConnectError):
            connection = socket.create_connection((host, port), timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._kept(connection)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, *_: Any, **__: Any
    ) -> "_Stream":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _as_error(httpcore2.ConnectTimeout, httpcore2.ConnectError):
                connection.settimeout(timeout)
                connection.connect(path)
        except BaseException:
            connection.close()
            raise
        return self._kept(connection)

    def _kept(self, connection: socket.socket) -> "_Stream":
        with self._lock:
            if self._is_closed:  # while another thread came to connect: nobody would close it
                connection.close()
                raise httpcore2.ConnectError("the client is closed")
            self._open = [*(one for one in self._open if one.fileno() >= 0), connection]
        return _Stream(connection)

    def close(self) -> None:
        """Close those, too, that the pool has let go of after a request that was broken off."""
        with self._lock:
            for connection in self._open:
                connection.close()
            self._open, self._is_closed = [], True

    def shut_down(self) -> None:
        """Whoever reads reads the end."""
        for connection in self._open:
            with suppress(OSError):  # it ended by itself
                connection.shutdown(socket.SHUT_RDWR)


class _Stream(httpcore2.NetworkStream):
    """A connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.interrupt: Interrupt | None = None
        """Of the request that it carries."""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _as_error(httpcore2.ReadTimeout, httpcore2.ReadError):
            self._socket.settimeout(timeout)
            return self._socket.recv(max_bytes)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.interrupt = _asking.interrupt
        if self.interrupt is not None:
            self.interrupt.attach(self)
        with _as_error(httpcore2.WriteTimeout, httpcore2.WriteError):
            self._socket.settimeout(timeout)
            self._socket.sendall(buffer)

    def shut_down(self) -> None:
        """Whoever reads reads the end."""
        with suppress(OSError):  # it ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def get_extra_info(self, info: str) -> Any:
        if info != "is_readable":
            return None
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))


@contextmanager
def _as_error(timeout: type[Exception], other: type[Exception]) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise timeout(str(error)) from error
    except OSError as error:
        raise other(str(error)) from error


def _parse(text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except json.JSONDecodeError:
        return text


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class AccessControl:
    """ASGI middleware in front of every route: who may ask, and how."""

    # With a token in the environment every request needs it. A browser's page of another origin is
    # refused, and a body that is not JSON, which such a page could send unasked.

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._token = os.environ.get(TOKEN_VARIABLE, "")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        status, reason = self._refusal(scope, headers)
        if not status:
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        body = json.dumps({"error": {"message": reason}}).encode()
        kind = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": kind})
        return await send({"type": "http.response.body", "body": body})

    def _refusal(self, scope: Scope, headers: dict[bytes, str]) -> tuple[int, str]:
        sent = headers.get(b"authorization", "").encode()
        if self._token and not secrets.compare_digest(sent, f"Bearer {self._token}".encode()):
            return 401, f"This server asks for its token: set {TOKEN_VARIABLE}, or token=..."
        origin = headers.get(b"origin")
        if origin is not None and urlsplit(origin).netloc != headers.get(b"host"):
            return 403, f"Pages of another origin, {origin}, may not use this server."
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        has_body = headers.get(b"content-length", "0") != "0" or b"transfer-encoding" in headers
        if scope["type"] == "http" and has_body and kind != "application/json":
            return 415, f"A body has to be application/json, not {kind or 'of no type'}."
        return 0, ""


class ServerRoutes:
    """Asks a server, and says what it answers."""

    _client: JSONClient
    _prober: JSONClient

    def _raise_if_dead(self, error: Exception) -> None:
        try:
            self._check_health()
        except ConnectionError as dead:
            raise EngineDied(f"VLLMServerEngine.update_weights: {dead} ({error})") from dead

    def _check_health(self) -> None:
        status, _ = self._prober.request("GET", "/health")
        if status != 200:
            raise ConnectionError(f"The engine behind {self._prober.url} has died ({status}).")

    def check_health(self) -> None:
        """Ask the server whether it is well; ``EngineDied``, ``AnswerTimeout``: it is not."""
        try:
            self._check_health()
        except AnswerTimeout:
            raise
        except ConnectionError as error:
            raise EngineDied(f"VLLMServerEngine: {error}") from error

    @property
    def tells_load(self) -> bool:
        """Whether the server reports how full its cache is; it is asked."""
        return self._read_load() is not None

    def measure_load(self) -> EngineLoad:
        """How full the fullest of its caches is; recomputing after an update is preemption, too.

        Raises:
            ConnectionError: it did not answer.
            RuntimeError: it does not report that.
        """
        load = self._read_load()
        if load is None:
            raise RuntimeError(f"VLLMServerEngine: {self._prober.url}/metrics tells no load.")
        return load

    def _read_load(self) -> EngineLoad | None:
        return read_load(str(self._prober.request("GET", "/metrics")[1]))

    def _rpc(self, method: str, *args: str) -> dict[str, Any]:
        results = self._rpc_all(method, *args)
        kinds = {str(result if result is None else list(result)) for result in results}
        if len(kinds) > 1:
            return {"failed": f"the workers' answers to {method} differ: {results}"}
        return results[0]

    def _try_rpc(self, method: str) -> tuple[int, Any]:
        status, answer = self._client.request(
            "POST", "/collective_rpc", {"method": method, "args": []}
        )
        if status in (401, 403):
            raise PermissionError(f"VLLMServerEngine: {self._client.url} answers {answer}.")
        return status, answer

    def _rpc_all(self, method: str, *args: str) -> list[Any]:
        return self._post("/collective_rpc", {"method": method, "args": list(args)})["results"]

    def _post(self, path: str, body: object = None, *, method: str = "POST", **query: str) -> Any:
        if query:
            path = f"{path}?{urlencode(query)}"
        status, answer = self._client.request(method, path, body)
        if status != 200:
            raise RuntimeError(
                f"VLLMServerEngine: {path} at {self._client.url} answers {status}: {answer}. Was "
                "the server started by `python -m torchrl_modules.vllm.launch`?"
            )
        return answer

"""Servers that are started on another machine: who starts them there, and who asks for one.

A :class:`ServerHost` waits there. Who asks for a server keeps a connection to it, and the server
ends with this connection, however that ends.
"""

import base64
import json
import logging
import secrets
import socket
import socketserver
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit, urlunsplit

Model = str | Mapping[str, bytes]
"""Hub id or folder of a model that the other machine sees, or its files by name."""
Starter = Callable[..., AbstractContextManager[str]]
"""Starts a server of a model: takes ``devices=``, ``address=`` and its options, gives its URL."""
_LOG = logging.getLogger(__name__)
_CONNECT_S: Final = 20.0
_ENDS_S: Final = 60.0
_CLOSES_S: Final = 10.0
_LONGEST_TOKEN: Final = 1024
_KEPT_ALIVE: Final = (
    (socket.TCP_KEEPIDLE, 30),
    (socket.TCP_KEEPINTVL, 10),
    (socket.TCP_KEEPCNT, 3),
)
"""A machine that is gone is noticed after a minute: idle seconds, between two looks, looks."""


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of all addresses of this machine that nobody else is given, while it is entered.

    A server may listen on it meanwhile: it is bound here, and not listened on.
    """
    with socket.socket() as holder:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            holder.setsockopt(socket.SOL_SOCKET, option, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])


class ServerHost(socketserver.ThreadingTCPServer):
    """Starts servers on this machine for those who know its token.

    Args:
        starters: what starts a server, by the name of its library.
        token: a secret, which is asked for.

    Raises:
        ValueError: the token is none.

    Example:
        >>> with ServerHost({}, token="0123456789abcdef") as host:
        ...     host.port > 0
        True
    """

    daemon_threads = True

    def __init__(self, starters: Mapping[str, Starter], *, token: str) -> None:
        if len(token) < 16:
            raise ValueError("ServerHost: token= must be a secret of at least 16 letters.")
        self.starters = starters
        self.token = token
        self._connections: set[socket.socket] = set()
        super().__init__(("", 0), _Request)

    @property
    def port(self) -> int:
        """Port on which it listens."""
        return int(self.server_address[1])

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection, and close it."""
        self._connections.discard(request)
        super().shutdown_request(request)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own."""
        self._connections.add(request)
        super().process_request(request, client_address)

    def server_close(self) -> None:
        """End all servers, and listen no more; one that is starting ends with this process."""
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # its thread reads that it is over
        deadline = time.monotonic() + _CLOSES_S
        while self._connections and time.monotonic() < deadline:
            time.sleep(0.05)
        super().server_close()


class _Request(socketserver.StreamRequestHandler):
    """One server: started as is asked, and ended with the connection."""

    def handle(self) -> None:
        """Start a server, say where it is, and end it when the connection is over."""
        host = cast("ServerHost", self.server)
        _keep_alive(self.connection)
        self.connection.settimeout(_CONNECT_S)
        with suppress(OSError):  # whoever asked is gone, and the server has ended by then
            said = self.rfile.readline(_LONGEST_TOKEN).strip()
            if not secrets.compare_digest(said, host.token.encode()):
                self._answer(error="PermissionError: this is not the token of its servers.")
                return
            asked = json.loads(self.rfile.readline())
            self.connection.settimeout(None)
            self._serve(host.starters, asked)

    def _serve(self, starters: Mapping[str, Starter], asked: Mapping[str, Any]) -> None:
        try:
            starter = starters[asked["library"]]
            with (
                _folder(asked["model"]) as model,
                reserved_port() as port,
                starter(
                    model, devices=asked["devices"], address=("0.0.0.0", port), **asked["options"]
                ) as url,
            ):
                self._answer(url=url)
                self.rfile.read(1)
        except OSError as error:
            _LOG.warning("a server has ended: %s", error)
        except Exception as error:  # of whatever library: told there, where it was asked for
            self._answer(error=f"{type(error).__name__}: {error}")

    def _answer(self, **said: str) -> None:
        self.wfile.write(json.dumps(said).encode() + b"\n")


@contextmanager
def _folder(model: str | Mapping[str, str]) -> Iterator[str]:
    """A model that is here; the folder of one that came as files is deleted afterwards."""
    if isinstance(model, str):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="model-") as above:
        folder = Path(above, "model")  # its name may choose a template, and is always the same
        folder.mkdir()
        for name, content in model.items():
            (folder / Path(name).name).write_bytes(base64.b64decode(content))
        yield str(folder)


@dataclass(frozen=True, eq=False)
class HostedServer:
    """Starts a server of a model on another machine, where a `ServerHost` waits.

    Called, it gives a context manager as ``partial(start_server, model)`` does, and can be called
    again. An engine of it dies where the connection to that machine breaks.

    Args:
        machine: its name or address, under which its servers are reached.
        port: of its host.
        token: of its host.
        library: starts it there.
        model: hub id or folder, which that machine sees; or its files.
        devices: of that machine, for this server; ``None``: all.
        options: of the server.
        start_timeout_s: how long it may take to start.
        number: of those of its machine, for messages.
    """

    machine: str
    port: int
    token: str = field(repr=False)
    library: str
    model: Model = field(repr=False)
    devices: Sequence[int | str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 600.0
    number: int = 0

    @property
    def name(self) -> str:
        """Name in messages: its machine and its number."""
        return f"{self.machine}, server {self.number}"

    @contextmanager
    def __call__(self) -> Iterator[str]:
        """Start one, give its URL, and end it on leaving.

        Raises:
            ConnectionError: nobody answers there.
            RuntimeError: it does not start; the message names the machine, and has the last lines
                that it printed.
        """
        try:
            connection = socket.create_connection((self.machine, self.port), timeout=_CONNECT_S)
        except OSError as error:
            raise ConnectionError(
                f"{self.name}: nothing answers at port {self.port} of {self.machine} ({error}). "
                "What starts servers there has ended."
            ) from error
        with connection:
            _keep_alive(connection)
            # It tells of its own deadline, which is the shorter one.
            connection.settimeout(self.start_timeout_s + _CONNECT_S)
            url = self._at_machine(self._asked(connection))
            try:
                yield url
            finally:
                with suppress(OSError):  # it has ended, or its machine has
                    connection.shutdown(socket.SHUT_WR)
                    connection.settimeout(_ENDS_S)
                    connection.recv(1)  # until its memory is free for the next one

    def _asked(self, connection: socket.socket) -> str:
        """The URL of a server that is started now, as it is on its machine."""
        model: Any = self.model
        if not isinstance(model, str):
            model = {name: base64.b64encode(text).decode() for name, text in model.items()}
        asked = {
            "library": self.library,
            "model": model,
            "devices": None if self.devices is None else list(self.devices),
            "options": {**self.options, "start_timeout_s": self.start_timeout_s},
        }
        try:
            connection.sendall(f"{self.token}\n{json.dumps(asked)}\n".encode())
            with connection.makefile("rb") as answers:
                line = answers.readline()
        except OSError as error:
            raise RuntimeError(f"{self.name} did not start: {error}.") from error
        if not line:
            raise RuntimeError(f"{self.name} did not start: what starts servers there has ended.")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer["url"]

    def _at_machine(self, url: str) -> str:
        """A URL of the other machine itself, as it is seen from here."""
        parts = urlsplit(url)
        secret, at, _ = parts.netloc.rpartition("@")
        machine = f"[{self.machine}]" if ":" in self.machine else self.machine
        return urlunsplit(parts._replace(netloc=f"{secret}{at}{machine}:{parts.port}"))


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEPT_ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)

"""HTTP proxy on the loopback interface that connects to allowed hosts only.

Everything that the browser asks of the network goes through it: pages, what they embed,
redirects, web sockets. The browser resolves no names itself.
"""

import asyncio
import base64
import contextlib
import ipaddress
import secrets
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from .allowed_hosts import AllowedHosts, is_public

REFUSED_HEADER: Final = "x-refused-host"
"""Marks the proxy's own answer to a host that is not allowed."""
_MAX_HEAD_BYTES: Final = 64 * 1024
_CHUNK_BYTES: Final = 64 * 1024
_HEAD_TIMEOUT_S: Final = 30.0
_CONNECT_TIMEOUT_S: Final = 15.0
_HOP_BY_HOP: Final = (b"proxy-", b"connection:", b"keep-alive:")


class _RefusedError(Exception):
    """The request gets an answer of the proxy's own."""

    def __init__(self, status: str, *headers: str) -> None:
        super().__init__(status)
        length = f"Content-Length: {len(status)}"  # a browser shows no error without a body
        head = [f"HTTP/1.1 {status}", *headers, "Content-Type: text/plain", length]
        self.answer = "\r\n".join([*head, "Connection: close", "", status]).encode()


class FilteringProxy:
    """Serves whoever knows its password."""

    def __init__(self, allowed: AllowedHosts) -> None:
        self.allowed = allowed
        self.username = "browser"
        self.password = secrets.token_hex(16)
        self.refused: list[str] = []
        """``host:port`` of the last connections that were refused, at most 100."""
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self, path: Path | None = None) -> None:
        """Listen at a Unix socket, or else on a free port of the loopback interface."""
        serve, limit = self._serve, _MAX_HEAD_BYTES
        if path is not None:
            self._server = await asyncio.start_unix_server(serve, path, limit=limit)
        else:
            self._server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=limit)

    @property
    def url(self) -> str:
        """Address at which it listens, if that is a port."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._server is None:
            return
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._answer(reader, writer)
        except _RefusedError as refusal:
            with contextlib.suppress(ConnectionError):
                writer.write(refusal.answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError, asyncio.CancelledError):
            pass  # whoever is left sees a closed connection, also when the proxy is closed
        finally:
            self._open.discard(task)
            await _close(writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port, first = await self._read_request(reader)
        address = await self._resolve(host, port)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                remote = await asyncio.open_connection(address, port)
        except (OSError, TimeoutError) as error:
            raise _RefusedError("502 Bad Gateway") from error
        try:
            if first is None:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                remote[1].write(first)
            upload = asyncio.ensure_future(_copy(reader, remote[1]))
            try:
                await _copy(remote[0], writer)  # until the server has ended
            finally:
                upload.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                    await upload
        finally:
            await _close(remote[1])

    async def _read_request(self, reader: asyncio.StreamReader) -> tuple[str, int, bytes | None]:
        """Host and port, and the request as its server takes it; none for a tunnel."""
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_TIMEOUT_S)
        except asyncio.LimitOverrunError as error:
            raise _RefusedError("431 Request Header Fields Too Large") from error
        line, *headers = head[:-4].split(b"\r\n")
        self._authenticate(headers)
        try:
            method, target, version = line.decode("ascii").split(" ")
            parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
            port = parts.port or 80
        except ValueError as error:
            raise _RefusedError("400 Bad Request") from error
        if not parts.hostname or (method != "CONNECT" and parts.scheme != "http"):
            raise _RefusedError("400 Bad Request")
        host = parts.hostname
        if not self.allowed.allows(host, port):
            self._refuse(host, port)
        if method == "CONNECT":
            return host, port, None
        # One request a connection, so that each is checked.
        own = (*_HOP_BY_HOP, b"host:")
        path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        named = f"[{host}]" if ":" in host else host
        named += "" if port == 80 else f":{port}"
        lines = [f"{method} {path} {version}".encode(), f"Host: {named}".encode()]
        lines += [header for header in headers if not header.lower().startswith(own)]
        return host, port, b"\r\n".join([*lines, b"Connection: close", b"", b""])

    def _authenticate(self, headers: list[bytes]) -> None:
        token = base64.b64encode(f"{self.username}:{self.password}".encode())
        expected = b"proxy-authorization: basic " + token
        for header in headers:
            name, _, value = header.partition(b": ")
            scheme, _, credentials = value.partition(b" ")
            found = name.lower() + b": " + scheme.lower() + b" " + credentials
            if secrets.compare_digest(found, expected):
                return
        challenge = 'Proxy-Authenticate: Basic realm="browser"'
        raise _RefusedError("407 Proxy Authentication Required", challenge)

    async def _resolve(self, host: str, port: int) -> str:
        """The address to connect to: what was checked is what is used."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=1)
        except (OSError, UnicodeError) as error:
            raise _RefusedError("502 Bad Gateway") from error
        addresses = [str(entry[4][0]) for entry in found]
        if self.allowed.names(host, port):
            return addresses[0]
        for address in addresses:
            if is_public(address):
                return str(ipaddress.ip_address(address))
        return self._refuse(host, port)

    def _refuse(self, host: str, port: int) -> str:
        self.refused = [*self.refused[-99:], f"{host}:{port}"]
        raise _RefusedError("403 Forbidden", f"{REFUSED_HEADER}: {host}:{port}")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError, TimeoutError):
        await writer.wait_closed()

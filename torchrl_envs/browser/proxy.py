"""The only way out of a browser: a proxy to allowed hosts, in a network of the browser's own."""

import asyncio
import base64
import contextlib
import functools
import ipaddress
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from torchrl_envs.processes.pool import relayed_command

# Which hosts a browser may reach.

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_WEB_PORTS: Final = frozenset(_DEFAULT_PORTS.values())
_NAME: Final = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_ANY: Final = "*"
_LOW: Final = (1 << 32) - 1
_ENDS_IN_IPV4: Final = [
    ipaddress.IPv6Network(each) for each in ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96")
] + [ipaddress.IPv6Network("64:ff9b::/96")]
"""IPv4-compatible, -mapped and -translated addresses, and those of NAT64."""
_SIX_TO_FOUR: Final = ipaddress.IPv6Network("2002::/16")
_TEREDO: Final = ipaddress.IPv6Network("2001::/32")
_OF_A_SITE: Final = [
    ipaddress.IPv6Network(each)
    for each in ("64:ff9b:1::/48", "fec0::/10", "3fff::/20", "5f00::/16")
]
"""NAT64 and addresses of a site, of documentation and of routers: older Pythons take them for
global."""


class AllowedHosts:
    """Hosts by name, by address, or all that are public."""

    # `"example.com"` allows that host and its subdomains, on ports 80 and 443; `"127.0.0.1:8000"`
    # that address and port alone; `"*"` every host, on ports 80 and 443, whose address is public,
    # so nothing on this machine and in its network. An address in another notation than the usual
    # one is none of these.

    def __init__(self, domains: Iterable[str]) -> None:
        if isinstance(domains, str):
            raise TypeError(f"allowed_domains is a list of hosts, got the string {domains!r}.")
        self.domains = tuple(domains)
        if not self.domains:
            raise ValueError(
                'allowed_domains is empty: the browser could open no page. Name hosts, or "*" for '
                "all public ones."
            )
        self._any_public = _ANY in self.domains
        self._rules = [_rule(domain) for domain in self.domains if domain != _ANY]

    def allows(self, host: str, port: int) -> bool:
        """Whether a connection may be made, the address being whatever the name resolves to."""
        if self.names(host, port):
            return True
        if not self._any_public or port not in _WEB_PORTS:
            return False
        host, address = _normal(host)
        return is_public(address) if address else bool(_NAME.fullmatch(host))

    def names(self, host: str, port: int) -> bool:
        """Whether a host is named itself, so that it may have a private address."""
        host, address = _normal(host)
        for allowed, is_address, own_port in self._rules:
            if port != own_port and (own_port is not None or port not in _WEB_PORTS):
                continue
            is_below = host == allowed or host.endswith(f".{allowed}")
            if address == allowed if is_address or address is not None else is_below:
                return True
        return False

    def refusal(self, url: str) -> str | None:
        """Why a URL may not be opened, or ``None``; the connection itself is checked too."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            return f"{url!r:.200} is no URL: {error}"
        if parts.scheme not in _DEFAULT_PORTS or not host:
            return f"{url!r:.200} can't be opened: only http:// and https:// URLs are"
        if parts.username is not None or "\\" in url:
            return f"{url!r:.200} can't be opened: it hides its host"
        if not self.allows(host, port if port is not None else _DEFAULT_PORTS[parts.scheme]):
            return f"{url!r:.200} is not allowed; the allowed domains are {list(self.domains)}"
        return None


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the internet, not to this machine or its network."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv4Address):
        return parsed.is_global and not parsed.is_multicast
    inner = embedded_ipv4(parsed)
    if parsed.ipv4_mapped is None and (
        not parsed.is_global
        or parsed.is_multicast
        or any(parsed in network for network in _OF_A_SITE)
    ):
        return False
    return all(is_public(str(each)) for each in inner)


def embedded_ipv4(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """Give the IPv4 addresses that an IPv6 address may lead to.

    Whoever sends to an address of a transition mechanism may reach what it embeds: by IPv4-mapped,
    -compatible and -translated addresses, NAT64, 6to4, Teredo (its server and its client) and
    ISATAP.
    """
    number = int(address)
    found = [number & _LOW] if any(address in each for each in _ENDS_IN_IPV4) else []
    if number >> 32 & 0xFDFFFFFF == 0x5EFE:  # ISATAP: the bit left out says that it is unique
        found.append(number & _LOW)
    if address in _SIX_TO_FOUR:
        found.append(number >> 80 & _LOW)
    if address in _TEREDO:
        found += [number >> 64 & _LOW, ~number & _LOW]
    return [*map(ipaddress.IPv4Address, found)]


def _rule(domain: str) -> tuple[str, bool, int | None]:
    """A host, whether it is an address, and the port if one is named."""
    try:
        parts = urlsplit(f"//{domain}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ValueError(f"allowed_domains: {domain!r} is no host: {error}.") from error
    host, address = _normal(host)
    is_host = address is not None or bool(_NAME.fullmatch(host))
    if not is_host or parts.netloc != domain or "@" in domain:
        raise ValueError(
            f"allowed_domains: {domain!r} is no host. Write a name, with a port if it is not 80 or "
            "443: 'example.com', 'localhost:8000'."
        )
    return address or host, address is not None, port


def _normal(host: str) -> tuple[str, str | None]:
    """A host as it is compared, and its address if it is one."""
    host = host.strip("[]").rstrip(".").lower()
    try:
        return host, ipaddress.ip_address(host).compressed
    except ValueError:
        return host, None


# An HTTP proxy on the loopback interface that connects to allowed hosts only.
#
# Everything that the browser asks of the network goes through it: pages, what they embed,
# redirects, web sockets. The browser resolves no names itself.

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
        """Where it listens, if that is a port."""
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


# A network of its own for the browser, where the proxy is all there is; by bubblewrap.

_NEAR: Final = "127.0.0.1:3128"
"""In that network, where nobody else listens."""
_PROBE_S: Final = 20.0


class SharedNetworkWarning(UserWarning):
    """A browser shares this machine's network, though all its traffic should go by the proxy."""


@functools.cache
def reason_against() -> str | None:
    """Why a program can't have a network of its own here, or ``None``; tried once per process."""
    if shutil.which("bwrap") is None:
        return "bubblewrap (the command `bwrap`) is not installed"
    try:
        tried = subprocess.run(
            [*_bubblewrap(), "true"], capture_output=True, text=True, timeout=_PROBE_S
        )
    except subprocess.TimeoutExpired:
        return "bubblewrap does not start a program"
    return None if tried.returncode == 0 else tried.stderr.strip()[:200]


def write_launcher(folder: Path, executable: str) -> tuple[str, Path, str]:
    """A program that starts a browser in a network of its own."""
    socket, launcher = folder / "proxy", folder / "browser"
    command = [*_bubblewrap(), *relayed_command(_NEAR, socket, [executable])]
    launcher.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    launcher.chmod(0o700)
    return str(launcher), socket, f"http://{_NEAR}"


def _bubblewrap() -> list[str]:
    command = shutil.which("bwrap") or "bwrap"
    return [command, "--dev-bind", "/", "/", "--unshare-net", "--die-with-parent", "--"]

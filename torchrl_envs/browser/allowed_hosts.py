"""Hosts that a browser may reach, and addresses that are private in disguise."""

import ipaddress
import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

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
        """Return whether a host is named itself, so that it may have a private address."""
        host, address = _normal(host)
        for allowed, is_address, own_port in self._rules:
            if port != own_port and (own_port is not None or port not in _WEB_PORTS):
                continue
            is_below = host == allowed or host.endswith(f".{allowed}")
            if address == allowed if is_address or address is not None else is_below:
                return True
        return False

    def refusal(self, url: str) -> str | None:
        """Return why a URL may not be opened, or ``None``; the connection itself is checked too."""
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
    """Return whether an IP address belongs to the internet, not to this machine or its network."""
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

"""Which hosts a browser may reach."""

import ipaddress
import re
from collections.abc import Iterable
from typing import Final, NamedTuple
from urllib.parse import urlsplit

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_WEB_PORTS: Final = frozenset(_DEFAULT_PORTS.values())
_NAME: Final = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
_ANY: Final = "*"


class _Rule(NamedTuple):
    host: str
    is_address: bool
    port: int | None


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
        return self._any_public_name(host, port) or self.names(host, port)

    def names(self, host: str, port: int) -> bool:
        """Whether a host is named itself, so that it may have a private address."""
        host = _normal(host)
        return any(_fits(rule, host, port) for rule in self._rules)

    def _any_public_name(self, host: str, port: int) -> bool:
        if not self._any_public or port not in _WEB_PORTS:
            return False
        address = _address(_normal(host))
        return is_public(address) if address else bool(_NAME.fullmatch(_normal(host)))

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
    mapped = getattr(parsed, "ipv4_mapped", None)
    parsed = parsed if mapped is None else mapped
    return parsed.is_global and not parsed.is_multicast


def _rule(domain: str) -> _Rule:
    try:
        parts = urlsplit(f"//{domain}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ValueError(f"allowed_domains: {domain!r} is no host: {error}.") from error
    host = _normal(host)
    address = _address(host)
    is_host = address is not None or bool(_NAME.fullmatch(host))
    if not is_host or parts.netloc != domain or "@" in domain:
        raise ValueError(
            f"allowed_domains: {domain!r} is no host. Write a name, with a port if it is not 80 or "
            "443: 'example.com', 'localhost:8000'."
        )
    return _Rule(address or host, address is not None, port)


def _fits(rule: _Rule, host: str, port: int) -> bool:
    if port not in _WEB_PORTS if rule.port is None else port != rule.port:
        return False
    address = _address(host)
    if rule.is_address or address is not None:
        return address == rule.host
    return host == rule.host or host.endswith(f".{rule.host}")


def _normal(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()


def _address(host: str) -> str | None:
    try:
        return ipaddress.ip_address(host).compressed
    except ValueError:
        return None

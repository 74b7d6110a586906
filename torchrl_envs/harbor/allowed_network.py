"""A network of named hosts alone: ``network_mode = "allowlist"`` of a task."""

import asyncio
import ipaddress
import threading
from collections.abc import Sequence

from torchrl_envs.browser.allowed_hosts import AllowedHosts
from torchrl_envs.browser.filtering_proxy import FilteringProxy


class ListedHosts(AllowedHosts):
    """Hosts as Harbor lists them, on any port.

    A name is that host alone, ``*.name`` its subdomains, where their address is public; an address
    or a block of addresses (``10.0.0.0/8``) may be private.

    Args:
        hosts: of ``allowed_hosts``.

    Raises:
        ValueError: one is none of these.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.domains = tuple(hosts)
        self._names: set[str] = set()
        self._suffixes: tuple[str, ...] = ()
        self._blocks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for host in (each.strip().lower().rstrip(".") for each in hosts):
            try:
                self._blocks.append(ipaddress.ip_network(host))
                continue
            except ValueError:
                plain = host.removeprefix("*.")
            labels = plain.split(".")
            if not all(label and label.replace("-", "a").isalnum() for label in labels):
                raise ValueError(
                    f"allowed_hosts: {host!r} is no name, *.name, address or block of addresses."
                )
            if plain == host:
                self._names.add(host)
            else:
                self._suffixes += (f".{plain}",)

    def allows(self, host: str, port: int) -> bool:
        """Whether a connection may be made; the address of a name is checked besides."""
        plain = host.rstrip(".").lower()
        return self.names(host, port) or plain in self._names or plain.endswith(self._suffixes)

    def names(self, host: str, port: int) -> bool:
        """Whether an address is listed itself, so that it may be private."""
        del port
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return any(address in block for block in self._blocks)


class AllowedNetwork:
    """A proxy on a thread of its own that connects to listed hosts only.

    Args:
        hosts: of ``allowed_hosts``.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._proxy = FilteringProxy(ListedHosts(hosts))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._proxy.start(), self._loop).result()

    @property
    def endpoint(self) -> str:
        """``host:port`` of this machine at which it listens."""
        return self._proxy.url.removeprefix("http://")

    def variables(self, place: str, others: Sequence[str] = ()) -> dict[str, str]:
        """Environment variables by which programs find it.

        Args:
            place: ``host:port`` at which it is reached.
            others: hosts that are reached without it.
        """
        url = f"http://{self._proxy.username}:{self._proxy.password}@{place}"
        beside = ",".join(["localhost", "127.0.0.1", *others])
        values = {"http_proxy": url, "https_proxy": url, "no_proxy": beside}
        return {**values, **{name.upper(): value for name, value in values.items()}}

    def close(self) -> None:
        """Stop listening; a second time it does nothing."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._proxy.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

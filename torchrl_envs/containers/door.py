"""The way from containers to a server of this machine."""

import contextlib
import ipaddress
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from torchrl_envs.processes.worker_process import kept_command, relayed_command

from .container import Container
from .engine import ContainerEngine, ContainerError

CLOSED_NETWORK: Final = "torchrl-agents-closed"
"""The network of containers that reach this machine, and neither each other nor anything else."""
_BEGIN_S: Final = 10.0
_REACH_S: Final = 10.0
_TRIES: Final = 3


class Door:
    """An address of this machine that a container reaches, and that leads to a server of it.

    Servers listen on ``127.0.0.1``, which means a container itself to who is inside. So
    connections to this machine's own address in the container's network are passed on. What else
    listens on all addresses of this machine can be reached from inside, too.

    Args:
        container: it is there.
        endpoint: ``host:port`` of the server.

    Raises:
        ContainerError: the server can't be reached from inside.
    """

    def __init__(self, container: Container, endpoint: str) -> None:
        engine = container.engine
        self._relay: _Relay | None = None
        if engine.is_desktop:  # its virtual machine leads to this one by itself
            self.address = f"host.docker.internal:{endpoint.rpartition(':')[2]}"
        else:
            found = engine.inspected("container", container.name) or {}
            networks = (found.get("NetworkSettings") or {}).get("Networks") or {}
            self._relay = _shared_relay(gateway_of(engine, *networks), endpoint)
            self.address = self._relay.address
        host, _, port = self.address.rpartition(":")
        if container.run(f"exec 3<> /dev/tcp/{host}/{port}", timeout_s=_REACH_S).status != 0:
            self.close()
            raise ContainerError(
                f"programs in a container of {engine.program} can't reach the policy at "
                f"{self.address}. Let the firewall of this machine pass connections from "
                "containers; an engine on another machine can't be used."
            )

    def close(self) -> None:
        """Close it, once nobody else needs it; a second time it does nothing."""
        relay, self._relay = self._relay, None
        if relay is not None:
            _give_back(relay)


def gateway_of(engine: ContainerEngine, *networks: str) -> str:
    """This machine's address in one of a container's networks.

    Args:
        engine: has the networks.
        *networks: their names.

    Raises:
        ContainerError: it has none.
    """
    for network in networks:
        found = engine.inspected("network", network) or {}
        blocks: list[Mapping[str, Any]] = found.get("subnets") or []
        blocks += (found.get("IPAM") or {}).get("Config") or []
        for block in blocks:
            address = block.get("gateway") or block.get("Gateway") or _first_of(block)
            if address and ":" not in address:
                return address
    raise ContainerError(
        f"this machine has no address in {engine.program}'s network {' or '.join(networks)}, so "
        "that a container in it can't reach the policy: use docker, or podman with netavark."
    )


def _first_of(block: Mapping[str, Any]) -> str | None:
    """The first address of a block, if it is this machine's: docker's, before it is started again.

    When it has just been installed, docker does not say that address of its network.
    """
    subnet = ipaddress.ip_network(block.get("subnet") or block.get("Subnet") or "::/128")
    if subnet.version == 6:
        return None
    address = str(subnet[min(1, subnet.num_addresses - 1)])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:  # no interface has it
            return None
    return address


def closed_network(engine: ContainerEngine) -> str:
    """The name of the closed network, which is made where it is missing and kept.

    Args:
        engine: has it.

    Raises:
        ContainerError: it can't be made, or this machine has no address in it.
    """
    words = ["network", "create", "--internal", CLOSED_NETWORK]
    if engine.program == "docker":
        words[2:2] = ["--opt", "com.docker.network.bridge.enable_icc=false"]
    done = engine.once(CLOSED_NETWORK, lambda: engine.ask(words), "network")
    if done is not None:
        what = f"{engine.program} can't make the network {CLOSED_NETWORK}: {done.said}"
        raise ContainerError(what)
    gateway_of(engine, CLOSED_NETWORK)
    return CLOSED_NETWORK


class _Relay:
    """A process that passes connections on, for as long as a door needs it."""

    def __init__(self, host: str, endpoint: str) -> None:
        self.key = host, endpoint
        self.num_users = 0
        for _ in range(_TRIES):  # another program may take the port before it does
            with socket.socket() as free:
                free.bind((host, 0))
                self.address = f"{host}:{free.getsockname()[1]}"
            command = relayed_command(self.address, endpoint, ["sleep", "infinity"])
            self._process = subprocess.Popen(
                kept_command(command), stdin=subprocess.DEVNULL, start_new_session=True
            )
            if self._listens():
                return
            self.end()
        raise ContainerError(f"no connections can be taken at {host}")

    def _listens(self) -> bool:
        host, _, port = self.address.rpartition(":")
        deadline = time.monotonic() + _BEGIN_S
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
                return True
            time.sleep(0.01)
        return False

    def end(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


_relays: dict[tuple[str, str], _Relay] = {}
_changing: Final = threading.Lock()


def _shared_relay(host: str, endpoint: str) -> _Relay:
    with _changing:
        relay = _relays.get((host, endpoint))
        if relay is None:
            try:
                relay = _relays[host, endpoint] = _Relay(host, endpoint)
            except OSError as error:
                raise ContainerError(f"this machine can't listen at {host}: {error}") from error
        relay.num_users += 1
        return relay


def _give_back(relay: _Relay) -> None:
    with _changing:
        relay.num_users -= 1
        if relay.num_users == 0:
            del _relays[relay.key]
            relay.end()

"""Servers that are started for a run on other nodes of its job: one fleet of them."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchrl_agents.settings.engine_nodes import (
    ENDED,
    HOSTS_VARIABLE,
    MARK,
    TOKEN_VARIABLE,
    engine_nodes,
    shares_of_node,
)
from torchrl_agents.settings.schema import EngineConfig
from torchrl_modules import AsyncEngine, EngineFleet
from torchrl_modules.engines.server_host import HostedServer
from torchrl_modules.engines.shared_server import SharedServer

from .sources import Source


def hosted_fleet(
    source: Source,
    engine: EngineConfig,
    *,
    own: Callable[..., AsyncEngine],
    wait_s: float = 600.0,
    **options: Any,
) -> EngineFleet:
    """Servers on all nodes of this job that start some, each on its share of its node's GPUs.

    Args:
        source: of the model.
        engine: the settings.
        own: makes an engine of what starts a server.
        wait_s: how long the nodes may take until they can be asked.
        options: of the servers.

    Raises:
        RuntimeError: a node does not come, or a server does not start on it.
        SettingsError: the servers do not fit on a node.
    """
    if isinstance(source, str) and Path(source).is_dir():
        source = str(Path(source).resolve())
    start_timeout_s = float(options.pop("start_timeout_s", 600.0))
    servers = [  # agents with adapters of their own have a fleet each over these
        HostedServer(
            node,
            said["port"],
            os.environ[TOKEN_VARIABLE],
            engine.name,
            source,
            devices=devices,
            options=options,
            start_timeout_s=start_timeout_s,
            number=number,
        )
        for node, said in _await_nodes(wait_s).items()
        for number, devices in enumerate(shares_of_node(engine, said["devices"], node))
    ]
    return EngineFleet([partial(own, SharedServer(each)) for each in servers])


def _await_nodes(wait_s: float) -> Mapping[str, Mapping[str, Any]]:
    """Return what each node says of itself, by its name, as soon as all have said it."""
    file, nodes = Path(os.environ[HOSTS_VARIABLE]), engine_nodes()
    deadline = time.monotonic() + wait_s
    while True:
        lines = file.read_text(encoding="utf-8").splitlines()
        said = [json.loads(line[len(MARK) :]) for line in lines if line.startswith(MARK)]
        found = {each["node"]: each for each in said}
        missing = [node for node in nodes if node not in found]
        if not missing:
            return {node: found[node] for node in nodes}
        if ENDED in lines:
            raise RuntimeError(_missing(missing, "their step of the job has ended"))
        if time.monotonic() > deadline:
            raise RuntimeError(_missing(missing, f"they did not say so within {wait_s:.0f} s"))
        time.sleep(0.2)


def _missing(nodes: Sequence[str], why: str) -> str:
    return (
        f"{', '.join(nodes)}: no servers can be started there, because {why}. The log of the job "
        "has what was written there."
    )

"""Nodes of a job of SLURM that start servers for a run: what the job says of them, what fits."""

import os
from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

from .errors import SettingsError
from .schema import CollectorConfig, EngineConfig, RecipeConfig, RolloutsConfig

NODES_VARIABLE: Final = "TORCHRL_ENGINE_NODES"
"""Their names, with commas between them."""
GPUS_VARIABLE: Final = "TORCHRL_ENGINE_GPUS"
"""How many GPUs each has, where the settings are checked before a job is submitted."""
HOSTS_VARIABLE: Final = "TORCHRL_ENGINE_HOSTS"
"""The file, on the node of rank 0, in which they say where they are asked for servers."""
TOKEN_VARIABLE: Final = "TORCHRL_ENGINE_TOKEN"
"""The secret with which they are asked."""
MARK: Final = "torchrl-agents engine node "
"""Begins the line in which a node says where it is asked for servers."""
ENDED: Final = "torchrl-agents engine nodes have ended"
"""Line in the same file when their step of the job is over."""
_SHARDS: Final = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("tp_size", "pp_size", "dp_size"),
)
"""Settings of vLLM and of SGLang that multiply the GPUs of a server."""
_OF_CLIENTS: Final = ("weight_transfer", "weights_directory", "wait_s")
"""Settings with which a server that runs already is asked."""


def engine_nodes() -> list[str]:
    """Names of the nodes of this job that start servers."""
    return [name for name in os.environ.get(NODES_VARIABLE, "").split(",") if name]


def gpus_of_engine_node() -> int | None:
    """How many GPUs each of them has; ``None`` where that is not known before they say so."""
    text = os.environ.get(GPUS_VARIABLE)
    return None if text is None else int(text)


def shares_of_node(
    engine: EngineConfig, devices: Sequence[str], node: str
) -> list[Sequence[str] | None]:
    """Return the devices of each server of a node; ``None`` is a server without GPUs.

    Args:
        engine: its settings.
        devices: GPUs of the node.
        node: its name, for the message.

    Raises:
        SettingsError: the servers do not fit, or GPUs are left over.
    """
    kwargs = engine.engine_kwargs
    each = prod(int(kwargs.get(name, 1)) for name in _SHARDS)
    if not devices:
        return [None] * (engine.per_node or 1)
    count = engine.per_node or len(devices) // each
    given = [f"engine.engine_kwargs.{name}={kwargs[name]}" for name in _SHARDS if name in kwargs]
    share = len(devices) // count if count else 0
    if not count or len(devices) % count or share < each or (given and share > each):
        asked = [f"engine.per_node={engine.per_node}"] if engine.per_node else []
        raise SettingsError(
            f"{' and '.join([*asked, *given])}: the {len(devices)} GPUs of {node} are shared out "
            f"evenly to servers, of which each takes {each}. Take numbers that fit."
        )
    return [devices[i * share : (i + 1) * share] for i in range(count)]


def node_faults(cfg: RecipeConfig) -> Iterator[str]:
    """Yield the faults of settings of servers on nodes of their own.

    Args:
        cfg: the settings.
    """
    engine = cfg.engine
    if engine.starts_servers:
        for name in (name for name in _OF_CLIENTS if name in engine.engine_kwargs):
            yield (
                f"engine.engine_kwargs.{name} is for a server that runs already (engine.url). One "
                "that the run starts gets weights in a file on its own machine, and by a broadcast "
                "on another one. Leave it out."
            )
    if not engine.nodes:
        if engine.per_node is not None:
            yield f"engine.per_node={engine.per_node} is for engine.nodes: set it, or leave it out."
        return
    who = f"engine.nodes={engine.nodes}"
    collector = cfg.collector if isinstance(cfg, RolloutsConfig) else CollectorConfig()
    faults = {
        "its servers are counted by engine.per_node: leave num_engines and devices out.": (
            engine.num_engines > 1 or bool(engine.devices)
        ),
        "engine.colocate is for servers on the GPUs that train: leave it out.": engine.colocate,
        "it is for collector=sync or streaming: on Ray each collector has servers of its own.": (
            collector.mode == "ray"
        ),
        "engine=sglang needs a policy.model, which all nodes see.": (
            engine.name == "sglang" and cfg.policy.model is None
        ),
    }
    yield from (f"{who}: {words}" for words, is_so in faults.items() if is_so)
    yield from _job_faults(engine, who)


def _job_faults(engine: EngineConfig, who: str) -> Iterator[str]:
    """Yield what does not fit the nodes of this job."""
    names = engine_nodes()
    if len(names) != engine.nodes:
        has = f"this job has {', '.join(names)}" if names else "there are none here"
        yield (
            f"{who}: nodes that start servers belong to a job of torchrl-agents slurm "
            f"--engine-nodes={engine.nodes}, and {has}. Without them it is engine.nodes=0."
        )
    if (count := gpus_of_engine_node()) is not None:
        try:
            shares_of_node(engine, [str(i) for i in range(count)], "a node")
        except SettingsError as error:
            yield str(error)

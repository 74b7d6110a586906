"""Servers of a library for inference that are started for a run: one fleet of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torchrl_modules import AsyncEngine, EngineFleet
from torchrl_modules.engines.shared_server import SharedServer

from .sources import Source, folder_of


def started_fleet(
    source: Source,
    devices: Sequence[int | str],
    count: int,
    *,
    start: Callable[..., AbstractContextManager[str]],
    own: Callable[..., AsyncEngine],
    **options: Any,
) -> EngineFleet:
    """Servers that are started here, each on its share of the devices.

    Args:
        source: of the model.
        devices: the GPUs of all of them; none: those of this process.
        count: how many.
        start: starts one for a folder, with ``devices=`` and the options, and gives its URL.
        own: makes an engine of what starts one.
        options: of ``start``.
    """
    each = len(devices) // count
    shares = [devices[i * each : (i + 1) * each] or None for i in range(count)]
    servers = [partial(_served, start, source, devices=share, **options) for share in shares]
    # Agents with adapters of their own have a fleet each over these.
    return EngineFleet([partial(own, SharedServer(one)) for one in servers])


@contextmanager
def _served(
    start: Callable[..., AbstractContextManager[str]], source: Source, **options: Any
) -> Iterator[str]:
    with folder_of(source) as folder, start(folder, **options) as url:
        yield url

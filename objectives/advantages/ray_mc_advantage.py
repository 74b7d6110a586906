"""The group advantages of several writers, kept in one Ray actor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from torchrl_data import import_package
from torchrl_data.checked_attributes import ChecksAttributes

from .mc_advantage import MCAdvantage


def start_ray(config: Mapping[str, Any] | None) -> bool:
    """Connect to the Ray that ``ray start`` started, or start one, on this machine's loopback.

    A Ray that another program started for itself, and that ends with it, is left alone.

    Args:
        config: for ``ray.init``; with an ``address`` or a ``_node_ip_address``, or where the
            variable ``RAY_ADDRESS`` is set, as that says.

    Returns:
        Whether this process had not been connected before.
    """
    ray = import_package("ray", who="RayMCAdvantage", install="pip install ray")
    config = {"include_dashboard": False, **(config or {})}
    if ray.is_initialized():
        return False
    if {"address", "_node_ip_address"} & config.keys() or os.environ.get("RAY_ADDRESS"):
        ray.init(**config)
        return True
    if address := import_module("ray._private.utils").read_ray_address():
        with suppress(ConnectionError):  # it has ended
            ray.init(address=address, **config)
            return True
    # What Ray does on other systems than Linux: its servers, which read the variable, bind to it.
    constants: Any = import_module("ray._private.ray_constants")
    variable, held = constants.ENABLE_RAY_CLUSTERS_ENV_VAR, constants.ENABLE_RAY_CLUSTER
    before = os.environ.get(variable)
    os.environ[variable], constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        ray.init(address="local", **config)
    finally:
        constants.ENABLE_RAY_CLUSTER = held
        del os.environ[variable]
        os.environ |= {} if before is None else {variable: before}
    return True


_MOST_TO_START_S: Final = 600.0


class RayMCAdvantage(ChecksAttributes, Transform):
    """:class:`~objectives.MCAdvantage` whose groups are shared by buffers in several processes.

    Rows of one group may be written through any of them; whoever writes the last one gets the
    whole group. A buffer that itself lives in an actor needs only ``MCAdvantage``.

    Args:
        group_size: rows of a complete group.
        actor_name: name of the shared actor; an actor of that name is used if there is one, and
            its options then win. None for one of its own.
        timeout_s: how long a call may take before it raises; the start of the actor, which imports
            this library, has ten minutes.
        remote_config: options of the actor, for ``ray.remote``; ``{"num_cpus": 0}`` by default.
        ray_init_config: for ``ray.init``, when Ray does not run yet.
        **options: of ``MCAdvantage``. A collector hands GDPO no weights through it: give them, as
            ``estimator=DecoupledSources(weights=...)``.

    Raises:
        ImportError: Ray is not installed.
        ValueError: as ``MCAdvantage``; raised here, before an actor is started.
    """

    def __init__(
        self,
        group_size: int,
        *,
        actor_name: str | None = None,
        timeout_s: float = 60.0,
        remote_config: dict[str, Any] | None = None,
        ray_init_config: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        MCAdvantage(group_size, **options)
        start_ray(ray_init_config)
        self.timeout_s = timeout_s
        self._owns_actor = actor_name is None
        config: dict[str, Any] = {"num_cpus": 0, **(remote_config or {})}
        if actor_name is not None:
            config |= {"name": actor_name, "get_if_exists": True}
        actor = import_module("ray").remote(MCAdvantage).options(**config)
        self._actor = actor.remote(group_size, **options)
        self._has_started = False

    def _call_actor(self, method: str, *args: Any) -> Any:
        ray = import_module("ray")
        if not self._has_started:
            ray.get(self._actor.__ray_ready__.remote(), timeout=_MOST_TO_START_S)
            self._has_started = True
        return ray.get(getattr(self._actor, method).remote(*args), timeout=self.timeout_s)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        return None if tensordict is None else self._call_actor("inv", tensordict)

    def take_refills(self) -> dict[Any, int]:
        """Take refills as :meth:`MCAdvantage.take_refills` does."""
        return self._call_actor("take_refills")

    def get_extra_state(self) -> dict[str, Any]:
        """The actor's incomplete groups and counts."""
        return self._call_actor("get_extra_state")

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go back to a state, for all writers.

        Args:
            state: what :meth:`get_extra_state` gave.
        """
        self._call_actor("set_extra_state", state)

    def close(self) -> None:
        """End the actor, if it is this transform's own."""
        if self._owns_actor:
            import_module("ray").kill(self._actor)

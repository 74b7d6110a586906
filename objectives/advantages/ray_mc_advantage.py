"""The group advantages of several writers, kept in one Ray actor."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrl.envs.transforms import Transform

from .mc_advantage import MCAdvantage

if TYPE_CHECKING:
    from tensordict import TensorDictBase


def _ray() -> Any:
    """The one door to Ray: imported when it is used."""
    return import_module("ray")


class RayMCAdvantage(Transform):
    """:class:`~objectives.MCAdvantage` whose groups are shared by buffers in several processes.

    Rows of one group may be written through any of them; whoever writes the last one gets the
    whole group. A buffer that itself lives in an actor needs only ``MCAdvantage``.

    Args:
        group_size: rows of a complete group.
        actor_name: name of the shared actor; an actor of that name is used if there is one, and
            its options then win. None for one of its own.
        timeout_s: how long a call may take before it raises.
        remote_config: options of the actor, for ``ray.remote``; ``{"num_cpus": 0}`` by default.
        ray_init_config: for ``ray.init``, when Ray does not run yet.
        **options: of ``MCAdvantage``.

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

        ray = _ray()
        if not ray.is_initialized():
            ray.init(**(ray_init_config or {}))
        self.timeout_s = timeout_s
        self._owns_actor = actor_name is None
        config: dict[str, Any] = {"num_cpus": 0, **(remote_config or {})}
        if actor_name is not None:
            config |= {"name": actor_name, "get_if_exists": True}
        self._actor = ray.remote(MCAdvantage).options(**config).remote(group_size, **options)

    def _call_actor(self, method: str, *args: Any) -> Any:

        return _ray().get(getattr(self._actor, method).remote(*args), timeout=self.timeout_s)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Leave sampled rows as they are."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        if tensordict is None:
            return None
        return self._call_actor("inv", tensordict)

    def take_refills(self) -> dict[Any, int]:
        """As :meth:`MCAdvantage.take_refills`."""
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
            _ray().kill(self._actor)

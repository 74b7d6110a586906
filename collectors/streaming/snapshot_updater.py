"""Weight updates of an engine that goes on drawing while they are made."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from collectors.weight_update.in_process_updater import InProcessUpdater
from torchrl_modules.weights.adapter_weights import AdapterWeights
from torchrl_modules.weights.agent_weights import AgentWeights
from torchrl_modules.weights.lazy_weights import LazyWeights, copied_weights


class SnapshotUpdater(InProcessUpdater):
    """Copies the trainer's weights, for an engine that takes them up while training goes on."""

    def snapshot(
        self, source: nn.Module | Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """A copy of the weights as the policy takes them, tied ones once.

        Shards are copied into host memory as they are gathered, a bucket at a time.

        Args:
            source: the trained model, or its state dict.
            dtype: in which the engine takes them; matrices that are wider are converted.
        """
        with self._checked(source, dtype) as weights:
            return _copied(weights, dtype)

    def push(self, source: nn.Module | Mapping[str, Tensor], *, version: int | None = None) -> int:
        """Refused: it would change the weights under what is being drawn."""
        del source, version
        raise RuntimeError(
            "A streaming collector's weights are pushed by its update_policy_weights_()."
        )


def _copied(weights: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """A copy of weights that training does not change."""
    if isinstance(weights, AgentWeights):
        return AgentWeights({name: _copied(own, dtype) for name, own in weights.items()})
    if isinstance(weights, AdapterWeights):
        return deepcopy(weights)
    device = "cpu" if isinstance(weights, LazyWeights) else None
    return copied_weights(weights, dtype=dtype, device=device)


def shares_memory(source: Any, engine: Any) -> bool:
    """Return whether an engine draws from the very tensors that are trained.

    Args:
        source: the trained model, or its state dict; or those of agents, by their names.
        engine: what draws.
    """
    engines = getattr(engine, "by_agent", None)
    if engines is not None:
        own_of = source.items() if isinstance(source, Mapping | nn.ModuleDict) else ()
        return any(shares_memory(own, engines.get(name)) for name, own in own_of)
    model = getattr(engine, "model", None)
    if not isinstance(model, nn.Module):
        return False

    def address(value: Tensor) -> Any:
        if type(value) not in (Tensor, nn.Parameter) or not value.numel():
            return id(value)
        return (value.device, value.untyped_storage().data_ptr(), value.storage_offset())

    own = {address(value) for value in model.parameters()}
    values = source.parameters() if isinstance(source, nn.Module) else source.values()
    return any(address(value) in own for value in values)

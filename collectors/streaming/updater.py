"""Weight updates of an engine that goes on drawing while they are made."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from collectors.weight_update.in_process import InProcessUpdater
from torchrl_modules.weights.adapters import AdapterWeights

from .checks import WHO


class SnapshotUpdater(InProcessUpdater):
    """Copies the trainer's weights, for an engine that takes them up while training goes on."""

    def snapshot(self, source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of the weights as the policy takes them.

        Args:
            source: the trained model, or its state dict.
        """
        with self._checked(source) as weights:
            if isinstance(weights, AdapterWeights):
                return weights.cloned()
            return {name: value.detach().clone() for name, value in weights.items()}

    def _send(self, weights: Mapping[str, Tensor], version: int | None) -> int:
        del weights, version
        raise RuntimeError(
            "A streaming collector's weights are pushed by its update_policy_weights_()."
        )


def check_own_memory(source: nn.Module | Mapping[str, Tensor], engine: Any) -> None:
    """Check that an engine draws from tensors of its own.

    Raises:
        ValueError: they are those that are trained.
    """
    if shares_memory(source, engine):
        raise ValueError(
            f"{WHO}: the policy draws from the tensors that are trained, so that its tokens "
            "would be of no version. Give the policy a copy of the model, "
            "TransformersWrapper(copy.deepcopy(model), ...), or take staleness=OnPolicy()."
        )


def shares_memory(source: nn.Module | Mapping[str, Tensor], engine: Any) -> bool:
    """Whether an engine draws from the very tensors that are trained.

    Args:
        source: the trained model, or its state dict.
        engine: what draws.
    """
    model = getattr(engine, "model", None)
    if not isinstance(model, nn.Module):
        return False
    own = {_address(value) for value in model.parameters()}
    values = source.parameters() if isinstance(source, nn.Module) else source.values()
    return any(_address(value) in own for value in values)


def _address(value: Tensor) -> Any:
    if type(value) not in (Tensor, nn.Parameter) or not value.numel():
        return id(value)
    return (value.device, value.untyped_storage().data_ptr(), value.storage_offset())

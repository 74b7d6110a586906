"""How a trainer's weights reach a policy."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn


class WeightUpdater(Protocol):
    """Pushes weights; all of an update is applied, or none of it."""

    @property
    def version(self) -> int:
        """The version that the policy has acknowledged."""
        ...

    def push(self, source: nn.Module | Mapping[str, Tensor]) -> int:
        """Replace the policy's weights.

        Args:
            source: the trained model, or its state dict.

        Returns:
            The new version, acknowledged by the policy.

        Raises:
            ValueError: the policy refuses the update; it goes on with its old weights.
        """
        ...


def state_dict_of(source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a module or a state dict, detached."""
    weights = source.state_dict() if isinstance(source, nn.Module) else source
    return {name: value.detach() for name, value in weights.items()}

"""Weight updates of a policy that lives in the trainer's process."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from .interface import state_dict_of


class UpdatablePolicy(Protocol):
    """A policy whose weights can be replaced; ``LLMWrapperBase`` is one."""

    policy_version: int

    def update_weights(self, state_dict: Mapping[str, Tensor]) -> int:
        """Replace the weights and give the new version."""
        ...


class InProcessUpdater:
    """Copies weights into a policy of the same process, whatever its engine.

    Args:
        policy: what is updated.
    """

    def __init__(self, policy: UpdatablePolicy) -> None:
        self.policy = policy

    @property
    def version(self) -> int:
        """The version that the policy has acknowledged."""
        return self.policy.policy_version

    def push(self, source: nn.Module | Mapping[str, Tensor]) -> int:
        """See :class:`~collectors.weight_update.interface.WeightUpdater`."""
        return self.policy.update_weights(state_dict_of(source))

"""What transforms need of the environment that they stand in."""

from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import torch
from tensordict import TensorDictBase
from torchrl.envs import Transform

from torchrl_envs.concurrency.calls import ConcurrentCalls

from .resources import Resources

T = TypeVar("T", bound=Transform)


class EpisodeEnvironment(Protocol):
    """An environment that runs episodes."""

    base_env: Any
    """A :class:`~torchrl_envs.ChatEnv`, usually."""

    @property
    def calls(self) -> ConcurrentCalls:
        """Runs the calls of tools, environments and rewards."""
        ...

    @property
    def batch_size(self) -> torch.Size:
        """Of the episodes that run at once."""
        ...

    def transforms_of(self, kind: type[T]) -> Iterator[T]:
        """The transforms of a class, in order."""
        ...

    def resources_in(self, row: int) -> Resources:
        """What the episode holds that runs in a row; nothing if none does."""
        ...

    def run_after_turn(self, transform: Any, next_batch: TensorDictBase) -> None:
        """Run one transform's ``after_turn`` on the episodes of the step that is under way."""
        ...

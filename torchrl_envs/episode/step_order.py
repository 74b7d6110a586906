"""In which order the transforms of an environment see a step."""

from typing import Any

from tensordict import TensorDictBase
from torchrl.envs import Transform
from torchrl.envs.transforms import Compose

from torchrl_data.keys import REWARD


class StepOrder(Compose):
    """The transforms of an environment; those that read the reward come once it is there."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        transforms: list[Transform] = list(self.transforms)  # type: ignore[arg-type]
        late = [transform for transform in transforms if REWARD in (transform.in_keys or ())]
        for transform in transforms:
            if transform not in late:
                next_tensordict = transform._step(tensordict, next_tensordict)
        env: Any = self.container
        next_tensordict = env.end_step(tensordict, next_tensordict)
        for transform in late:
            next_tensordict = transform._step(tensordict, next_tensordict)
        return next_tensordict


def flat_transforms(transform: Transform) -> list[Transform]:
    """A transform by itself, or those of a plain ``Compose``."""
    parts: list[Any] = list(transform) if type(transform) is Compose else [transform]  # type: ignore[arg-type]
    for part in parts:
        part.reset_parent()
    return parts

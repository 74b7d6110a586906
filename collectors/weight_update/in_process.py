"""Weight updates of a policy that lives in the trainer's process."""

from collections.abc import Mapping

from torch import Tensor, nn

from .gathering import unwrapped
from .interface import WeightUpdater


class InProcessUpdater(WeightUpdater):
    """Hands weights to the policy's engine, whatever it is, by reference.

    An engine of this process copies them; a vLLM server of this machine gets them in a file. Of a
    model that the policy itself samples from, the weights are there: a push checks that they are
    finite and counts the version, and adapters (PEFT) stay as they are.
    """

    def _gathered(self, source: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        model = getattr(getattr(self.policy, "engine", None), "model", None)
        if isinstance(source, nn.Module) and isinstance(model, nn.Module):
            inside = unwrapped(source)
            if inside is unwrapped(model):
                return inside.state_dict()
        return super()._gathered(source)

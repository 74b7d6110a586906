"""Low-rank adapters on their way to an engine that applies them beside the weights it has."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from .expected_weights import all_finite, refuse, value_faults

_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


class AdapterWeights(dict[str, Tensor]):
    """The factors of LoRA adapters, in place of whole weights.

    A layer's output is that of its own weights plus ``B @ A @ x``: scales are in ``B`` already.

    Args:
        factors: by the name of the layer in the model without adapters: ``A``, ``[rank, in]``, and
            ``B``, ``[out, rank]``.
    """

    def __init__(self, factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        for layer, (down, up) in factors.items():
            self[f"{layer}{_DOWN}"] = down.detach()
            self[f"{layer}{_UP}"] = up.detach()

    @property
    def layers(self) -> list[str]:
        """The names of the layers that have adapters."""
        return [name.removesuffix(_DOWN) for name in self if name.endswith(_DOWN)]

    @property
    def rank(self) -> int:
        """The largest one."""
        return max(self[f"{layer}{_DOWN}"].shape[0] for layer in self.layers)

    def faults(self, own: Mapping[str, Tensor]) -> list[str]:
        """Return what keeps them from being used.

        Args:
            own: weights of the model that they are for, by name.
        """
        faults = [] if self else ["it holds no adapter"]
        faults += value_faults(self)
        faults += [fault for layer in self.layers if (fault := self._fault(layer, own))]
        return faults or [
            f"{name} holds NaN or infinity. Did training diverge?"
            for name, value in self.items()
            if not all_finite(value)
        ]

    def _fault(self, layer: str, own: Mapping[str, Tensor]) -> str | None:
        if f"{layer}.weight" not in own:
            return f"the model has no {layer}"
        down, up = self[f"{layer}{_DOWN}"], self[f"{layer}{_UP}"]
        shape = own[f"{layer}.weight"].shape
        if (*up.shape[:1], *down.shape[1:]) == shape and up.shape[1:] == down.shape[:1]:
            return None
        factors = f"{tuple(up.shape)} and {tuple(down.shape)}"
        return f"the adapter of {layer} has factors {factors} for a weight of {tuple(shape)}"

    def check(self, own: Mapping[str, Tensor], max_rank: int, *, limit: str, who: str) -> None:
        """Check that an engine can apply them.

        Args:
            own: weights of the engine's model, by name.
            max_rank: the largest rank that it takes.
            limit: how it was told so, for the message.
            who: refuses them.

        Raises:
            UpdateRefused: it can't.
        """
        faults = self.faults(own)
        if not faults and self.rank > max_rank:
            faults = [f"adapters of rank {self.rank}, but {limit}{max_rank}: give it a larger one"]
        refuse(faults, who=who)

    def save(self, folder: Path) -> None:
        """Write them as PEFT does, so that an engine can load them.

        Args:
            folder: is there.
        """
        tensors = {f"base_model.model.{n}": v.cpu().contiguous() for n, v in self.items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.rank,  # a scale of 1: they are scaled already
            "target_modules": sorted({name.rpartition(".")[2] for name in self.layers}),
            "bias": "none",
            "task_type": "CAUSAL_LM",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))


def mapped(
    weights: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]
) -> Mapping[str, Tensor]:
    """The same weights with each value changed; adapters stay adapters.

    Args:
        weights: whole weights, or adapters.
        change: of a value.
    """
    changed = {name: change(value) for name, value in weights.items()}
    if not isinstance(weights, AdapterWeights):
        return changed
    adapters = AdapterWeights({})
    adapters.update(changed)
    return adapters

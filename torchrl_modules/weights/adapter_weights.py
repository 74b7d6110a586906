"""Low-rank adapters on their way to an engine that applies them beside the weights it has."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from .expected_weights import all_finite, value_faults

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

    def on_cpu(self) -> "AdapterWeights":
        """A copy in the host's memory."""
        copy = AdapterWeights({})
        copy.update((name, value.detach().to("cpu", copy=True)) for name, value in self.items())
        return copy

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

"""Weights of a sharded model with adapters, merged a layer at a time by all ranks."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .merged_adapters import AdapterNames, merged_layer, tuner_layers, whole


class LazyMerge:
    """The weights of a PEFT model that is spread over ranks, merged a layer at a time.

    Raises:
        TypeError: see :func:`.merged_adapters.merged_weights`.
        ValueError: see :func:`.merged_adapters.merged_weights`.
    """

    def __init__(self, model: Any) -> None:
        layers = tuner_layers(model)
        names = AdapterNames(model, layers)
        state = {
            name: value
            for name, value in model.state_dict(keep_vars=True).items()
            if not names.is_left_out(name)
        }
        self.layers: list[Callable[[], dict[str, Tensor]]] = []
        """Makes the whole weights of a layer with its adapters merged; all ranks call it."""
        for prefix, layer in layers.items():
            own = {name: state.pop(name) for name in list(state) if name.startswith(f"{prefix}.")}
            if layer.merged or layer.disable_adapters:
                state |= own
                continue
            self.layers.append(
                lambda prefix=prefix, layer=layer, own=own: _whole_layer(prefix, layer, own, names)
            )
        self.unchanged = {names.plain(name): value.detach() for name, value in state.items()}
        """What no adapter changes: shards, by the names of the model without adapters."""


def _whole_layer(
    prefix: str, layer: Any, own: Mapping[str, Tensor], names: AdapterNames
) -> dict[str, Tensor]:
    merged = merged_layer(prefix, layer)
    return {
        names.plain(name): merged[name] if name in merged else whole(value)
        for name, value in own.items()
    }

"""Weights of a PEFT model with its adapters merged, the model left as it was.

Those of a sharded model are merged a layer at a time by all ranks.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from torchrl_modules.weights.lazy_weights import narrowed
from torchrl_modules.weights.quantized_weights import quantized_layers, whole_weight


def has_adapters(module: nn.Module) -> bool:
    """Return whether a model without wrappers is one of PEFT, or has layers of one."""
    peft: Any = sys.modules.get("peft")  # A model with adapters has imported it.
    if peft is None:
        return False
    layer = peft.tuners.tuners_utils.BaseTunerLayer
    return isinstance(module, peft.PeftModel) or any(
        isinstance(child, layer) for child in module.modules()
    )


def merged_weights(model: Any) -> dict[str, Tensor]:
    """The weights with which a model without adapters computes what this one does.

    Layers are merged one at a time, so this takes a copy of the weights that adapters change, and
    the model gets its own back to the bit. Layers whose adapters are off or merged already are
    taken as they are; weights of 4 bits are made whole. Values are detached, under the names of
    the model without adapters. Of tied parameters of which one alone has an adapter, that one
    alone is changed, as in the model: a receiver that ties them refuses that.

    Raises:
        TypeError: the model has adapters that can't be merged into weights, such as prompts.
        ValueError: PEFT refuses to merge them, because the result is not finite, say.
    """
    makers, rest = lazy_merge(model)
    merged = {name: whole(value) for name, value in rest.items()}
    for make in makers:
        merged |= make(None)
    return merged


def save_merged(model: Any, folder: str | Path) -> None:
    """Save a model of PEFT as one without adapters that computes the same, in a folder.

    Args:
        model: of PEFT, over a model of Transformers; it stays as it is.
        folder: gets weights and config, to which a tokenizer has to be added.

    Raises:
        TypeError: as :func:`merged_weights`.
        ValueError: the same.
    """
    weights = merged_weights(model)
    with declared_untied(model, weights):
        model.get_base_model().save_pretrained(folder, state_dict=weights)


@contextmanager
def declared_untied(model: Any, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, a model says that its head is its own, where weights have one beside the embeddings.

    Who reads ``tie_word_embeddings`` in what is saved would take the embeddings for the head.

    Args:
        model: of Transformers, with adapters or without.
        weights: that are saved of it, by their names in the model without adapters.
    """
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    ends = [plain.get_output_embeddings(), plain.get_input_embeddings()]
    names = {id(module): f"{name}.weight" for name, module in plain.named_modules()}
    head, embedding = (weights.get(names.get(id(module), "")) for module in ends)
    configs = {id(each): each for each in (plain.config, plain.config.get_text_config())}
    tied = [each for each in configs.values() if getattr(each, "tie_word_embeddings", False)]
    if head is None or embedding is None or torch.equal(head, embedding):
        tied = []
    for config in tied:
        config.tie_word_embeddings = False
    try:
        yield
    finally:
        for config in tied:
            config.tie_word_embeddings = True


def tuner_layers(model: Any) -> dict[str, Any]:
    """The layers with adapters by name, where they can be merged."""
    tuners: Any = sys.modules["peft.tuners.tuners_utils"]
    layers = {
        name: layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, tuners.BaseTunerLayer)
    }
    if not layers or getattr(model, "active_peft_config", None) is None:
        raise TypeError(
            f"{type(model).__name__} has adapters that are no change of weights, which an engine "
            "can't be given. Train one that merges, such as LoRA, wrapped by get_peft_model."
        )
    model.base_model._check_merge_allowed()
    return layers


def whole(value: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A detached tensor; one that is spread over ranks is gathered, in which all take part."""
    # In the type in which it is sent to an engine that computes in `dtype`.
    value = value.detach().to(narrowed(value, dtype))
    gather = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


def merged_layer(name: str, layer: Any) -> dict[str, Tensor]:
    """Return what merging a layer changes, by the names of the state dict."""
    base, prefix = _base_of(layer, name)
    with _whole_parameters(layer):
        parameters = dict(base.named_parameters())
        held = {key: value.data for key, value in parameters.items()}
        originals = {key: value.clone() for key, value in held.items()}
        try:
            layer.merge(safe_merge=True)
            return {
                f"{prefix}.{key}": value.detach().clone()
                for key, value in parameters.items()
                if not torch.equal(value, originals[key])
            }
        finally:
            try:
                if layer.merged:
                    layer.unmerge()
            finally:  # Subtracting what was added does not give the same bits.
                for key, value in parameters.items():
                    value.data = held[key].copy_(originals[key])


def _base_of(layer: Any, name: str) -> tuple[Any, str]:
    """The layer of the model inside those of its adapters, and its name."""
    while hasattr(layer, "base_layer"):
        layer, name = layer.base_layer, f"{name}.base_layer"
    return layer, name


def _whole_layer(
    name: str, base: Any, layer: Any | None, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The whole weight of a layer of 4 bits, what its adapters add included.

    PEFT would merge them into 4 bits again, which is another model than the one that is trained.
    """
    weight = whole_weight(base)
    if layer is not None and not layer.disable_adapters:
        peft: Any = sys.modules["peft"]
        acting = [one for one in layer.active_adapters if one in getattr(layer, "lora_A", ())]
        variants = getattr(layer, "lora_variant", {})
        is_plain = isinstance(layer, peft.tuners.lora.LoraLayer) and not layer.merged
        if not is_plain or any(variants.get(one) is not None for one in acting):
            raise TypeError(
                f"{name} has 4 bits, into which {type(layer).__name__} is merged already, or which "
                "is no plain LoRA: such adapters can't be made whole. Train LoRA adapters."
            )
        for one in acting:
            weight = weight + layer.get_delta_weight(one).to(weight.dtype)
    return {name: whole(weight, dtype)}


@contextmanager
def _whole_parameters(layer: nn.Module) -> Iterator[None]:
    """Within, a layer whose parameters are spread over ranks has whole copies of them."""
    # PEFT sets their `.data`, which changes nothing of a DTensor.
    spread = [
        (module, name, value)
        for module in layer.modules()
        for name, value in module._parameters.items()
        if hasattr(value, "full_tensor")
    ]
    try:
        for module, name, value in spread:
            assert value is not None
            module._parameters[name] = nn.Parameter(whole(value), requires_grad=False)
        yield
    finally:
        for module, name, value in spread:
            module._parameters[name] = value


class AdapterNames:
    """Names in a PEFT model, and without it; told by the modules, not by how names look."""

    def __init__(self, model: Any, layers: Mapping[str, Any]) -> None:
        others: Any = sys.modules["peft.utils.other"]
        self._dropped = {"base_model", "base_model.model"}
        self._left_out: set[str] = set()
        for name, layer in layers.items():
            own = (*layer.adapter_layer_names, *layer.other_param_names)
            self._left_out |= {f"{name}.{part}" for part in own}
            self._dropped.add(f"{name}.base_layer")
        for name, module in model.named_modules(remove_duplicate=False):
            if isinstance(module, others.TrainableTokensWrapper):
                self._dropped.add(f"{name}.token_adapter")
            elif isinstance(module, others.ModulesToSaveWrapper):
                kinds = {f"{name}.modules_to_save.{adapter}" for adapter in module.modules_to_save}
                if module.disable_adapters or module.active_adapter not in module.modules_to_save:
                    self._left_out |= kinds
                    self._dropped.add(f"{name}.original_module")
                    continue
                used = f"{name}.modules_to_save.{module.active_adapter}"
                self._left_out |= {f"{name}.original_module"} | kinds - {used}
                self._dropped |= {f"{name}.modules_to_save", used}

    def is_left_out(self, name: str) -> bool:
        """Return whether an entry belongs to the adapters, and not to the model without them."""
        return not name.startswith("base_model.model.") or any(
            beginning in self._left_out for beginning in _beginnings(name)
        )

    def plain(self, name: str) -> str:
        """The name of an entry in the model without adapters."""
        parts = zip(name.split("."), _beginnings(name), strict=True)
        return ".".join(
            part
            for part, beginning in parts
            if beginning not in self._dropped and part != "_orig_mod"
        )


def _beginnings(name: str) -> list[str]:
    """``a.b.c`` to ``a``, ``a.b``, ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


Maker = Callable[[torch.dtype | None], dict[str, Tensor]]
"""Makes some weights whole, in a type that is not wider than this; all ranks call it."""


def lazy_merge(model: Any) -> tuple[list[Maker], dict[str, Tensor]]:
    """The weights of a PEFT model that is spread over ranks, merged a layer at a time.

    Returns:
        What makes the whole weights of each layer with its adapters merged; and what no adapter
        changes, shards, by the names of the model without adapters.

    Raises:
        TypeError: see :func:`merged_weights`.
        ValueError: see :func:`merged_weights`.
    """
    layers = tuner_layers(model)
    names = AdapterNames(model, layers)
    state = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if not names.is_left_out(name)
    }

    def merge(
        prefix: str, own: Mapping[str, Tensor], dtype: torch.dtype | None
    ) -> dict[str, Tensor]:
        merged = merged_layer(prefix, layers[prefix])
        return {names.plain(n): whole(merged.get(n, value), dtype) for n, value in own.items()}

    makers: list[Maker] = []
    quantized = quantized_layers(model)
    over = {id(_base_of(layer, prefix)[0]): layer for prefix, layer in layers.items()}
    for prefix, base in quantized.items():
        weight = f"{prefix}.weight"
        for name in [name for name in state if name.startswith(weight)]:
            del state[name]  # what the layer computes with goes in its place
        makers.append(partial(_whole_layer, names.plain(weight), base, over.get(id(base))))
    in_four_bits = {id(base) for base in quantized.values()}
    for prefix, layer in layers.items():
        is_as_merged = layer.merged or layer.disable_adapters
        if is_as_merged or id(_base_of(layer, prefix)[0]) in in_four_bits:
            continue
        own = {name: state.pop(name) for name in list(state) if name.startswith(f"{prefix}.")}
        makers.append(partial(merge, prefix, own))
    return makers, {names.plain(name): value.detach() for name, value in state.items()}

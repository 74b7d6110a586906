"""What of a trained model goes to an engine.

Gathered shards, merged adapters, or adapters alone.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NoReturn

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchrl_modules.weight_transfer import WeightLayout
from torchrl_modules.weights import (
    AdapterWeights,
    LazyWeights,
    UpdateRefused,
    WeightFacts,
    first_names,
    largest,
    narrowed,
)

# The weights of a PEFT model with its adapters merged, the model left as it was.


def has_adapters(module: nn.Module) -> bool:
    """Whether a model without wrappers is one of PEFT, or has layers of one."""
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
    taken as they are. Values are detached, under the names of the model without adapters. Of tied
    parameters of which one alone has an adapter, that one alone is changed, as in the model: a
    receiver that ties them refuses that.

    Raises:
        TypeError: the model has adapters that can't be merged into weights, such as prompts.
        ValueError: PEFT refuses to merge them, because the result is not finite, say.
    """
    makers, rest = lazy_merge(model)
    merged = {name: whole(value) for name, value in rest.items()}
    for make in makers:
        merged |= make(None)
    return merged


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
    """What merging a layer changes, by the names of the state dict."""
    base, prefix = layer, name
    while hasattr(base, "base_layer"):
        base, prefix = base.base_layer, f"{prefix}.base_layer"
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
        """Whether an entry belongs to the adapters, and not to the model without them."""
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


# The weights of a trained model as an engine takes them: whole, merged, plainly named.

_COMPILED: Final = "_orig_mod."
_ADAPTERS: Final = {
    *("lora_A", "lora_B", "lora_E", "lora_embedding_A", "lora_embedding_B"),
    *("lora_magnitude_vector", "vera_lambda_b", "vera_lambda_d", "ia3_l", "modules_to_save"),
    *("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    *("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    *("oft_R", "oft_embedding_R", "boft_R", "boft_s", "prompt_embeddings"),
}
"""Parts of names in the usual adapters' state dicts; others are names that an engine refuses."""


def gathered_state_dict(source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a module or a state dict, by Transformers' names.

    ``DTensor`` shards (FSDP2, tensor parallelism) are gathered: a collective, so every rank calls
    this, and then has the whole model; a push does it bucket by bucket. Adapters of a PEFT model
    are merged into a copy of the weights that they change; the model is left as it was, to the bit.
    The wrappers of ``torch.compile`` and ``DistributedDataParallel`` are taken off.

    Args:
        source: a model, or its state dict.

    Returns:
        Detached tensors; those that nothing had to be done to are the model's own.

    Raises:
        TypeError: the model has adapters that can't be merged into weights, such as prompts.
        ValueError: the state dict holds adapters, which mean nothing without their model; or PEFT
            refuses to merge those of a model.
    """
    if isinstance(source, nn.Module):
        source = unwrapped(source)
        if has_adapters(source):
            return merged_weights(source)
        source = source.state_dict()
    return {name: whole(value) for name, value in plain_weights(source).items()}


def plain_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by Transformers' names, shards as they are.

    Raises:
        ValueError: there are adapters among them, which mean nothing without their model.
    """
    adapters = [name for name in weights if not _ADAPTERS.isdisjoint(name.split("."))]
    if adapters:
        raise ValueError(
            f"This state dict holds adapters, such as {adapters[0]}, which an engine can't apply "
            "without the model that they belong to. Push the PEFT model itself: it is merged."
        )
    return {name.replace(_COMPILED, ""): value for name, value in weights.items()}


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside the wrappers of ``torch.compile`` and ``DistributedDataParallel``."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


# Weights of a sharded model with adapters, merged a layer at a time by all ranks.


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

    makers = []
    for prefix, layer in layers.items():
        if layer.merged or layer.disable_adapters:
            continue
        own = {name: state.pop(name) for name in list(state) if name.startswith(f"{prefix}.")}
        makers.append(partial(merge, prefix, own))
    return makers, {names.plain(name): value.detach() for name, value in state.items()}


# The LoRA adapters of a PEFT model, for an engine that applies them itself.


def adapter_weights(source: nn.Module) -> AdapterWeights:
    """The adapters that act in a model, their scales multiplied in.

    Raises:
        UpdateRefused: it has none, or changes something that is no pair of low-rank factors.
    """
    model = unwrapped(source)
    if not has_adapters(model):
        _refuse(f"{type(model).__name__} has no adapters")
    layers = tuner_layers(model)
    names = AdapterNames(model, layers)
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in layers.items():
        if pair := _factors(name, layer):
            factors[names.plain(name)] = pair
    others: Any = sys.modules["peft.utils.other"]
    for name, module in model.named_modules():
        if isinstance(module, others.ModulesToSaveWrapper | others.TrainableTokensWrapper):
            _refuse(f"{name} is trained whole")
    for name, value in model.named_parameters():
        if value.requires_grad and ".lora_A." not in name and ".lora_B." not in name:
            _refuse(f"{name} is trained, too")
    return AdapterWeights(factors)


def _factors(name: str, layer: Any) -> tuple[Tensor, Tensor] | None:
    peft: Any = sys.modules["peft"]
    if not isinstance(layer, peft.tuners.lora.LoraLayer) or layer.merged:
        _refuse(f"{name} is {'merged' if layer.merged else 'of ' + type(layer).__name__}")
    active = [one for one in layer.active_adapters if one in layer.lora_A]
    if layer.disable_adapters or not active:
        return None
    if len(active) > 1:
        _refuse(f"{name} has several adapters that act at once, {active}")
    (adapter,) = active
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    if variant is not None or layer.lora_bias.get(adapter):
        _refuse(f"{name} has a {'bias' if variant is None else type(variant).__name__}")
    down, up = (whole(part[adapter].weight) for part in (layer.lora_A, layer.lora_B))
    scale = float(layer.scaling[adapter])
    return down, up if scale == 1 else (up.float() * scale).to(up.dtype)  # rounded once


def _refuse(what: str) -> NoReturn:
    raise UpdateRefused(
        f"{what}, and the engine (vLLM with enable_lora) takes LoRA adapters alone. Train such "
        "adapters, or build the engine without enable_lora: then they are pushed merged."
    )


# Weights that are spread over the ranks of a trainer, on their way to an engine of one of them.
#
# They are made whole a bucket at a time, when the engine reads them: all ranks compute a bucket,
# and the rank that pushes keeps it until the next one. No rank ever has the whole model beside its
# shard.

dist: Any = torch.distributed  # it names little of what is used here as exported
BUCKET_BYTES: Final = 256 << 20
"""Most bytes of the weights that are whole at a time; a larger one is alone."""
_PUSHES, _CONTRIBUTES = True, False


def is_spread(source: nn.Module | Mapping[str, Tensor]) -> bool:
    """Whether weights are shards of which other processes have the rest.

    Args:
        source: a model, or its state dict.
    """
    values = source.parameters() if isinstance(source, nn.Module) else source.values()
    return any(mesh.size() > 1 for value in values if (mesh := getattr(value, "device_mesh", None)))


def contribute_weights(source: nn.Module | Mapping[str, Tensor]) -> None:
    """Take part in pushing sharded weights, on a rank that has no engine.

    Each rank of the trainer calls it at the same time, but for those that call
    ``collector.update_policy_weights_(source)`` or ``updater.push(source)`` in its place. It
    returns when they are done. Weights that are whole on every rank need nobody's part.

    Args:
        source: the model after ``fully_shard``, or its state dict.

    Raises:
        RuntimeError: no rank pushes, or the push failed in the middle.
        UpdateRefused: the engine refused the weights and goes on with its old ones.

    Example:
        >>> if ranks.rank == 0:  # doctest: +SKIP
        ...     version = collector.update_policy_weights_(model)
        ... else:
        ...     contribute_weights(model)
    """
    if not is_spread(source):
        return
    shards = ShardedWeights(source)
    roles = _roles(_CONTRIBUTES, shards.device)
    if _PUSHES not in roles:
        raise RuntimeError(
            f"contribute_weights: none of the {len(roles)} ranks pushes. One of them calls "
            "collector.update_policy_weights_(model)."
        )
    ends = [shards.serve(rank) for rank, role in enumerate(roles) if role is _PUSHES]
    for error in filter(None, ends):
        raise error


@contextmanager
def pushed_weights(
    source: nn.Module | Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> Iterator[LazyWeights]:
    """The weights for the engine of this rank, to be read inside, while the others take part.

    Args:
        source: the model, or its state dict.
        dtype: what the engine computes in: wider weights are converted before they are gathered.
    """
    shards = ShardedWeights(source, dtype)
    own = shards.rank
    leaders = [i for i, role in enumerate(_roles(_PUSHES, shards.device)) if role is _PUSHES]
    for rank in leaders[: leaders.index(own)]:
        shards.serve(rank)
    end: Exception | None = RuntimeError(f"The push of rank {own} broke off in the middle.")
    try:
        yield shards
        end = None
    except UpdateRefused as error:
        end = UpdateRefused(str(error))
        raise
    finally:
        shards.say(end, own)
        for rank in leaders[leaders.index(own) + 1 :]:
            shards.serve(rank)


class ShardedWeights(LazyWeights):
    """The weights of a model that all of its ranks make whole, bucket by bucket.

    Every rank makes one at the same time; on the one that pushes, reading a weight makes its
    bucket, while the others :meth:`serve`.
    """

    def __init__(
        self, source: nn.Module | Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> None:
        self.rank = dist.get_rank()
        self._dtype = dtype
        facts: dict[str, WeightFacts] = {}
        self.facts = facts
        """Of every weight, by Transformers' names, in order."""
        self._makers: list[Maker] = []
        self._bucket_of: dict[str, int] = {}
        self._at = -1
        self._bucket: dict[str, Tensor] = {}
        if isinstance(source, nn.Module):
            module = unwrapped(source)
            for part in module.modules():
                if isinstance(part, FSDPModule):  # A forward pass may have gathered parameters.
                    part.reshard()
            if not has_adapters(module):
                source = module.state_dict()
            else:
                makers, source = lazy_merge(module)
                for make in makers:  # merged once to be looked at, and again to be sent
                    for name, value in make(None).items():
                        self._bucket_of[name] = len(self._makers)
                        kind = narrowed(value, dtype)
                        facts[name] = WeightFacts(value.shape, kind, largest(value), name)
                    self._makers.append(make)
        rest = plain_weights(source)
        self.device = next(iter(rest.values())).device
        found = torch.tensor([largest(_local(x)) for x in rest.values()], dtype=torch.float64)
        found = found.to(self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        for (name, value), most in zip(rest.items(), found.tolist(), strict=True):
            place = (_local(value).data_ptr() or id(value), value.shape)
            facts[name] = WeightFacts(value.shape, narrowed(value, dtype), most, place)
        first = first_names({name: facts[name] for name in rest})
        once = {name: rest[name] for name, known in first.items() if name == known}
        for bucket in WeightLayout.of(once, BUCKET_BYTES).buckets():
            self._bucket_of |= dict.fromkeys(bucket, len(self._makers))
            some = {name: once[name] for name in bucket}
            self._makers.append(
                lambda kind, some=some: {n: whole(x, kind) for n, x in some.items()}
            )
        self._first = {name: name for name in facts} | first

    def __getitem__(self, name: str) -> Tensor:
        first = self._first[name]
        at = self._bucket_of[first]
        if at != self._at:
            self._at, self._bucket = -1, {}  # gone before the next one comes
            self.say((at, self._dtype), self.rank)
            self._bucket = self._makers[at](self._dtype)  # every rank calls it
            self._at = at
        return self._bucket[first]

    def serve(self, leader: int) -> Exception | None:
        """Make the buckets that another rank asks for; gives what was wrong, if anything was."""
        while isinstance(asked := self.say(None, leader), tuple):
            at, dtype = asked
            self._makers[at](dtype)
        return asked

    def say(self, value: Any, leader: int) -> Any:
        """What the leader says to all ranks: a bucket that it needs, or how it ended."""
        said = [value]
        dist.broadcast_object_list(said, src=leader, device=self.device)
        return said[0]


def _roles(own: bool, device: torch.device) -> list[bool]:
    """Which ranks push."""
    roles = [torch.zeros(1, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(roles, torch.full((1,), float(own), device=device))
    return [bool(role.item()) for role in roles]


def _local(value: Any) -> Tensor:
    to_local = getattr(value, "to_local", None)
    return value if to_local is None else to_local()

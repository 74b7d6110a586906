"""Models inside wrappers: PEFT, `DistributedDataParallel`, `fully_shard`, `replicate`.

What a wrapper does (gather shards, reduce gradients) happens in the hooks of the outermost
module's forward. Scoring runs parts of a model, so for such a model it runs them inside that
forward. PEFT is not imported: a model that has adapters has done it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final, TypeVar

import torch.distributed
from torch import nn
from transformers import PreTrainedModel

T = TypeVar("T")
SPLIT_OVER: Final = "_tp_size"
"""Attribute in which Transformers writes down how many ranks compute a matrix of a model."""
SPLIT_HERE: Final = "_is_split_here"
"""Attribute of a model that :func:`~torchrl_modules.split_model` has split."""
_is_inside: ContextVar[bool] = ContextVar("is_inside", default=False)


def unwrapped(model: Any, *, who: str) -> PreTrainedModel:
    """The causal language model inside its wrappers, which computes what they do."""
    if isinstance(model, (nn.DataParallel, _of_fsdp("FullyShardedDataParallel"))):
        raise TypeError(
            f"{who}: {type(model).__name__} cuts the inputs or the parameters of a model up in a "
            "way that can't be scored. Use DistributedDataParallel(model) or fully_shard(model)."
        )
    if hasattr(model, "_orig_mod"):
        raise TypeError(
            f"{who}: torch.compile(model) would take no effect, because rows go through the "
            "model's decoder and not through its forward. Give the model itself."
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return unwrapped(model.module, who=who)
    # Adapters such as LoRA are layers of the model inside, so that it gives the PEFT model's logits
    # and gradients by itself.
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    for config in model.peft_config.values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        is_layers = not config.is_prompt_learning and kind != "POLY"
        if not is_layers or getattr(config, "alora_invocation_tokens", None):
            raise TypeError(
                f"{type(model).__name__} has adapters of the kind {'aLoRA' if is_layers else kind},"
                " which are not layers of the model. Train one that is, such as LoRA."
            )
    return model.get_base_model()


def without_ddp(model: nn.Module) -> nn.Module:
    """The module inside `DistributedDataParallel`; another one is given back."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def is_distributed(model: nn.Module) -> bool:
    """Whether a model's forward does what other processes take part in."""
    if isinstance(model, nn.parallel.DistributedDataParallel) or is_sharded(model):
        return True
    if is_split(model):
        return True
    composable: Any = sys.modules.get("torch.distributed._composable.replicate")
    return composable is not None and composable.replicate.state(model) is not None


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a model as a whole."""
    return isinstance(model, _of_fsdp("FSDPModule"))


def is_split(model: Any) -> bool:
    """Whether ranks compute parts of one layer of a model."""
    return (getattr(model, SPLIT_OVER, None) or 1) > 1


def _of_fsdp(name: str) -> Any:
    """A class of FSDP, which is not imported: a model that is sharded has done it."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, ())


def run_inside(model: nn.Module, function: Callable[[], T]) -> T:
    """Call a function within the forward of a model, so that the forward's hooks see it."""
    if not is_distributed(model):
        return function()
    inside = without_ddp(model)
    own = vars(inside).get("forward")

    def forward(*_: Any, **__: Any) -> T:
        with _forward_is(inside, own):
            token = _is_inside.set(True)
            try:
                return function()
            finally:
                _is_inside.reset(token)

    with _forward_is(inside, forward):
        result = model()
    if is_sharded(model) and not torch.is_grad_enabled():
        # No backward pass will do it, and an optimizer built now would hold the whole parameters.
        sharded: Any = model
        sharded.reshard()
    return result


def call(model: nn.Module, **inputs: Any) -> Any:
    """Call a model; within its own forward (:func:`run_inside`) its hooks have been called already.

    Args:
        model: the causal language model inside the wrappers.
        **inputs: of its forward.
    """
    return model.forward(**inputs) if _is_inside.get() else model(**inputs)


@contextmanager
def _forward_is(module: nn.Module, function: Callable[..., Any] | None) -> Iterator[None]:
    """Within, a module has this forward; ``None`` for that of its class."""
    own = vars(module)
    before = own.pop("forward", None)
    if function is not None:
        own["forward"] = function
    try:
        yield
    finally:
        own.pop("forward", None)
        if before is not None:
            own["forward"] = before


def has_hooks(model: nn.Module) -> bool:
    """Say if somebody looks at what modules are given or give, or changes it.

    Args:
        model: any.
    """
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def acting_adapters(model: nn.Module) -> tuple[tuple[bool, tuple[Any, ...]], ...]:
    """Of each layer with adapters of PEFT, whether they are off, and which act when they are not.

    Args:
        model: of PEFT, or any other one.
    """
    return tuple(
        (bool(layer.disable_adapters), tuple(layer.active_adapters))
        for layer in tuned_layers(model).values()
    )


def adapter_settings(model: nn.Module) -> tuple[Any, ...]:
    """Of each layer with adapters of PEFT, what its output follows from beside its weights.

    Args:
        model: of PEFT, or any other one.
    """
    scales = (getattr(layer, "scaling", {}) for layer in tuned_layers(model).values())
    merged = (tuple(layer.merged_adapters) for layer in tuned_layers(model).values())
    own = (tuple(sorted(each.items())) if isinstance(each, dict) else () for each in scales)
    return tuple(zip(acting_adapters(model), merged, own, strict=True))


def tuned_layers(model: nn.Module) -> dict[str, Any]:
    """The layers of a model that have adapters of PEFT, by name.

    Args:
        model: of PEFT, or any other one.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return {}
    layer = peft.tuners.tuners_utils.BaseTunerLayer
    return {name: each for name, each in model.named_modules() if isinstance(each, layer)}


def precision(model: PreTrainedModel, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """The precision of a model's passes: ``torch.autocast`` of a type, or its own without one."""
    return nullcontext() if dtype is None else torch.autocast(model.device.type, dtype=dtype)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside, a model is in evaluation mode; afterwards each of its modules is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def check_wrapped_whole(model: nn.Module, *, who: str) -> None:
    """Refuse a model of which only parts are sharded or replicated: the rest would not be reduced.

    Raises:
        TypeError: names such a part.
    """
    if is_split(model) and not getattr(model, SPLIT_HERE, False):
        # Of a second micro-batch it would count the gradients of norms of the first one again.
        raise TypeError(
            f"{who}: {type(model).__name__} was split by Transformers itself "
            "(distributed_config=), whose gradients add up wrongly over micro-batches. Load it "
            "whole, and give it to split_model(model, tensor_parallel_size=...)."
        )
    if is_distributed(model):
        return
    for name, part in model.named_modules():
        if name and is_distributed(part):
            raise TypeError(
                f"{who}: {name} of {type(model).__name__} is sharded or replicated, but not the "
                "model, so that the gradients of the rest would stay different on every rank. Call "
                "fully_shard(model) last, on the very model that is given."
            )

"""The layers and norms of a model, compiled by ``torch.compile`` where a GPU gains by it.

What a layer does between its products is a dozen passes over its activations, and a norm alone is
eight kernels. Compiled, most of them become one, which saves time and the memory of what lies
between. Attention over packed rows stays a call of its own: no two batches have the same one. A
step of drawing, of one token of each row, is compiled with its attention.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .compilation import Compiled

_LOG = logging.getLogger("torchrl_agents")
_SMALLEST: Final = 100_000_000
"""Weights of a model that is worth a compilation of some seconds."""
_KINDS: Final = {"cuda"}
_GAPS: Final = {torch.bfloat16: 0.05, torch.float16: 0.01}
"""How far a compiled layer may be off, relative: it rounds less often than the layer itself."""
_GAP: Final = 1e-3
"""The same of float32, whose products may be of TensorFloat-32."""


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


class _CompiledForm(NamedTuple):
    """One way of calling modules of one kind, compiled."""

    applies: Callable[..., bool]
    """Whether a call, of a module and its arguments, is made in this way."""
    call: Callable[..., Any]


class _CompiledCall:
    """The call of a module: a compiled form for some calls, and its own for others.

    It is put where ``nn.Module.compile`` puts its own, which copies and pickles leave out.
    """

    def __init__(self, module: nn.Module, forms: Sequence[_CompiledForm]) -> None:
        self._module, self.forms = ref(module), forms

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        module: Any = self._module()
        if not torch.compiler.is_compiling():
            for form in self.forms:
                if form.applies(module, *args, **kwargs):
                    return form.call(module, *args, **kwargs)
        return module._call_impl(*args, **kwargs)


class _Checked:
    """A compiled form, whose first result is compared with that of the module itself."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled
        self._is_right: bool | None = None

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the module in the compiled form, or as it is where that is not right."""
        if self._is_right is None:
            self._is_right = self._check(module, *args, **kwargs)
        if self._is_right:
            return self._compiled(module, *args, **kwargs)
        return module._call_impl(*args, **kwargs)

    def _check(self, module: Any, *args: Any, **kwargs: Any) -> bool:
        # Not in a region that is computed again in the backward pass, which counts what is saved.
        with_grad = torch.is_grad_enabled() and not getattr(module, "gradient_checkpointing", True)
        try:
            with torch.set_grad_enabled(with_grad):
                found = self._compiled(module, *args, **kwargs)
                own = module._call_impl(*args, **kwargs)
            pairs = zip(_tensors(found), _tensors(own), strict=True)
            apart = [(a.detach().double(), b.detach().double()) for a, b in pairs]
            gaps = [float((a - b).norm() / b.norm()) for a, b in apart]
            most = max(_GAPS.get(each.dtype, _GAP) for each in _tensors(own))
            if torch.is_autocast_enabled(_tensors(own)[0].device.type):
                most = max(_GAPS.values())
            reason = "" if max(gaps) <= most else f"it is off by {max(gaps):.2g}"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a compiler or a layer: it is told, and goes uncompiled
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if reason:
            warnings.warn(
                f"{self._compiled.name} is not compiled, which is slower: {reason}. "
                "compile_layers=False does not try it.",
                stacklevel=5,
            )
        return not reason


def _tensors(value: Any) -> list[Tensor]:
    several = value if isinstance(value, (tuple, list)) else [value]
    return [each for each in several if isinstance(each, Tensor)]


def compile_layers(model: PreTrainedModel, wanted: bool | None = None) -> bool:
    """Let layers be compiled for packed rows and for steps of drawing, and norms for all calls.

    The first call of each kind compiles, which is logged; the first result is compared with that
    of the layer itself, and where it is another one, or the compiler fails, one warning says why
    and the model goes on as it is.

    Args:
        model: changed in place: what its layers and norms do when they are called. It may be
            called so again.
        wanted: ``None`` for a model of at least 100 million weights on a GPU.

    Returns:
        Whether they are.
    """
    if wanted is None:
        wanted = model.device.type in _KINDS and model.num_parameters() >= _SMALLEST
    name = type(model).__name__
    slow = "each of its operators is a kernel"
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    norms = [each for each in model.modules() if type(each).__name__.endswith("RMSNorm")]

    def compiled(what: str, **options: Any) -> _Checked:
        return _Checked(Compiled(_call, f"{what} of {name}", slow=slow, dynamic=True, **options))

    packed, step, norm = (
        compiled("a layer", fullgraph=False),
        compiled("a layer's step"),
        compiled("a norm"),
    )
    steps = _CompiledForm(_is_of_slots, partial(_with_own_slots, step))
    for modules, forms in (
        (layers, [_CompiledForm(_is_of_packed_rows, packed), steps]),
        (norms, [_CompiledForm(_is_plain_call, norm)]),
    ):
        for module in modules:
            held: Any = module
            before = held._compiled_call_impl
            if isinstance(before, _CompiledCall) or before is None:
                fresh = _CompiledCall(module, forms)
                held._compiled_call_impl = (before or fresh) if wanted else None
    return wanted


def compile_alike(module: nn.Module, other: nn.Module) -> None:
    """Let a module be compiled as another one is, of which it is a copy.

    Args:
        module: changed in place; without those inside of it.
        other: whose compiled forms it shares.
    """
    held: Any = other
    if isinstance(held._compiled_call_impl, _CompiledCall):
        fresh: Any = module
        fresh._compiled_call_impl = _CompiledCall(module, held._compiled_call_impl.forms)


def settle_compilation(wrapped: nn.Module, model: PreTrainedModel, wanted: bool | None) -> None:
    """Compile the layers of a model as it is wanted, or as its device and size have it.

    Args:
        wrapped: the model with its wrappers.
        model: inside of them.
        wanted: see :func:`compile_layers`.

    Raises:
        ValueError: it is wanted of a model in shards, or on a device where nothing is gained.
    """
    sharded = any(type(each).__name__.startswith("FSDP") for each in wrapped.modules())
    if wanted and (sharded or model.device.type not in _KINDS):
        where = "in shards" if sharded else f"on a {model.device.type}"
        raise ValueError(
            f"compile_layers=True, but {type(model).__name__} is {where}: its layers are compiled "
            f"where a model is whole, on {', '.join(sorted(_KINDS))}. Leave it out."
        )
    compile_layers(model, False if sharded else wanted)


def _is_of_packed_rows(module: nn.Module, *_: Any, **kwargs: Any) -> bool:
    # A layer that `fully_shard` has cut up since then gathers itself in hooks.
    return kwargs.get("trie") is not None and not hasattr(module, "_get_fsdp_state")


def _is_of_slots(_: nn.Module, *__: Any, **kwargs: Any) -> bool:
    return kwargs.get("slots") is not None and _cache_of(kwargs) is not None


def _cache_of(given: Mapping[str, Any]) -> str | None:
    """The name under which a layer is given the cache of all layers."""
    return next((name for name, value in given.items() if isinstance(value, Cache)), None)


def _with_own_slots(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a layer with its own layer of the cache: all layers are compiled as one then."""
    name = _cache_of(kwargs)
    assert name is not None
    number = next(each.layer_idx for each in module.modules() if hasattr(each, "layer_idx"))
    return call(module, *args, **{**kwargs, name: kwargs[name].layers[number]})


def _is_plain_call(module: nn.Module, *args: Any, **kwargs: Any) -> bool:
    hooks: Any = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return len(args) == 1 and not kwargs and not any(hooks)

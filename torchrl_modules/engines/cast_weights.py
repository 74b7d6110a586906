"""A model for drawing whose matrices are cast once, and not again for every token.

Under autocast each product casts its matrix when it is called. A pass over prompts or a training
step does so once; drawing would do it for each token, which reads and writes the weights two times
and a half as often as the products themselves read them.
"""

from copy import deepcopy
from threading import Lock
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from torchrl_modules.compiled_layers import compile_alike
from torchrl_modules.quantized_forward import QuantizedLinear
from torchrl_modules.scoring.wrapped_models import has_hooks

_KINDS: Final = {"cuda"}


def twin_of(model: nn.Module) -> Any:
    """A model of new modules over the tensors and the settings of another one, for drawing.

    Args:
        model: with its weights on their device.
    """
    shared: dict[int, Any] = {id(x): x for x in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        if (config := getattr(module, "config", None)) is not None:
            shared[id(config)] = config
    return deepcopy(model, shared).eval()


class CastModel:
    """A model like another one, whose ``nn.Linear`` hold their weights in the type of autocast.

    Inside autocast it computes what the other does, to the bit: what autocast casts is there
    already. All else, such as norms and embeddings, it shares with the other. Models that have a
    weight in common, such as that of a base under several adapters, have one cast of it.

    Args:
        model: with its weights on their device.
        dtype: of autocast.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model: Any = twin_of(model)
        """It draws; whose weights are current after :meth:`refresh`."""
        self._casts: list[_Cast] = []
        for its, own in zip(model.modules(), self.model.modules(), strict=True):
            for name, weight in _to_cast(own, dtype):
                self._casts.append(_cast_of(weight, dtype))
                setattr(own, name, self._casts[-1].cast)
            compile_alike(own, its)
        self.refresh()

    @property
    def nbytes(self) -> int:
        """Of the weights that are cast."""
        return sum(each.cast.nbytes for each in self._casts)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the other's weights as they are now."""
        for each in self._casts:
            each.cast.copy_(each.weight)


class _Cast:
    """A weight in another type, once for all models that have it."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.weight = weight
        cast = torch.empty_like(weight, dtype=dtype, requires_grad=False)
        self.cast = nn.Parameter(cast, requires_grad=False)


_casts: "WeakValueDictionary[tuple[int, torch.dtype, torch.device], _Cast]" = WeakValueDictionary()
"""By the ``id`` of a weight, which lives as long as its cast does, and where the weight is."""
_lock = Lock()


def _cast_of(weight: Tensor, dtype: torch.dtype) -> _Cast:
    key = id(weight), dtype, weight.device
    with _lock:
        found = _casts.get(key)
        if found is None:
            found = _casts[key] = _Cast(weight, dtype)
        return found


def is_cast_for_each_token(model: nn.Module, dtype: torch.dtype) -> bool:
    """Say if drawing under autocast would cast matrices for every token, and need not.

    Args:
        model: which draws. One with hooks draws itself: a copy would not have those to come.
        dtype: of autocast.
    """
    cast = (weight for module in model.modules() for _, weight in _to_cast(module, dtype))
    return any(weight.device.type in _KINDS for weight in cast) and not has_hooks(model)


def _to_cast(module: nn.Module, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """The weights that autocast casts for each call of a module, by name."""
    is_linear = type(module) in (nn.Linear, QuantizedLinear)
    own = module.named_parameters(recurse=False) if is_linear else ()
    return [(name, x) for name, x in own if x.is_floating_point() and x.dtype != dtype]

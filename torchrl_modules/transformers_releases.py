"""Differences between the releases of Transformers that this library runs with.

Each difference is asked of what is installed, and not of its version. Beside it stands the release
from which its older branch can go.
"""

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple

import transformers
from torch import nn
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

# ``cache`` from 5.24 on. Before that ``past_key_values``, of Mamba ``cache_params``; these two can
# go with the last release before 5.24. ``state`` is RWKV's own.
_CACHE_NAMES: Final = ("cache", "past_key_values", "cache_params", "state")


class UnboundedCacheLayer(CacheLayerMixin):
    """Base of a layer of a cache that rows of any length fit into."""

    def get_max_length(self) -> int:
        """The most tokens of a row; -1: no limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of :meth:`get_max_length` up to 5.15, where it has to be there."""
        return self.get_max_length()


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a model's forward, by name.

    Args:
        model: any.
    """
    return inspect.signature(model.forward).parameters


def cache_name(model: nn.Module) -> str:
    """The name that a model has for what it keeps of the rows that it has read.

    It is a parameter of the model's forward, and a field of what the forward gives.

    Args:
        model: a causal language model.
    """
    for known in (forward_parameters(model), CausalLMOutputWithPast.__dataclass_fields__):
        for name in _CACHE_NAMES:
            if name in known:
                return name
    raise TypeError(f"{type(model).__name__}: this release of Transformers names no cache.")


def takes_sdpa(model: nn.Module) -> bool:
    """Return whether a model computes what it should with an attention of the form of PyTorch's.

    Args:
        model: of Transformers.
    """
    # Models that cap their attention scores say no from 5.21 on, as PyTorch's attention does not
    # cap them; ours does. Before that they said yes.
    config: Any = model.config
    caps = hasattr(config.get_text_config(), "attn_logit_softcapping")
    return caps or bool(getattr(model, "_supports_sdpa", False))


def with_cache(model: nn.Module, cache: Any) -> dict[str, Any]:
    """The arguments of a forward that goes on with a cache, and fills it.

    Args:
        model: a causal language model.
        cache: what it keeps.
    """
    return {cache_name(model): cache, "use_cache": True}


def recomputes_activations(model: nn.Module) -> bool:
    """Return whether a model computes its layers again in the backward pass.

    Args:
        model: of Transformers; another one does not.
    """
    # From 5.24 on it has this name, and the older one warns.
    found = getattr(model, "is_activation_checkpointing", None)
    return bool(getattr(model, "is_gradient_checkpointing", False) if found is None else found)


class ParallelPlans(NamedTuple):
    """Modules of Transformers that split a model by the plans of its class."""

    tensor_parallel: Any
    configuration: Any


def parallel_plans(who: str) -> ParallelPlans:
    """Return what splits a model by the plans of its class.

    Args:
        who: begins the error.

    Raises:
        ImportError: the release that is installed has no plans for experts and matrices at once.
    """
    # From 5.19 on. Before that a plan was applied by functions of other names and arguments.
    try:
        names = ("tensor_parallel", "configuration_utils")
        found = ParallelPlans(*(import_module(f"transformers.distributed.{x}") for x in names))
    except ImportError:
        found = ParallelPlans(None, None)
    needed = ("apply_expert_parallelism", "apply_tensor_parallelism", "resolve_parallel_plans")
    if not all(hasattr(found.tensor_parallel, name) for name in needed):
        raise ImportError(
            f"{who}: Transformers {transformers.__version__} splits no models in the way that is "
            "used here. Install 5.19 or a later one."
        )
    return found

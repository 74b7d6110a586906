"""Weights of which only some exist at a time: they are made whole when they are read."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class WeightFacts(NamedTuple):
    """Facts of a weight, known before it is made whole."""

    shape: torch.Size
    dtype: torch.dtype
    largest: float
    """The largest absolute value; infinity where a value is NaN or infinite."""
    place: Hashable
    """The same for names of one and the same tensor, which are tied."""


class LazyWeights(Mapping[str, Tensor]):
    """A state dict whose values are made when they are read, and belong to the reader.

    Reading in the order of the names is cheap; reading one again makes it again.
    """

    facts: Mapping[str, WeightFacts]
    """Of every weight, by its name, in order."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.facts)

    def __len__(self) -> int:
        return len(self.facts)


class RenamedWeights(LazyWeights):
    """Some weights of others, by other names."""

    def __init__(self, weights: LazyWeights, names: Mapping[str, str]) -> None:
        self._weights = weights
        self._names = names
        self.facts = {name: weights.facts[inside] for name, inside in names.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._names[name]]


def facts_of(weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what has the shapes and types of weights, without making any."""
    return weights.facts if isinstance(weights, LazyWeights) else weights


def shells(weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Weights without data as they are sent: tied ones once, and no wider than an engine's type."""
    facts = facts_of(weights)
    return {
        name: torch.empty(facts[name].shape, dtype=narrowed(facts[name], dtype), device="meta")
        for name, first in first_names(weights).items()
        if name == first
    }


def narrowed(value: Any, dtype: torch.dtype | None) -> torch.dtype:
    """In which type a tensor is sent to an engine that computes in ``dtype``; ``None``: in its own.

    Scales, biases and other vectors stay as they are: a model may keep them in a wider type.
    """
    own: torch.dtype = value.dtype
    if dtype is None or len(value.shape) < 2 or not own.is_floating_point:
        return own
    return min(own, dtype, key=lambda each: each.itemsize)


def first_names(weights: Mapping[str, Any]) -> dict[str, str]:
    """For each name the first one of the same tensor."""
    first: dict[Hashable, str] = {}
    facts = facts_of(weights).items()
    return {name: first.setdefault(storage_of(x), name) for name, x in facts}


def copied_weights(
    weights: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Copies that no training changes: as they are sent, see :func:`shells`; on their devices."""
    return {
        name: weights[name].detach().to(device=device, dtype=shell.dtype, copy=True)
        for name, shell in shells(weights, dtype).items()
    }


def storage_of(value: Tensor | WeightFacts) -> Hashable:
    """The same for weights that share their memory, or of which the facts say so."""
    if isinstance(value, WeightFacts):
        return value.place
    at = 0 if value.is_meta else value.data_ptr()
    return (at, value.shape, value.stride()) if at else id(value)


def largest(value: Tensor) -> float:
    """The largest absolute value, infinity for NaN; 0 where there is none."""
    if not value.numel() or not value.is_floating_point():
        return 0.0
    low, high = torch.aminmax(value.detach())  # `vector_norm` takes twenty times as long on a CPU
    most = max(-float(low), float(high))
    return most if most == most else torch.inf

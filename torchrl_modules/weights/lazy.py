"""Weights of which only some exist at a time: they are made whole when they are read."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class WeightFacts(NamedTuple):
    """What is known of a weight before it is made whole."""

    shape: torch.Size
    dtype: torch.dtype
    largest: float
    """The largest absolute value; infinity where a value is NaN or infinite."""

    def is_finite_in(self, dtype: torch.dtype) -> bool:
        """Whether all values are finite once they are of another type."""
        return bool(torch.tensor(self.largest, dtype=torch.float64).to(dtype).isfinite())


class LazyWeights(Mapping[str, Tensor]):
    """A state dict whose values are made when they are read, and belong to the reader.

    Reading in the order of the names is cheap; reading one again makes it again.
    """

    @property
    @abstractmethod
    def facts(self) -> Mapping[str, WeightFacts]:
        """Of every weight, by its name, in order."""

    def same_values(self, first: str, second: str) -> bool:
        """Whether two names stand for the same values."""
        return torch.equal(self[first], self[second])

    def __iter__(self) -> Iterator[str]:
        return iter(self.facts)

    def __len__(self) -> int:
        return len(self.facts)


class RenamedWeights(LazyWeights):
    """Some weights of others, by other names."""

    def __init__(self, weights: LazyWeights, names: Mapping[str, str]) -> None:
        self._weights = weights
        self._names = names

    @property
    def facts(self) -> Mapping[str, WeightFacts]:
        """See :class:`LazyWeights`."""
        return {name: self._weights.facts[inside] for name, inside in self._names.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._names[name]]


def shells(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors of the same types and shapes; without data where the weights are lazy."""
    if not isinstance(weights, LazyWeights):
        return weights
    return {
        name: torch.empty(facts.shape, dtype=facts.dtype, device="meta")
        for name, facts in weights.facts.items()
    }

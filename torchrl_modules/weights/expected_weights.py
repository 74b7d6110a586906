"""Weights that an engine expects: an update is taken as a whole or refused as a whole."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from .lazy_weights import (
    LazyWeights,
    RenamedWeights,
    WeightFacts,
    facts_of,
    first_names,
    largest,
    storage_of,
)

_WORD: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_NO_VERSION: Final = 1 << 63


class UpdateRefused(ValueError, TypeError):
    """Weights that an engine does not take; nothing was changed. Either kind of fault is one."""


@dataclass(frozen=True)
class ExpectedWeights:
    """The one check of an update: what an engine must be given, by Transformers' names."""

    own: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, named: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Self:
        """Those of a model's entries; entries that share their memory are tied."""
        canonical = first_names(named)
        own = {name: named[name] for name, known in canonical.items() if name == known}
        return cls(own, {name: known for name, known in canonical.items() if name != known}, dtype)

    @property
    def named(self) -> Mapping[str, Tensor]:
        """The entries by all of their names: tied ones have several."""
        return {**self.own, **{name: self.own[known] for name, known in self.aliases.items()}}

    @property
    def message(self) -> dict[str, Any]:
        """Everything but the values, as JSON can carry it."""
        own = {n: [str(x.dtype).removeprefix("torch."), *x.shape] for n, x in self.own.items()}
        return {"own": own, "aliases": dict(self.aliases)}

    @classmethod
    def from_message(cls, message: Mapping[str, Any], dtype: torch.dtype | None) -> Self:
        """Make the expectation of an engine that computes in ``dtype`` from its :attr:`message`."""
        own = {
            name: torch.empty(shape, dtype=getattr(torch, kind), device="meta")
            for name, (kind, *shape) in message["own"].items()
        }
        return cls(own, message["aliases"], dtype)

    def check(self, new: Mapping[str, Tensor], *, who: str) -> Mapping[str, Tensor]:
        """Check an update as a whole, and give the values to load, aliases left out."""
        known = {name: self.aliases.get(name, name) for name in new}
        faults = [f"it has no use for {name}" for name, at in known.items() if at not in self.own]
        looked_at = facts_of(new)
        chosen: dict[str, str] = {}
        for name, at in known.items():
            if at not in self.own:
                continue
            if fault := self._fault(name, looked_at[name], self.own[at]):
                faults.append(fault)
            first = chosen.get(at)
            if first is None and not fault:
                chosen[at] = name
            elif first is not None and not _same(new, first, name):
                faults.append(f"{name} and {at} are tied, but are given different values")
        named = set(known.values())
        faults += [f"it lacks {name}" for name in self.own if name not in named]
        refuse(faults, who=who)
        if isinstance(new, LazyWeights):
            return RenamedWeights(new, chosen)
        return {at: new[name].detach() for at, name in chosen.items()}

    def _fault(self, name: str, value: Any, own: Tensor) -> str | None:
        """Return what keeps a tensor from being taken, or one of which the facts are known."""
        is_known = isinstance(value, WeightFacts)
        if not is_known and (fault := value_fault(name, value)):
            return fault
        if value.dtype.is_floating_point != own.is_floating_point():
            return f"{name} is {value.dtype}, not {own.dtype}"
        if value.shape != own.shape:
            return f"{name} has shape {tuple(value.shape)}, not {tuple(own.shape)}"
        dtype = self.dtype or value.dtype
        if not (value.dtype.is_floating_point and dtype.is_floating_point):
            return None
        if is_known:
            finite = bool(torch.tensor(value.largest, dtype=torch.float64).to(dtype).isfinite())
        else:
            finite = all_finite(value.detach().to(dtype))
        if finite:
            return None
        return f"{name} holds NaN or infinity, is not finite in {dtype}. Did training diverge?"


def refuse(faults: Sequence[str], *, who: str) -> None:
    """Raise `UpdateRefused` with what is wrong with an update, if anything is."""
    if faults:
        shown = "; ".join(faults[:8]) + ("; ..." if len(faults) > 8 else "")
        raise UpdateRefused(
            f"{who} refuses the weight update and keeps its weights ({len(faults)} faults): {shown}"
        )


def value_faults(weights: Mapping[str, Any]) -> list[str]:
    """Return what keeps weights from being sent; lazy ones come whole."""
    if isinstance(weights, LazyWeights):
        return []
    return [fault for name, value in weights.items() if (fault := value_fault(name, value))]


def value_fault(name: str, value: Any) -> str | None:
    """Reason not to send a value, or ``None``: a shard, no data, no tensor at all."""
    if isinstance(value, Tensor) and not value.is_meta and not hasattr(value, "full_tensor"):
        return None
    found = f"a tensor on {value.device}" if isinstance(value, Tensor) else type(value).__name__
    return f"{name} is no whole torch.Tensor with data, but {found}"


def _same(weights: Mapping[str, Tensor], first: str, second: str) -> bool:
    """Return whether two names stand for the same values, where the first one's can be taken."""
    facts = facts_of(weights)
    if not isinstance(weights, LazyWeights) and value_fault(second, facts[second]):
        return False
    if storage_of(facts[first]) == storage_of(facts[second]):
        return True
    left = weights[first]
    return torch.equal(left, weights[second].to(left))


def all_finite(value: Tensor) -> bool:
    """Return whether a floating point tensor of any shape holds neither NaN nor infinity."""
    # Either of them makes the sum one of them, at half the cost of a copy. Large values can, too.
    value = value.detach()
    return bool(value.sum().isfinite()) or bool(largest(value) < torch.inf)


def next_version(version: int | None, present: int, *, who: str) -> int:
    """The number of new weights; ``None`` counts on."""
    if version is None:
        return present + 1
    if isinstance(version, bool) or not isinstance(version, int) or version >= _NO_VERSION:
        raise UpdateRefused(f"{who}: a version is an integer below 2**63, got {version!r}.")
    if version <= present:
        raise UpdateRefused(f"{who}: version {version} is not above the present one, {present}.")
    return version


@torch.no_grad()
def weights_fingerprint(model: nn.Module) -> Hashable:
    """Another one, in all likelihood, once any weight or buffer has another bit.

    Reads all weights once, as drawing one token does.

    Args:
        model: with its weights on a device.
    """
    tensors = [*model.parameters(), *model.buffers()]
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        words = flat.view(_WORD[flat.element_size()])
        size = words.element_size()
        if all(number % 8 == 0 for number in (words.numel() * size, words.storage_offset() * size)):
            words = words.view(torch.int64)  # as many bits at once as there are
        by_device.setdefault(words.device, []).append(words.sum(dtype=torch.int64))
    values = tuple(tuple(torch.stack(sums).tolist()) for sums in by_device.values())
    return values, tuple((t.data_ptr(), t._version) for t in tensors)

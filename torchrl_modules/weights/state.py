"""Weights are taken as a whole or refused as a whole."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from .lazy import LazyWeights, RenamedWeights, WeightFacts

_WORD: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_SUMMED: Final = (torch.float32, torch.float64)
_ROW: Final = 1 << 14
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
        first: dict[Any, str] = {}
        canonical = {name: first.setdefault(_place(v), name) for name, v in named.items()}
        own = {name: named[name] for name, known in canonical.items() if name == known}
        return cls(own, {name: known for name, known in canonical.items() if name != known}, dtype)

    def check(self, new: Mapping[str, Tensor], *, who: str) -> Mapping[str, Tensor]:
        """Check an update as a whole, and give the values to load, aliases left out."""
        if isinstance(new, LazyWeights):
            return self._check_lazy(new, who)
        known = {name: self.aliases.get(name, name) for name in new}
        faults = [f"it has no use for {name}" for name, at in known.items() if at not in self.own]
        updates: dict[str, Tensor] = {}
        for name, value in new.items():
            at = known[name]
            fault = self._fault(name, value, self.own[at]) if at in self.own else None
            if fault is not None:
                faults.append(fault)
            elif at in self.own:
                updates.setdefault(at, value.detach())
            if at in updates and not _same(updates[at], value):
                faults.append(f"{name} and {at} are tied, but are given different values")
        named = set(known.values())
        faults += [f"it lacks {name}" for name in self.own if name not in named]
        refuse(faults, who=who)
        return updates

    def _check_lazy(self, new: LazyWeights, who: str) -> LazyWeights:
        """The same without making the weights whole, but for tied ones that are given twice."""
        known = {name: self.aliases.get(name, name) for name in new}
        faults = [f"it has no use for {name}" for name, at in known.items() if at not in self.own]
        chosen: dict[str, str] = {}
        for name, at in known.items():
            if at not in self.own:
                continue
            fault = self._fault_of_facts(name, new.facts[name], self.own[at])
            faults += [fault] if fault else []
            first = chosen.setdefault(at, name)
            if first != name and not fault and not new.same_values(first, name):
                faults.append(f"{name} and {at} are tied, but are given different values")
        faults += [f"it lacks {name}" for name in self.own if name not in known.values()]
        refuse(faults, who=who)
        return RenamedWeights(new, chosen)

    def _fault_of_facts(self, name: str, facts: WeightFacts, own: Tensor) -> str | None:
        shell = torch.empty(facts.shape, dtype=facts.dtype, device="meta")
        if fault := _shape_fault(name, shell, own):
            return fault
        dtype = self.dtype or facts.dtype
        finite = not dtype.is_floating_point or facts.is_finite_in(dtype)
        return None if finite else _not_finite(name, dtype)

    def _fault(self, name: str, value: Any, own: Tensor) -> str | None:
        if fault := value_fault(name, value):
            return fault
        if fault := _shape_fault(name, value, own):
            return fault
        dtype = self.dtype or value.dtype
        if value.is_floating_point() and not all_finite(value.detach().to(dtype)):
            return _not_finite(name, dtype)
        return None


def _shape_fault(name: str, value: Tensor, own: Tensor) -> str | None:
    if value.is_floating_point() != own.is_floating_point():
        return f"{name} is {value.dtype}, not {own.dtype}"
    if value.shape != own.shape:
        return f"{name} has shape {tuple(value.shape)}, not {tuple(own.shape)}"
    return None


def _not_finite(name: str, dtype: torch.dtype) -> str:
    return f"{name} holds NaN or infinity, is not finite in {dtype}. Did training diverge?"


def refuse(faults: Sequence[str], *, who: str) -> None:
    """Raise `UpdateRefused` with what is wrong with an update, if anything is."""
    if faults:
        shown = "; ".join(faults[:8]) + ("; ..." if len(faults) > 8 else "")
        raise UpdateRefused(
            f"{who} refuses the weight update and keeps its weights ({len(faults)} faults): {shown}"
        )


def value_faults(weights: Mapping[str, Any]) -> list[str]:
    """What keeps weights from being sent; lazy ones come whole."""
    if isinstance(weights, LazyWeights):
        return []
    return [fault for name, value in weights.items() if (fault := value_fault(name, value))]


def value_fault(name: str, value: Any) -> str | None:
    """What keeps a value from being sent, or ``None``: a shard, no data, no tensor at all."""
    if isinstance(value, Tensor) and not value.is_meta and not hasattr(value, "full_tensor"):
        return None
    found = f"a tensor on {value.device}" if isinstance(value, Tensor) else type(value).__name__
    return f"{name} is no whole torch.Tensor with data, but {found}"


def _place(value: Tensor) -> Any:
    """The same for weights that share their memory."""
    at = 0 if value.is_meta else value.data_ptr()
    return (at, value.shape, value.stride()) if at else id(value)


def _same(left: Tensor, right: Any) -> bool:
    if value_fault("", right):
        return False
    return _place(left) == _place(right) or torch.equal(left, right.to(left))


def all_finite(value: Tensor) -> bool:
    """Whether a floating point tensor of any shape holds neither NaN nor infinity."""
    value = value.detach()
    if value.device.type == "cpu" and value.dtype in _SUMMED and value.is_contiguous():
        return _is_finite_in_one_pass(value.view(-1))
    # Either of them makes the sum one of them, at half the cost of a copy. Large values can, too.
    if bool(torch.isfinite(value.sum())):
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(value))).all())


def _is_finite_in_one_pass(values: Tensor) -> bool:
    # Products with a vector, which take no longer than reading the values, and which make them so
    # small that no sum of finite ones overflows.
    small = _small(values.dtype)
    num_rows = len(values) // _ROW
    total = 0.0
    if num_rows:
        total += torch.mv(values[: num_rows * _ROW].view(num_rows, _ROW), small).sum().item()
    rest = values[num_rows * _ROW :]
    if len(rest):
        total += rest.dot(small[: len(rest)]).item()
    return math.isfinite(total)


@cache
def _small(dtype: torch.dtype) -> Tensor:
    return torch.full((_ROW,), 2.0**-40, dtype=dtype, device="cpu")


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
    sums = [_sum_of_bits(tensor) for tensor in tensors]
    by_device: dict[torch.device, list[Tensor]] = {}
    for one in sums:
        by_device.setdefault(one.device, []).append(one)
    values = tuple(tuple(torch.stack(ones).tolist()) for ones in by_device.values())
    return values, tuple((t.data_ptr(), t._version) for t in tensors)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    flat = tensor.detach().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    words = flat.view(_WORD[flat.element_size()])
    size = words.element_size()
    if all(number % 8 == 0 for number in (words.numel() * size, words.storage_offset() * size)):
        words = words.view(torch.int64)  # as many bits at once as there are
    return words.sum(dtype=torch.int64)

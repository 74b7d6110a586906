"""The weights of an update: what an engine expects, what it is given, and adapters."""

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

# Weights of which only some exist at a time: they are made whole when they are read.


class WeightFacts(NamedTuple):
    """What is known of a weight before it is made whole."""

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
    """What has the shapes and types of weights, without making any."""
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
    return {name: first.setdefault(_place(x), name) for name, x in facts}


def copied(
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


# Weights are taken as a whole or refused as a whole.

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
    def message(self) -> dict[str, Any]:
        """Everything but the values, as JSON can carry it."""
        own = {n: [str(x.dtype).removeprefix("torch."), *x.shape] for n, x in self.own.items()}
        return {"own": own, "aliases": dict(self.aliases)}

    @classmethod
    def from_message(cls, message: Mapping[str, Any], dtype: torch.dtype | None) -> Self:
        """What an engine that computes in ``dtype`` has said of itself by :attr:`message`."""
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
        """What keeps a tensor from being taken, or one of which the facts are known."""
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


def _place(value: Tensor | WeightFacts) -> Hashable:
    """The same for weights that share their memory, or of which the facts say so."""
    if isinstance(value, WeightFacts):
        return value.place
    at = 0 if value.is_meta else value.data_ptr()
    return (at, value.shape, value.stride()) if at else id(value)


def _same(weights: Mapping[str, Tensor], first: str, second: str) -> bool:
    """Whether two names stand for the same values, where the first one's can be taken."""
    facts = facts_of(weights)
    if not isinstance(weights, LazyWeights) and value_fault(second, facts[second]):
        return False
    if _place(facts[first]) == _place(facts[second]):
        return True
    left = weights[first]
    return torch.equal(left, weights[second].to(left))


def all_finite(value: Tensor) -> bool:
    """Whether a floating point tensor of any shape holds neither NaN nor infinity."""
    # Either of them makes the sum one of them, at half the cost of a copy. Large values can, too.
    value = value.detach()
    return bool(value.sum().isfinite()) or bool(largest(value) < torch.inf)


def largest(value: Tensor) -> float:
    """The largest absolute value, infinity for NaN; 0 where there is none."""
    if not value.numel() or not value.is_floating_point():
        return 0.0
    low, high = torch.aminmax(value.detach())  # `vector_norm` takes twenty times as long on a CPU
    most = max(-float(low), float(high))
    return most if most == most else torch.inf


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


# Low-rank adapters on their way to an engine that applies them beside the weights it has.

_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


class AdapterWeights(dict[str, Tensor]):
    """The factors of LoRA adapters, in place of whole weights.

    A layer's output is that of its own weights plus ``B @ A @ x``: scales are in ``B`` already.

    Args:
        factors: by the name of the layer in the model without adapters: ``A``, ``[rank, in]``, and
            ``B``, ``[out, rank]``.
    """

    def __init__(self, factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        for layer, (down, up) in factors.items():
            self[f"{layer}{_DOWN}"] = down.detach()
            self[f"{layer}{_UP}"] = up.detach()

    @property
    def layers(self) -> list[str]:
        """The names of the layers that have adapters."""
        return [name.removesuffix(_DOWN) for name in self if name.endswith(_DOWN)]

    @property
    def rank(self) -> int:
        """The largest one."""
        return max(self[f"{layer}{_DOWN}"].shape[0] for layer in self.layers)

    def faults(self, own: Mapping[str, Tensor]) -> list[str]:
        """What keeps them from being used.

        Args:
            own: weights of the model that they are for, by name.
        """
        faults = [] if self else ["it holds no adapter"]
        faults += value_faults(self)
        faults += [fault for layer in self.layers if (fault := self._fault(layer, own))]
        return faults or [
            f"{name} holds NaN or infinity. Did training diverge?"
            for name, value in self.items()
            if not all_finite(value)
        ]

    def _fault(self, layer: str, own: Mapping[str, Tensor]) -> str | None:
        if f"{layer}.weight" not in own:
            return f"the model has no {layer}"
        down, up = self[f"{layer}{_DOWN}"], self[f"{layer}{_UP}"]
        shape = own[f"{layer}.weight"].shape
        if (*up.shape[:1], *down.shape[1:]) == shape and up.shape[1:] == down.shape[:1]:
            return None
        factors = f"{tuple(up.shape)} and {tuple(down.shape)}"
        return f"the adapter of {layer} has factors {factors} for a weight of {tuple(shape)}"

    def save(self, folder: Path) -> None:
        """Write them as PEFT does, so that an engine can load them.

        Args:
            folder: is there.
        """
        tensors = {f"base_model.model.{n}": v.cpu().contiguous() for n, v in self.items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.rank,  # a scale of 1: they are scaled already
            "target_modules": sorted({name.rpartition(".")[2] for name in self.layers}),
            "bias": "none",
            "task_type": "CAUSAL_LM",
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))

"""Weights are taken as a whole or refused as a whole."""

import math
from collections.abc import Mapping
from functools import cache
from typing import Final

import torch
from torch import Tensor

_SUMMED: Final = (torch.float32, torch.float64)
_ROW: Final = 1 << 14


def check_state_dict(
    new: Mapping[str, Tensor], own: Mapping[str, Tensor], *, who: str, strict: bool = True
) -> None:
    """Check an update before any of it is applied.

    Args:
        new: parameter name to value.
        own: the names and shapes that the receiver has.
        who: the receiver, named in the error.
        strict: every own entry must be there too, except one that shares its memory with an entry
            that is (tied weights).

    Raises:
        ValueError: a name, shape or value is wrong; all faults are listed, nothing was applied.
    """
    faults = [f"{name} is not a weight of it" for name in new if name not in own]
    for name, value in new.items():
        if name in own and value.shape != own[name].shape:
            faults.append(f"{name} has shape {tuple(value.shape)}, not {tuple(own[name].shape)}")
        elif name in own and value.is_floating_point() != own[name].is_floating_point():
            faults.append(f"{name} is {value.dtype}, not {own[name].dtype}")
        elif value.is_floating_point() and not all_finite(value):
            faults.append(f"{name} holds NaN or infinity")
    faults += _contradictions(new, own)
    if strict:
        given = {own[name].data_ptr() for name in new if name in own}
        faults += [
            f"{name} is missing"
            for name, value in own.items()
            if name not in new and value.data_ptr() not in given
        ]
    if faults:
        shown = "; ".join(faults[:8]) + ("; ..." if len(faults) > 8 else "")
        raise ValueError(
            f"{who} refuses the weight update and keeps its weights ({len(faults)} faults): {shown}"
        )


def _contradictions(new: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    first: dict[int, str] = {}
    faults = []
    for name in new.keys() & own.keys():
        other = first.setdefault(own[name].data_ptr(), name)
        left, right = new[other], new[name]
        if left.data_ptr() != right.data_ptr() and not torch.equal(left, right.to(left)):
            faults.append(f"{other} and {name} are tied, but are given different values")
    return faults


def all_finite(value: Tensor) -> bool:
    """Whether a floating point tensor holds neither NaN nor infinity.

    Args:
        value: of any shape.
    """
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
    """The number of new weights.

    Args:
        version: what was asked for; ``None`` counts on.
        present: of the weights that serve.
        who: the receiver, named in the error.

    Raises:
        ValueError: it is not above the present one.
    """
    if version is None:
        return present + 1
    if version <= present:
        raise ValueError(f"{who}: version {version} is not above the present one, {present}.")
    return version

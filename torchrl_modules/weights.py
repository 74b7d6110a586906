"""Weights are taken as a whole or refused as a whole."""

from collections.abc import Mapping

import torch
from torch import Tensor


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
        elif value.is_floating_point() and not bool(torch.isfinite(value).all()):
            faults.append(f"{name} holds NaN or infinity")
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

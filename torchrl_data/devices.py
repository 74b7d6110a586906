"""The device of this process, and values of the host on it without waiting for what it does."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def accelerator() -> torch.device:
    """The device of this process: the accelerator, if there is one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())


def on_device(
    values: Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Bring values of the host to a device.

    Args:
        values: numbers, nested or not; or a tensor, which stays as it is where it is on the device.
        device: where to.
        dtype: of the result; that of the values when not given.

    Returns:
        A tensor of the shape of the values. On CUDA it is copied from pinned memory, behind what
        the device was told before: an ordinary copy would first wait for all of that.
    """
    if not isinstance(values, Tensor):
        values = torch.tensor(values, dtype=dtype)
    elif dtype is not None:
        values = values.to(dtype)
    if values.device.type == device.type or device.type == "cpu":
        return values.to(device)
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def on_host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Bring tensors to the host, with one look at a device for all of them.

    Args:
        *tensors: of one dimension; numbers that double precision holds, as token ids are.

    Returns:
        The same values, of the same types.
    """
    far = [one for one in tensors if one.device.type != "cpu"]
    if not far:
        return tensors
    values = torch.cat([one.double() for one in far]).cpu()
    found = iter(values.split([len(one) for one in far]))
    return tuple(x if x.device.type == "cpu" else next(found).to(x.dtype) for x in tensors)

"""The state of every random number generator of a process, as plain values and tensors."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The states of the generators of Python, NumPy and torch, of every CUDA device too."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - what others draw from
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go back to a state.

    Args:
        state: what :func:`random_state` gave. Of its CUDA devices those that are here too.
    """
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)

"""Experts of a mixture as rows carry them: which number stands for one that is not known."""

from typing import Final

import torch

UNKNOWN_BYTE: Final = 255
"""In uint8: the expert is not known, and the router chooses."""


def unknown_expert(dtype: torch.dtype) -> int:
    """Return what stands for an expert that is not known.

    Args:
        dtype: of the experts: uint8, in which it is 255, or a signed one, in which it is -1.
    """
    return UNKNOWN_BYTE if dtype == torch.uint8 else -1

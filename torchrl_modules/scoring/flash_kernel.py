"""PyTorch's kernel of flash attention for rows of many lengths, and a trial of what it is used for.

Shape legend: H heads, D head size.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

_TYPES: Final = (torch.bfloat16, torch.float16)
_LARGEST: Final = 256
"""Head size that the kernel takes, at most."""
_GAP: Final = 0.05
"""Of the trial against plain attention, relative: bfloat16 leaves about 0.01."""


def is_taken(states: Tensor) -> bool:
    """Say if the kernel is for heads of this type and size, on this device.

    Args:
        states: queries or keys, ``[..., D]``.
    """
    size = states.shape[-1]
    is_of_type = states.device.type == "cuda" and states.dtype in _TYPES
    return is_of_type and size % 8 == 0 and size <= _LARGEST


def varlen_forward(
    heads: Sequence[Tensor],
    cumulative: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float,
    *,
    causal: bool,
    window: int | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output ``[queries, H, D]`` and log-sum-exps ``[H, queries]``.

    Args:
        heads: queries, keys and values, ``[tokens, heads, D]``.
        cumulative: int32, where the queries and the keys of each row begin, and the last ones end.
        longest: most queries and keys of a row.
        scale: of the scores.
        causal: a query sees keys up to its own place.
        window: of these as many as this.
        lengths: int32, keys of each row; up to where the next one begins when not given.
    """
    attended = torch.ops.aten._flash_attention_forward(
        *heads,
        *cumulative,
        *longest,
        *(0.0, causal, False),
        scale=scale,
        seqused_k=lengths,
        **window_options(window),
    )
    return attended[0], attended[1]


def window_options(window: int | None) -> dict[str, int]:
    """The arguments of the kernel for a window.

    Args:
        window: see :func:`varlen_forward`.
    """
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def passes_trial(
    results: Callable[[torch.dtype], Sequence[Tensor]],
    heads: tuple[torch.device, torch.dtype, int, int],
    what: str,
    instead: str,
) -> bool:
    """Say if the kernel gives what plain attention gives; where it does not, or fails, warn.

    Args:
        results: of the kernel where it is asked for the type of the heads, and of plain attention
            in float32.
        heads: their device, type, how many share a key, and their size.
        what: is tried, for the warning.
        instead: takes its place, for the warning.
    """
    device, dtype, groups, size = heads
    try:
        pairs = zip(*(results(kind) for kind in (dtype, torch.float32)), strict=True)
        gaps = [((a.float() - b).norm() / b.norm()).item() for a, b in pairs]
        reason = "" if max(gaps) < _GAP else f"it is off by {max(gaps):.2g}"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of this PyTorch or this card: it is told, and not used
        reason = f"{type(error).__name__}: {str(error)[:200]}"
    if reason:
        warnings.warn(
            f"Flash attention {what} is not used on {device} for {dtype}, heads of {size}, "
            f"{groups} to a key: {reason}. {instead}, which is slower, takes its place.",
            stacklevel=3,
        )
    return not reason

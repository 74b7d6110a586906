"""Products of rows with their adapters on a CPU, in place of those of vLLM 0.32.

vLLM copies the factors of its adapters once for each row, 6 MB of a row's head of SmolLM2 at rank
32, and gives rows that have no adapters, whose index is -1, those of the last ones. Here rows that
share adapters are multiplied together, and rows without any add nothing.

Shape legend: N rows, L sets of adapters, I and O widths of a layer's input and output, R rank.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

from torch import Tensor

_OPS: Final = "vllm.lora.ops.torch_ops.lora_ops"
_LAYERS: Final = "vllm.lora.punica_wrapper.punica_cpu"


def shrink_rows(
    inputs: Tensor, down: Tensor, output: Tensor, indices: Tensor, scaling: float = 1.0
) -> None:
    """Write ``scaling * inputs @ A.T`` into the output, with the ``A`` of each row.

    Args:
        inputs: ``[N, I]``.
        down: ``[L, R, I]`` or ``[L, 1, R, I]``.
        output: ``[N, R]`` or wider; rows without adapters get zeros.
        indices: int64 ``[N]``, of each row's adapters; -1 for none.
        scaling: a factor.
    """
    width = down.shape[-2]
    output[:, :width] = 0
    for at, factor in _shared(down, indices, output):
        output[at, :width] = scaling * (inputs[at].to(output.dtype) @ factor.T)


def expand_rows(
    inputs: Tensor, up: Tensor, output: Tensor, indices: Tensor, add_inputs: bool = True
) -> None:
    """Add ``inputs @ B.T`` to the output, with the ``B`` of each row.

    Args:
        inputs: ``[N, R]``.
        up: ``[L, O, R]`` or ``[L, 1, O, R]``.
        output: ``[N, O]``, wider or narrower: what both have is added.
        indices: int64 ``[N]``, of each row's adapters; -1 for none.
        add_inputs: ``False`` overwrites the output.
    """
    expand_slice_of_rows(
        *(inputs, up, output, indices, 0, min(up.shape[-2], output.shape[1]), add_inputs)
    )


def expand_slice_of_rows(
    inputs: Tensor,
    up: Tensor,
    output: Tensor,
    indices: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Add ``inputs @ B.T`` to columns of the output, see :func:`expand_rows`.

    Args:
        inputs: ``[N, R]``.
        up: ``[L, O, R]`` or ``[L, 1, O, R]``.
        output: ``[N, ...]``.
        indices: int64 ``[N]``, of each row's adapters; -1 for none.
        slice_offset: the first column.
        slice_size: how many columns.
        add_inputs: ``False`` overwrites the columns.
    """
    columns = output[:, slice_offset : slice_offset + slice_size]
    if not add_inputs:
        columns.zero_()
    for at, factor in _shared(up, indices, output):
        columns[at] += inputs[at].to(output.dtype) @ factor[:slice_size].T


def _shared(factors: Tensor, indices: Tensor, output: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows that share adapters, and the factor of these."""
    for index in indices.unique().tolist():
        if index >= 0:
            rows = (indices == index).nonzero().squeeze(1)
            yield rows, factors[index].flatten(0, -2).to(output.dtype)


def replace_adapter_kernels() -> None:
    """Let vLLM multiply by these functions, on a CPU, in this process and its forks."""
    own = {
        "bgmv_shrink": shrink_rows,
        "bgmv_expand": expand_rows,
        "bgmv_expand_slice": expand_slice_of_rows,
    }
    import_module(_OPS)
    # By name where others have them already.
    for name in (_OPS, _OPS.rpartition(".")[0], _LAYERS):
        module: Any = sys.modules.get(name)
        for kernel, function in own.items():
            if module is not None:
                setattr(module, kernel, function)

"""Tensors, as any safetensors reader reads them."""

import stat
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors import SafetensorError, TensorSpec, serialize_file

from .errors import CheckpointError

DTYPES: Final = {
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("bool", "complex64"),
}
"""Those of torch that the format has; all else is stored as bytes."""


class TensorEntry(NamedTuple):
    """The entry that is written under a name."""

    dtype: str
    """One of :data:`DTYPES`."""
    shape: tuple[int, ...]
    data: torch.Tensor
    """The bytes in C order in host memory, uint8 ``[N]``."""


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in C order, uint8 ``[N]``; its own memory where that is in order."""
    flat = value.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if len(flat) < 2:
        # Of one element the stride says nothing, and may be anything.
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def write_tensors(
    path: Path, entries: dict[str, TensorEntry], metadata: dict[str, str] | None = None
) -> None:
    """Write a new safetensors file.

    Raises:
        CheckpointError: it could not be written.
    """
    specs = {
        name: TensorSpec(dtype=dtype, shape=shape, data_ptr=data.data_ptr(), data_len=len(data))
        for name, (dtype, shape, data) in entries.items()
    }
    try:
        serialize_file(specs, path, metadata=metadata)
    except SafetensorError as error:
        hint = " Store fewer rows, or stack them." if "header" in str(error) else ""
        raise CheckpointError(f"{path}: {error}.{hint}") from error
    # The library lets nobody else read what it makes; the folder's permissions say who may.
    path.chmod(stat.S_IMODE(path.parent.stat().st_mode) & 0o444)

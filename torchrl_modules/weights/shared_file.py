"""Weights handed to another process of this machine in memory, of which no kill leaves a trace."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from .lazy import shells
from .state import refuse, value_faults

_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors names them."""


@contextmanager
def weights_file(
    state_dict: Mapping[str, Tensor], *, directory: str | None, is_near: bool, who: str
) -> Iterator[str]:
    """Gives the path of a safetensors file for another process of this user."""
    # The file has no name: it is a descriptor of this process, and gone with it, however it ends.
    faults = value_faults(state_dict)
    faults += [
        f"{name} is {value.dtype}, which can't be sent"
        for name, value in shells(state_dict).items()
        if isinstance(value, Tensor) and value.dtype not in _DTYPES
    ]
    refuse(faults, who=who)
    with _file(directory, is_near=is_near) as file:
        _write(file, state_dict)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}" if is_near else str(file.name)


def _file(directory: str | None, *, is_near: bool) -> BinaryIO:
    if not is_near:
        return tempfile.NamedTemporaryFile(prefix="weights-", dir=directory)  # type: ignore[return-value]
    if directory is None:
        return os.fdopen(os.memfd_create("weights"), "wb")
    return os.fdopen(os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600), "wb")


def _write(file: BinaryIO, state_dict: Mapping[str, Tensor]) -> None:
    """The safetensors format; its own writer needs a name, and leaves it behind when killed."""
    header: dict[str, object] = {}
    end = 0
    for name, value in shells(state_dict).items():
        begin, end = end, end + value.numel() * value.element_size()
        place = {"shape": list(value.shape), "data_offsets": [begin, end]}
        header[name] = {"dtype": _DTYPES[value.dtype], **place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the values are aligned
    file.write(len(text).to_bytes(8, "little") + text)
    for value in state_dict.values():
        flat = value.detach().cpu().contiguous().view(-1)
        values: Any = flat.view(torch.uint8).numpy()
        file.write(values)

"""Weights handed to another process of this machine in memory, of which no kill leaves a trace."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor

from torchrl_modules.weights.expected_weights import refuse, value_faults
from torchrl_modules.weights.lazy_weights import shells

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
    state_dict: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    directory: str | None,
    is_near: bool,
    who: str,
) -> Iterator[str]:
    """Gives the path of a safetensors file for another process of this user."""
    # The file has no name: it is a descriptor of this process, and gone with it, however it ends.
    refuse(value_faults(state_dict), who=who)
    sent = shells(state_dict, dtype)
    unknown = {name: value.dtype for name, value in sent.items() if value.dtype not in _DTYPES}
    refuse([f"{name} is {kind}, which can't be sent" for name, kind in unknown.items()], who=who)
    with ExitStack() as stack:
        if not is_near:
            named = tempfile.NamedTemporaryFile(prefix="weights-", dir=directory)  # noqa: SIM115
            file: Any = stack.enter_context(named)
        elif directory is None:
            file = stack.enter_context(os.fdopen(os.memfd_create("weights"), "wb"))
        else:
            descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
            file = stack.enter_context(os.fdopen(descriptor, "wb"))
        # The library's own writer needs a name, and leaves it behind when killed.
        header: dict[str, object] = {}
        end = 0
        for name, value in sent.items():
            begin, end = end, end + value.numel() * value.element_size()
            place = {"shape": list(value.shape), "data_offsets": [begin, end]}
            header[name] = {"dtype": _DTYPES[value.dtype], **place}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # so that the values are aligned
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shell in sent.items():
            value = state_dict[name].detach().to("cpu", shell.dtype).contiguous()
            file.write(value.view(-1).view(torch.uint8).numpy())
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}" if is_near else str(file.name)

"""A folder of weights for a server of SGLang, which reads them as it reads a model's."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from torchrl_modules.weight_transfer.file import weights_file


@contextmanager
def weights_folder(
    weights: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None,
    directory: str | None,
    is_near: bool,
    who: str,
) -> Iterator[str]:
    """Gives the path of a folder with one safetensors file.

    The file of a server on this machine is in memory, and gone with this process however that ends;
    in the folder there is a link to it.

    Args:
        weights: what is written; see :func:`~torchrl_modules.weight_transfer.file.weights_file`.
        dtype: no wider than this.
        directory: where it takes room; memory when not given.
        is_near: whether the server sees the files of this process.
        who: named in errors.
    """
    with (
        weights_file(weights, dtype=dtype, directory=directory, is_near=is_near, who=who) as path,
        tempfile.TemporaryDirectory(prefix="weights-", dir=directory) as folder,
    ):
        Path(folder, "model.safetensors").symlink_to(path)
        yield folder

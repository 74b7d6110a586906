"""A model of its config, on the meta device: it has shapes and no weights."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_FILES: Final = ("model.safetensors", "pytorch_model.bin")
_MOST_OF_HEADER: Final = 100_000_000
"""Bytes; as the format has it."""
_ELSEWHERE: Final = {"gguf_file", "subfolder", "variant"}
"""Arguments with which the weights are in other files."""
_OF_LOADING: Final = _ELSEWHERE | {
    *("cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision"),
    *("token", "trust_remote_code", "attn_implementation", "experts_implementation"),
    *("device_map", "max_memory", "offload_folder", "offload_buffers", "low_cpu_mem_usage"),
    *("ignore_mismatched_sizes", "use_safetensors", "weights_only", "disable_mmap", "key_mapping"),
    *("quantization_config", "fusion_config", "adapter_name", "adapter_kwargs", "tp_plan"),
    *("tp_size", "device_mesh", "distributed_config", "generation_config", "kernel_config"),
    *("use_kernels", "allow_all_kernels", "tqdm_class"),
}
"""Arguments of ``from_pretrained`` that no model is made with."""


def outline(path: str, *, dtype: torch.dtype, **arguments: Any) -> PreTrainedModel:
    """A causal language model on the meta device; the files of its weights have to be there.

    Args:
        path: hub id, of which no weights are fetched, or a folder.
        dtype: of the weights that it has not got.
        **arguments: of ``from_pretrained``.

    Raises:
        ValueError: there is no such model, as from ``from_pretrained``.
        OSError: it has no config, or its weights are not there or broken off.
        TypeError: no model and no config has such an argument.
    """
    config, rest = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **arguments)
    unknown = sorted(set(rest) - _OF_LOADING)
    if unknown:
        raise TypeError(f"from_pretrained takes no {', '.join(unknown)}")
    names = ("attn_implementation", "trust_remote_code")
    own = {name: arguments[name] for name in names if name in arguments}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **own)
    if Path(path).is_dir() and not _ELSEWHERE & arguments.keys():
        _check_weights(Path(path))
    return model


def _check_weights(folder: Path) -> None:
    """Find all files of a model's weights, without reading them."""
    names: set[str] = {name for name in _FILES if (folder / name).is_file()}
    for name in _FILES:
        index = folder / f"{name}.index.json"
        if not names and index.is_file():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing or not names:
        raise OSError(f"its folder has no {', '.join(missing) or ' or '.join(_FILES)}")
    for name in sorted(names):
        size = (folder / name).stat().st_size
        if name.endswith(".safetensors") and (whole := _size_in_header(folder / name)) != size:
            raise OSError(f"{name} has {size} bytes, and should have {whole}: it broke off")


def _size_in_header(path: Path) -> int:
    """The bytes that a file of safetensors says that it has; nothing but its header is read."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, _MOST_OF_HEADER)))
        except ValueError as error:
            raise OSError(f"{path.name} has no header of safetensors") from error
    ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)

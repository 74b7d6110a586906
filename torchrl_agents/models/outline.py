"""A model of its config, on the meta device: it has shapes and no weights."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torchrl_data.pretrained import load_pretrained
from torchrl_modules.policies.loading import check_head

_FILES: Final = ("model.safetensors", "pytorch_model.bin")
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


def outline(
    path: str,
    auto: Any = AutoModelForCausalLM,
    *,
    dtype: torch.dtype,
    check: bool = True,
    any_head: bool = False,
    **arguments: Any,
) -> PreTrainedModel:
    """A language model on the meta device; the files of its weights have to be there.

    Args:
        path: hub id, of which no weights are fetched, or a folder.
        auto: which of Transformers' loaders.
        dtype: of the weights that it has not got.
        check: whether a folder has to have the files of the weights, too.
        any_head: whether the model may be a reward model, whose head is left away.
        **arguments: of ``from_pretrained``.

    Raises:
        ValueError: there is no such model, as from ``from_pretrained``; or it is a reward model.
        OSError: it has no config, or its weights are not there or broken off.
        TypeError: no model and no config has such an argument.
    """
    config, rest = load_pretrained(AutoConfig, path, return_unused_kwargs=True, **arguments)
    if unknown := sorted(set(rest) - _OF_LOADING):
        raise TypeError(f"from_pretrained takes no {', '.join(unknown)}")
    if not any_head:
        check_head(config, auto, path)
    names = ("attn_implementation", "trust_remote_code")
    own = {"trust_remote_code": False} | {n: arguments[n] for n in names if n in arguments}
    with torch.device("meta"):
        model = auto.from_config(config, dtype=dtype, **own)
    if check and not _ELSEWHERE & arguments.keys():
        check_weight_files(path)
    return model.eval()  # as `from_pretrained` gives it


def check_weight_files(path: str) -> None:
    """Find all files of a model's weights, without reading them.

    Args:
        path: a folder; of a hub id nothing is known here.

    Raises:
        OSError: there are none, or one is missing or broken off.
    """
    folder = Path(path)
    if not folder.is_dir():
        return
    names: set[str] = {name for name in _FILES if (folder / name).is_file()}
    for name in _FILES:
        index = folder / f"{name}.index.json"
        if not names and index.is_file():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing or not names:
        raise OSError(f"its folder has no {', '.join(missing) or ' or '.join(_FILES)}")
    for name in sorted(names):
        try:
            if name.endswith(".safetensors"):
                with safe_open(folder / name, framework="np"):
                    pass  # nothing but the header is read, which says how long the file has to be
        except SafetensorError as error:
            raise OSError(f"{name} broke off: {error}") from error

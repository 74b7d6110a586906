"""Weights come to vLLM's workers, and are loaded there whole or not at all."""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from torchrl_modules.engines.whole_batch_engine import KeptAdapters
from torchrl_modules.weights.adapter_weights import AdapterWeights
from torchrl_modules.weights.expected_weights import ExpectedWeights, refuse

from .releases import not_loaded, online_quantizations
from .runtime import import_vllm

_MEMORY: Final = Path("/dev/shm")
_WHO: Final = "VLLMEngine.update_weights"


def expected_weights(model_config: Any) -> ExpectedWeights:
    """Return what a model must be given, read off the Transformers model of its configuration."""
    if fault := quantization_fault(model_config):
        raise ValueError(f"{fault}, which cannot be updated.")
    config = model_config.hf_config
    # One that is a text model too is trained with its vision where it reads images.
    is_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not takes_images(model_config)
    sees = not is_text and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=model_config.trust_remote_code)
    named = dict(model.named_parameters(remove_duplicate=False))
    return ExpectedWeights.of(named, model_config.dtype)


def quantization_fault(model_config: Any) -> str | None:
    """Return what keeps the weights of a quantised model from being updated, or nothing.

    vLLM quantises whole weights as it loads them (``quantization="fp8_per_channel"``), and does so
    again with those of an update.
    """
    if model_config.quantization is None:
        return None
    known = online_quantizations()
    if getattr(model_config.hf_config, "quantization_config", None) is not None:
        return "the weights were quantised before they were saved"
    if model_config.quantization not in known:
        return f"the model is quantised by {model_config.quantization}, not {sorted(known)},"
    return None


def takes_images(model_config: Any) -> bool:
    """Return whether prompts may hold images, with the engine's settings as they are."""
    return model_config.is_multimodal_model and not model_config.skip_tokenizer_init


def check_updatable(llm_engine: Any) -> None:
    """Check that an engine of this process can be updated."""
    config, executor = llm_engine.vllm_config, llm_engine.model_executor
    obstacles = {
        "the model runs in other processes": not hasattr(executor, "driver_worker"),
        "the engine holds LoRA adapters": config.lora_config is not None,
    }
    found = [obstacle for obstacle, there in obstacles.items() if there]
    if fault := quantization_fault(config.model_config):
        found.insert(0, fault)
    if found:
        raise RuntimeError(
            f"VLLMEngine.update_weights: {found[0]}, which whole weights cannot update. Build the "
            "engine from whole weights, in this process alone; one with enable_lora is pushed "
            "models with LoRA adapters."
        )


def load_all_or_none(worker: Any, read: Callable[[], Mapping[str, Tensor]]) -> dict[str, str]:
    """Check weights that have come to a worker, and load them: all or none."""
    # Gives `{}`; or what was `refused`, and nothing was changed; or what `failed`, and the weights
    # are a mixture.
    try:
        weights = expected_weights(worker.model_config).check(read(), who="vLLM")
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    try:
        load_weights(worker, import_vllm(in_process=False), weights.items())
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    return {}


def load_weights(
    worker: Any, names: SimpleNamespace, weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Load checked weights in a worker; `RuntimeError`: some were not loaded."""
    model = worker.model_runner.get_model()
    with names.set_current_vllm_config(worker.vllm_config), torch.no_grad():
        names.initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(iter(weights))
        finally:
            # Puts the parameters back from the meta device, loaded or not.
            names.finalize_layerwise_reload(model, worker.model_config)
        # On a CPU two kinds of layer compute with packed copies, which the reload leaves stale: a
        # head that is tied to the embedding, and the experts of a mixture.
        for module in model.modules() if names.current_platform.is_cpu() else ():
            method: Any = getattr(module, "quant_method", None)
            if isinstance(module, names.VocabParallelEmbedding):
                method.process_weights_after_loading(module)
            experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
            if experts is not None:
                experts.process_weights_after_loading(module)
    if loaded is None:
        return
    if unloaded := not_loaded((name for name, _ in model.named_parameters()), loaded):
        raise RuntimeError(f"vLLM did not load {unloaded[:4]} from the state dict.")


class ServedAdapters:
    """Adapters under names of their own, so that no request meets another version's.

    A request keeps the adapter that it began with to its end; what none uses is let go when the
    next one comes.

    Args:
        llm_engine: of vLLM, with ``enable_lora``.
    """

    def __init__(self, llm_engine: Any) -> None:
        self._llm_engine = llm_engine
        self._max_rank: int = llm_engine.vllm_config.lora_config.max_lora_rank
        where = _MEMORY if _MEMORY.is_dir() else None
        self._folder = tempfile.TemporaryDirectory(prefix="adapters-", dir=where)
        self._loaded: dict[int, Any] = {}
        self._kept: set[int] = set()
        self._count = 0
        self.current: Any = None
        """What new requests get; ``None`` for the model as it is."""

    @cached_property
    def _own(self) -> Mapping[str, Tensor]:
        """The model's own weights, without data; an engine that only draws needs none."""
        return expected_weights(self._llm_engine.vllm_config.model_config).named

    def load(self, weights: AdapterWeights, version: int) -> None:
        """Serve other adapters to requests that come from now on; between two steps.

        Raises:
            UpdateRefused: the engine can't apply them; those before keep serving.
        """
        self.current = self._add(weights, f"version-{version}", _WHO)
        # What no request uses any more goes.
        requests = self._llm_engine.engine_core.engine_core.scheduler.requests.values()
        used = {each.lora_request.lora_int_id for each in requests if each.lora_request}
        for number, served in list(self._loaded.items()):
            if not (number in used or number in self._kept or served is self.current):
                del self._loaded[number]
                self._drop(number, Path(served.lora_path))

    def keep(self, weights: AdapterWeights) -> KeptAdapters:
        """Take adapters for requests that name them; between two steps.

        Raises:
            UpdateRefused: the engine can't apply them.
        """
        request = self._add(weights, f"kept-{self._count + 1}", "VLLMEngine.keep_adapters")
        self._kept.add(request.lora_int_id)
        return KeptAdapters(request.lora_name, request)

    def drop(self, kept: KeptAdapters) -> None:
        """Let kept adapters go, which no request uses; between two steps."""
        number = kept.request.lora_int_id
        self._kept.remove(number)
        self._drop(number, Path(self._loaded.pop(number).lora_path))

    def _add(self, weights: AdapterWeights, name: str, who: str) -> Any:
        limit = "the engine was built with max_lora_rank="
        weights.check(self._own, self._max_rank, limit=limit, who=who)
        self._count += 1
        folder = Path(self._folder.name) / str(self._count)
        folder.mkdir()
        weights.save(folder)
        # Its name, its number from 1 on, and its folder.
        request = import_vllm().LoRARequest(name, self._count, str(folder))
        try:
            self._llm_engine.add_lora(request)
        except Exception as error:  # its own check of names and shapes
            self._drop(self._count, folder)
            refuse([f"vLLM can't apply these adapters: {error}"], who=who)
        self._loaded[self._count] = request
        return request

    def _drop(self, number: int, folder: Path) -> None:
        self._llm_engine.remove_lora(number)
        shutil.rmtree(folder)

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()

"""New weights for a vLLM engine: checked as a whole, then loaded in one go."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from torchrl_modules.weights.state import ExpectedWeights

from .runtime import VLLMNames, import_vllm


def expected_weights(model_config: Any) -> ExpectedWeights:
    """What a model must be given, read off the Transformers model of its configuration."""
    if model_config.quantization is not None:
        raise ValueError("the model is quantised, which cannot be updated.")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config.hf_config, trust_remote_code=model_config.trust_remote_code
        )
    named = dict(model.named_parameters(remove_duplicate=False))
    return ExpectedWeights.of(named, model_config.dtype)


def check_updatable(llm_engine: Any) -> None:
    """Check that an engine of this process can be updated."""
    config = llm_engine.vllm_config
    obstacles = {
        "the model runs in other processes": not hasattr(
            llm_engine.model_executor, "driver_worker"
        ),
        "the model is quantised": config.model_config.quantization is not None,
        "the engine holds LoRA adapters": config.lora_config is not None,
    }
    found = [obstacle for obstacle, there in obstacles.items() if there]
    if found:
        raise RuntimeError(
            f"VLLMEngine.update_weights: {found[0]}, which it cannot update. Build the "
            "engine from whole weights, in this process alone."
        )


def load_all_or_none(
    worker: Any, model: Any, read: Callable[[], Mapping[str, Tensor]]
) -> dict[str, str]:
    """Check weights that have come to a worker, and load them: all or none."""
    # Gives `{}`; or what was `refused`, and nothing was changed; or what `failed`, and the weights
    # are a mixture.
    try:
        weights = expected_weights(worker.model_config).check(read(), who="vLLM")
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    try:
        _load(worker, model, import_vllm(in_process=False), weights)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    return {}


def load_weights(worker: Any, names: VLLMNames, weights: Mapping[str, Tensor]) -> None:
    """Load checked weights in a worker of this process; `RuntimeError`: some were not loaded."""
    _load(worker, worker.model_runner.get_model(), names, weights)


def _load(worker: Any, model: Any, names: VLLMNames, weights: Mapping[str, Tensor]) -> None:
    with names.set_current_vllm_config(worker.vllm_config), torch.no_grad():
        names.initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(iter(weights.items()))
        finally:
            # Puts the parameters back from the meta device, loaded or not.
            names.finalize_layerwise_reload(model, worker.model_config)
        if names.current_platform.is_cpu():
            _repack(model, names.VocabParallelEmbedding)
    unloaded = {name for name, _ in model.named_parameters()} - (loaded or set())
    if loaded is not None and unloaded:
        raise RuntimeError(f"vLLM did not load {sorted(unloaded)[:4]} from the state dict.")


def _repack(model: torch.nn.Module, embedding_class: type) -> None:
    # On a CPU two kinds of layer compute with packed copies, which the reload leaves stale: a head
    # that is tied to the embedding, and the experts of a mixture.
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(module, embedding_class):
            method.process_weights_after_loading(module)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if experts is not None:
            experts.process_weights_after_loading(module)

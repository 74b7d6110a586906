"""Settings of vLLM that make it the engine of a policy: in this process, and as a server."""

from collections.abc import Mapping
from typing import Any, Final

from .image_scheduler import IMAGE_SCHEDULER
from .releases import returns_sampling_masks

FIXED: Final = {
    # Log-probs of the distribution that was sampled from: temperature, top-k, ... applied.
    "logprobs_mode": "processed_logprobs",
    # Token ids only.
    "skip_tokenizer_init": True,
    # No sampling defaults and no stop tokens out of the model's directory.
    "generation_config": "vllm",
}
"""What the contract of an engine fixes."""

WORKER: Final = {"worker_extension_cls": "torchrl_modules.vllm.worker.vLLMWorker"}
"""So that new weights can be sent to the workers."""

CPU_DEFAULTS: Final = {
    # In float32 log-probs are those of the model that is trained.
    "dtype": "float32",
    # It would compile for minutes, and take nearly all memory for its cache.
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 30,
    # With it a request's seed ends the engine.
    "enable_chunked_prefill": False,
}
"""On a CPU, where the user has not said otherwise."""


QUANTIZED_ON_CPU: Final = {"dtype": "bfloat16"}  # vLLM quantises no weights of float32
"""The same where weights are quantised."""

ADAPTER_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as ``max_lora_rank``."""

_NO_ADAPTERS: Final = (
    "{who}: processor= is given, and enable_lora too: what vLLM keeps of an image is not told "
    "apart by the adapters that it was read with. Train whole weights, or push adapters merged."
)

LORA_DEFAULTS: Final = {"max_loras": 4}  # what began under the last versions goes on beside new
"""Of an engine that is pushed adapters, where the user has not said otherwise."""


IMAGES: Final = {
    # Its processors of images need the tokenizer of the model's directory.
    "skip_tokenizer_init": False
}
"""In the place of what the contract fixes, where prompts hold images."""

IMAGE_SERVER: Final = {
    **IMAGES,
    "tokens_only": False,
    "enable_scale_out": True,
    # The two halves of its cache disagree about what is there, when one is emptied for new weights
    # while requests are on their way to the other.
    "mm_processor_cache_gb": 0,
    "scheduler_cls": IMAGE_SCHEDULER,
}
"""The same of a server."""


def engine_settings(
    requested: Mapping[str, Any], *, is_cpu: bool, images: bool = False, who: str
) -> dict[str, Any]:
    """Settings of an engine of this process.

    Args:
        requested: by the user.
        is_cpu: the platform is a CPU.
        images: prompts hold images.
        who: is named in errors.

    Raises:
        TypeError: a fixed setting is given.
        ValueError: prompts hold images, and the engine would be pushed adapters.
    """
    if fixed := sorted(FIXED.keys() & requested.keys()):
        raise TypeError(f"{who} sets {fixed} itself; leave them out.")
    if images and requested.get("enable_lora"):
        raise ValueError(_NO_ADAPTERS.format(who=who))
    defaults = dict(CPU_DEFAULTS) if is_cpu else {}
    if is_cpu and requested.get("quantization"):
        defaults |= QUANTIZED_ON_CPU
    if requested.get("enable_lora"):
        defaults |= LORA_DEFAULTS
    fixes = FIXED | (IMAGES if images else {})
    return {"use_tqdm_on_load": False, **WORKER, **defaults, **requested, **fixes}


def mask_settings(*, is_cpu: bool) -> dict[str, Any]:
    """Settings with which an engine tells the tokens that a truncation left.

    Args:
        is_cpu: the platform is a CPU.

    Returns:
        That it returns them, or where the vLLM that is installed can't, that it may be asked for
        the log-probs of the whole vocabulary, off which they are read.
    """
    if returns_sampling_masks(is_cpu=is_cpu):
        return {"return_sampling_mask": True}
    return {"max_logprobs": -1}


def check_no_adapters(max_adapters: int, *, who: str) -> None:
    """Check that an engine whose prompts hold images takes whole weights; else `ValueError`."""
    if max_adapters:
        raise ValueError(_NO_ADAPTERS.format(who=who))


def check_built(llm: Any, *, who: str) -> None:
    """Check that a ``vllm.LLM`` which somebody else built can be the engine of a policy."""
    if not hasattr(llm.llm_engine.engine_core, "engine_core"):
        raise ValueError(
            f"{who}: this LLM runs in a process of its own. Set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0 before vLLM is imported, or run it as a server: "
            "start_server(...)."
        )
    mode = llm.llm_engine.vllm_config.model_config.logprobs_mode
    if mode != FIXED["logprobs_mode"]:
        raise ValueError(
            f"{who}: this LLM reports {mode!r}, which are not the log-probs of the distribution "
            f"sampled from. Build it with logprobs_mode={FIXED['logprobs_mode']!r}."
        )

"""Differences between the releases of vLLM that the engines run with.

Each difference is asked of what is installed, and not of its version. Beside it stands the release
from which its older branch can go.
"""

from collections.abc import Collection, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

USED: Final = (
    ("vllm", ()),
    # Before the modules that compile something as they are imported.
    ("vllm.platforms", ("current_platform",)),
    ("vllm", ("LLM", "SamplingParams")),
    ("vllm.config", ("set_current_vllm_config",)),
    ("vllm.distributed.device_communicators.shm_broadcast", ("SpinCondition",)),
    ("vllm.envs", ("environment_variables",)),
    ("vllm.inputs", ("tokens_input",)),
    ("vllm.lora.request", ("LoRARequest",)),
    ("vllm.model_executor.layers.vocab_parallel_embedding", ("VocabParallelEmbedding",)),
    (
        "vllm.model_executor.model_loader.reload",
        ("finalize_layerwise_reload", "initialize_layerwise_reload"),
    ),
    ("vllm.sampling_params", ("RequestOutputKind",)),
    ("vllm.transformers_utils.config", ("get_config",)),
)
"""The names that are used, by module, and that all of these releases have."""

# `vllm.entrypoints.launchers` from 0.29 on.
_SERVERS: Final = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.api_server",
)


def client_error() -> type[Exception]:
    """Return what vLLM raises for a request that it refuses; ``ValueError`` before 0.27."""
    return getattr(import_module("vllm.exceptions"), "VLLMClientError", ValueError)


def tells_versions() -> bool:
    """Return whether responses say which weights drew each of their tokens; from 0.32 on."""
    output: Any = import_module("vllm.outputs").CompletionOutput
    return "weight_versions" in output.__dataclass_fields__


def returns_sampling_masks(*, is_cpu: bool) -> bool:
    """Return whether an engine returns the tokens that a truncation left: on a GPU, from 0.28 on.

    Args:
        is_cpu: the platform is a CPU, for which vLLM has no Model Runner V2, which returns them.
    """
    config: Any = import_module("vllm.config").ModelConfig
    return not is_cpu and "return_sampling_mask" in config.__dataclass_fields__


def online_quantizations() -> frozenset[str]:
    """The names of ways to quantise whole weights as they are loaded, and again at an update."""
    try:
        module: Any = import_module("vllm.config.quantization")
    except ModuleNotFoundError:  # of a release that has no such ways
        return frozenset()
    return frozenset(getattr(module, "ONLINE_QUANT_SHORTHAND_NAMES", ()))


def strips_images(vllm_config: Any) -> bool:
    """Return whether workers are not sent the images of a cached prefix; 0.32, Model Runner V1.

    Nor are they sent when the request is read again. Model Runner V2 is sent them then.
    """
    strips = hasattr(import_module("vllm.multimodal.utils"), "strip_covered_mm_data")
    return strips and not vllm_config.use_v2_model_runner


def lacking() -> list[str]:
    """Features that the installed vLLM lacks, each in a line, with the release that has it."""
    told = "servers say which weights drew a token (0.32): rows end before new weights come"
    return [] if tells_versions() else [told]


def label_weights(llm_engine: Any, label: str) -> None:
    """Name the weights of an engine of this process, for whoever asks vLLM; from 0.27 on."""
    if hasattr(llm_engine, "set_weight_version"):
        llm_engine.set_weight_version(label)


def end_engine_core(client: Any) -> None:
    """End an engine of this process, and leave the process group, which others use.

    Args:
        client: of the engine's core; from 0.27 on one that is let go ends the group, too.
    """
    if hasattr(client, "_finalizer"):
        client._finalizer.detach()
    client.engine_core.model_executor.shutdown()


def not_loaded(names: Iterable[str], loaded: Collection[str]) -> list[str]:
    """The parameters of a model that ``load_weights`` did not report.

    Args:
        names: of the parameters.
        loaded: what it reported. Up to 0.26 it calls routed experts what they were called before.
            Scales are not among it, which vLLM makes of the weights beside them.
    """
    missing = [n for n in names if not {n, n.replace(".routed_experts.", ".")} & {*loaded}]
    return sorted(n for n in missing if n.partition("weight_scale")[0] + "weight" not in loaded)


def server_module() -> str:
    """The module that runs vLLM's server as a program."""
    for name in _SERVERS:
        try:
            if find_spec(name) is not None:
                return name
        except ModuleNotFoundError:  # a package above it
            continue
    raise ImportError(f"The vLLM installed here has none of the servers {', '.join(_SERVERS)}.")

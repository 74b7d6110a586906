"""Policies: inference engines behind one prompt/response/full layout."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_data import ChatHistory, LogProbs, Masks, Text, Tokens

    from .engines.bridges import open_async
    from .engines.engine import AsyncEngine, Engine, EngineDied, EngineLoad, Generation, VersionSpan
    from .engines.fleet import EngineFleet
    from .engines.supervision import EngineHealth
    from .engines.transformers import AsyncTransformersEngine, TransformersEngine
    from .policies.base import LLMWrapperBase
    from .policies.model_files import local_model
    from .policies.transformers_wrapper import TransformersWrapper
    from .policies.vllm_wrapper import vLLMWrapper
    from .sampling import SamplingParameters
    from .scoring.scorer import TokenDistribution, chunked_log_prob
    from .vllm.client import VLLMServerEngine
    from .vllm.engine import AsyncVLLMEngine, VLLMEngine
    from .vllm.server import LLMOnDevice, SupervisedEngine, make_vllm_worker, start_server
    from .vllm.worker import vLLMWorker
    from .weight_transfer import stateless_init_process_group

_NAMES = {
    "engines.engine": (
        "AsyncEngine",
        "Engine",
        "EngineDied",
        "EngineLoad",
        "Generation",
        "VersionSpan",
    ),
    "engines.transformers": ("AsyncTransformersEngine", "TransformersEngine"),
    "vllm.engine": ("AsyncVLLMEngine", "VLLMEngine"),
    "engines.fleet": ("EngineFleet",),
    "engines.supervision": ("EngineHealth",),
    "vllm.server": ("LLMOnDevice", "SupervisedEngine", "make_vllm_worker", "start_server"),
    "policies.base": ("LLMWrapperBase",),
    "sampling": ("SamplingParameters",),
    "scoring.scorer": ("TokenDistribution", "chunked_log_prob"),
    "policies.transformers_wrapper": ("TransformersWrapper",),
    "vllm.client": ("VLLMServerEngine",),
    "policies.model_files": ("local_model",),
    "engines.bridges": ("open_async",),
    "weight_transfer": ("stateless_init_process_group",),
    "vllm.worker": ("vLLMWorker",),
    "policies.vllm_wrapper": ("vLLMWrapper",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

# The groups that policies read and write, where TorchRL's users look for them too.
_LAYOUT = ("ChatHistory", "LogProbs", "Masks", "Text", "Tokens")

__all__ = [
    "AsyncEngine",
    "AsyncTransformersEngine",
    "AsyncVLLMEngine",
    "ChatHistory",
    "Engine",
    "EngineDied",
    "EngineFleet",
    "EngineHealth",
    "EngineLoad",
    "Generation",
    "LLMOnDevice",
    "LLMWrapperBase",
    "LogProbs",
    "Masks",
    "SamplingParameters",
    "SupervisedEngine",
    "Text",
    "TokenDistribution",
    "Tokens",
    "TransformersEngine",
    "TransformersWrapper",
    "VLLMEngine",
    "VLLMServerEngine",
    "VersionSpan",
    "chunked_log_prob",
    "local_model",
    "make_vllm_worker",
    "open_async",
    "start_server",
    "stateless_init_process_group",
    "vLLMWorker",
    "vLLMWrapper",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("torchrl_data").__version__
    if name in _LAYOUT:
        return getattr(import_module("torchrl_data"), name)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return import_module("torchrl_data.checks").knows_torchrl(value)

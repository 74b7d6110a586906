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

_HOMES = {
    "AsyncEngine": "engines.engine",
    "AsyncTransformersEngine": "engines.transformers",
    "AsyncVLLMEngine": "vllm.engine",
    "Engine": "engines.engine",
    "EngineDied": "engines.engine",
    "EngineFleet": "engines.fleet",
    "EngineHealth": "engines.supervision",
    "EngineLoad": "engines.engine",
    "Generation": "engines.engine",
    "LLMOnDevice": "vllm.server",
    "LLMWrapperBase": "policies.base",
    "SamplingParameters": "sampling",
    "SupervisedEngine": "vllm.server",
    "TokenDistribution": "scoring.scorer",
    "TransformersEngine": "engines.transformers",
    "TransformersWrapper": "policies.transformers_wrapper",
    "VLLMEngine": "vllm.engine",
    "VLLMServerEngine": "vllm.client",
    "VersionSpan": "engines.engine",
    "chunked_log_prob": "scoring.scorer",
    "local_model": "policies.model_files",
    "make_vllm_worker": "vllm.server",
    "open_async": "engines.bridges",
    "start_server": "vllm.server",
    "stateless_init_process_group": "weight_transfer",
    "vLLMWorker": "vllm.worker",
    "vLLMWrapper": "policies.vllm_wrapper",
}

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

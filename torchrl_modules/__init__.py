"""Policies: inference engines behind one prompt/response/full layout."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_data import ChatHistory, LogProbs, Masks, Text, Tokens

    from .engines.async_protocol import AsyncEngine
    from .engines.async_transformers import AsyncTransformersEngine
    from .engines.fleet.engine_fleet import EngineFleet
    from .engines.fleet.member import EngineHealth
    from .engines.load import EngineLoad
    from .engines.open_async import open_async
    from .engines.protocol import Engine, EngineDied, Generation, VersionSpan
    from .engines.transformers_engine import TransformersEngine
    from .policies.base import LLMWrapperBase
    from .policies.model_files import local_model
    from .policies.transformers_wrapper import TransformersWrapper
    from .policies.vllm_wrapper import vLLMWrapper
    from .sampling.params import SamplingParameters
    from .scoring.chunked_head import chunked_log_prob
    from .scoring.distribution import TokenDistribution
    from .vllm.async_engine import AsyncVLLMEngine
    from .vllm.client import VLLMServerEngine
    from .vllm.engine import VLLMEngine
    from .vllm.launch import start_server
    from .vllm.supervised import LLMOnDevice, SupervisedEngine, make_vllm_worker
    from .vllm.worker import vLLMWorker
    from .weights.process_group import stateless_init_process_group

_HOMES = {
    "AsyncEngine": "engines.async_protocol",
    "AsyncTransformersEngine": "engines.async_transformers",
    "AsyncVLLMEngine": "vllm.async_engine",
    "Engine": "engines.protocol",
    "EngineDied": "engines.protocol",
    "EngineFleet": "engines.fleet.engine_fleet",
    "EngineHealth": "engines.fleet.member",
    "EngineLoad": "engines.load",
    "Generation": "engines.protocol",
    "LLMOnDevice": "vllm.supervised",
    "LLMWrapperBase": "policies.base",
    "SamplingParameters": "sampling.params",
    "SupervisedEngine": "vllm.supervised",
    "TokenDistribution": "scoring.distribution",
    "TransformersEngine": "engines.transformers_engine",
    "TransformersWrapper": "policies.transformers_wrapper",
    "VLLMEngine": "vllm.engine",
    "VLLMServerEngine": "vllm.client",
    "VersionSpan": "engines.protocol",
    "chunked_log_prob": "scoring.chunked_head",
    "local_model": "policies.model_files",
    "make_vllm_worker": "vllm.supervised",
    "open_async": "engines.open_async",
    "start_server": "vllm.launch",
    "stateless_init_process_group": "weights.process_group",
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
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)

"""Policies: inference engines behind one prompt/response/full layout."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .chunked_head import chunked_log_prob
    from .engine import Engine, EngineDied, Generation, VersionSpan
    from .sampling import SamplingParameters
    from .token_distribution import TokenDistribution
    from .transformers_engine import TransformersEngine
    from .transformers_wrapper import TransformersWrapper
    from .vllm_async import AsyncVLLMEngine
    from .vllm_engine import VLLMEngine
    from .vllm_serve import start_server
    from .vllm_server import VLLMServerEngine
    from .vllm_wrapper import vLLMWrapper
    from .wrapper_base import LLMWrapperBase

_HOMES = {
    "AsyncVLLMEngine": "vllm_async",
    "Engine": "engine",
    "EngineDied": "engine",
    "Generation": "engine",
    "LLMWrapperBase": "wrapper_base",
    "SamplingParameters": "sampling",
    "TokenDistribution": "token_distribution",
    "TransformersEngine": "transformers_engine",
    "TransformersWrapper": "transformers_wrapper",
    "VLLMEngine": "vllm_engine",
    "VLLMServerEngine": "vllm_server",
    "VersionSpan": "engine",
    "chunked_log_prob": "chunked_head",
    "start_server": "vllm_serve",
    "vLLMWrapper": "vllm_wrapper",
}

__all__ = [
    "AsyncVLLMEngine",
    "Engine",
    "EngineDied",
    "Generation",
    "LLMWrapperBase",
    "SamplingParameters",
    "TokenDistribution",
    "TransformersEngine",
    "TransformersWrapper",
    "VLLMEngine",
    "VLLMServerEngine",
    "VersionSpan",
    "chunked_log_prob",
    "start_server",
    "vLLMWrapper",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
